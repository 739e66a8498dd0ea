"""A real SGLang for tests, in a folder of its own: other engines would find what it brings."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ENVIRONMENT = {"HF_HUB_OFFLINE": "1"}


def sglang_site() -> Path | None:
    """Return the folder that SGLang was installed into; None: it is not here.

    That is what KVSTORE_SGLANG names, or `sglang` beside this environment's folders, where `make
    setup` puts it.
    """
    named = os.environ.get("KVSTORE_SGLANG")
    site = Path(named) if named else Path(sys.prefix) / "sglang"
    return site if (site / "sglang" / "srt").is_dir() else None


def sglang_environment(site: Path) -> dict[str, str]:
    """Return the environment of a process that imports SGLang from there."""
    path = [os.environ.get("PYTHONPATH", ""), str(site)]
    return {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, path))}
