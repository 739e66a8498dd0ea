"""Where llama-cpp-python is, for tests and benchmarks: compiled once, in a folder of its own."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path


def llama_site() -> Path | None:
    """Return the folder that llama-cpp-python was installed into; None: it is not here.

    That is what KVSTORE_LLAMACPP names, or `llamacpp` beside this environment's folders, where
    `make setup-llamacpp` puts it, or this environment's own.
    """
    named = os.environ.get("KVSTORE_LLAMACPP")
    site = Path(named) if named else Path(sys.prefix) / "llamacpp"
    if (site / "llama_cpp" / "lib").is_dir():
        return site
    found = importlib.util.find_spec("llama_cpp")
    return Path(found.origin).parents[1] if found and found.origin else None
