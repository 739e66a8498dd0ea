"""`inside/` runs in processes of its own that have SGLang: see `test_inside.py`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvstore.testing.sglang import sglang_site

INSIDE = "KVSTORE_INSIDE_SGLANG"

collect_ignore_glob = [] if os.environ.get(INSIDE) else ["inside*"]


@pytest.fixture(scope="session")
def site() -> Path:
    """The folder of a real SGLang."""
    found = sglang_site()
    if found is None:
        pytest.skip("SGLang is not installed: `make setup` does that")
    return found
