"""A real LMCache for tests and benchmarks, from a folder of its own: it pins much."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ENVIRONMENT = {
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_DISABLE_BANNER": "1",
    "LMCACHE_LOG_LEVEL": "WARNING",
}
"""It sends nothing to anybody, and says little."""


def lmcache_site() -> Path | None:
    """Return the folder that LMCache was installed into; None: it is not here.

    That is what KVSTORE_LMCACHE names, or `lmcache` beside this environment's folders, where `make
    setup` puts it.
    """
    named = os.environ.get("KVSTORE_LMCACHE")
    site = Path(named) if named else Path(sys.prefix) / "lmcache"
    return site if (site / "lmcache" / "v1").is_dir() else None


def lmcache_environment(site: Path) -> dict[str, str]:
    """Return the environment of a process that imports LMCache from there."""
    path = [str(site), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, path))}
