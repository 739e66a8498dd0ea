"""How long the interpreter's lock is held.

A second Python thread counts. What it counts less than beside a plain copy, which holds no lock, is
the share of the time in which it did not get it. A plain copy takes as much of cores and memory.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import median

Side = Callable[[], None]

SWITCH_S = 1e-5  # so that whoever wants the lock gets it, and nobody's wait is counted as work


def lock_held_shares(sides: Mapping[str, Side], rounds: int, count_s: float) -> dict[str, float]:
    """Return for each side but "plain" the share of its time in which the lock was not to be had:
    what a counting thread counts less than beside "plain". count_s: of counting beside each."""
    rates: dict[str, list[float]] = {name: [] for name in sides}
    with _counting() as counted:
        for _ in range(rounds):
            for name, side in sides.items():
                before, began = counted[0], time.perf_counter()
                while (took_s := time.perf_counter() - began) < count_s / rounds:
                    side()
                rates[name].append((counted[0] - before) / took_s)
    free = median(rates.pop("plain"))
    return {name: max(0.0, 1 - median(each) / free) for name, each in rates.items()}


@contextmanager
def _counting() -> Iterator[list[int]]:
    """Count in a thread, in the first item."""
    counted, stop = [0], threading.Event()

    def count() -> None:
        while not stop.is_set():
            counted[0] += 1

    before = sys.getswitchinterval()
    thread = threading.Thread(target=count, name="kvstore-bench-counts", daemon=True)
    sys.setswitchinterval(SWITCH_S)
    thread.start()
    try:
        yield counted
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(before)
