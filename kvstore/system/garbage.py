"""How long the garbage collector may stop this process."""

from __future__ import annotations

import gc
from typing import Any

# Blocks rest in arrays, but frames, requests and blocks in use are objects that live long and form
# no cycles: half a million of them would stop the daemon for half a second. So what has survived a
# collection of the oldest generation is never looked at again: the next has a few thousand objects
# to look at, in less than a millisecond. What forms cycles (gRPC's calls do) is still freed, unless
# such a collection finds it alive: that is never freed. So what the daemon itself does often must
# form none. Every object is looked at once per generation, however small they are.
GC_THRESHOLDS = (500, 2, 4)


def bound_collections() -> None:
    """Let this process's garbage collections be short however much it holds."""
    gc.set_threshold(*GC_THRESHOLDS)
    gc.callbacks.append(_freeze_survivors)


def _freeze_survivors(phase: str, info: dict[str, Any]) -> None:
    if phase == "stop" and info["generation"] == 2:
        gc.freeze()
