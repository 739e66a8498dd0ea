"""Wait for a condition instead of for a while."""

from __future__ import annotations

import time
from collections.abc import Callable

POLL_S = 0.005


def until(true: Callable[[], object], timeout_s: float = 10.0) -> float:
    """Return the seconds it took until `true()` was. Raises TimeoutError."""
    began = time.monotonic()
    while not true():
        if time.monotonic() - began > timeout_s:
            raise TimeoutError(f"not true within {timeout_s} s: {true}")
        time.sleep(POLL_S)
    return time.monotonic() - began
