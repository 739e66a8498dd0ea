"""`inside/` runs in processes of its own that have SGLang: see `test_inside.py`."""

from __future__ import annotations

import os

INSIDE = "KVSTORE_INSIDE_SGLANG"

collect_ignore_glob = [] if os.environ.get(INSIDE) else ["inside*"]
