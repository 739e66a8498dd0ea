"""How long the interpreter's lock is held, by samples.

A thread sleeps for about two milliseconds, again and again. To go on it needs the lock: where that
is free, it has left its processor once, for the sleep; where it is held, once more, to wait for it.
The kernel counts that. So a sampler that waits for a processor is not taken for one that waits for
the lock. A holder that waits for one holds it on: few cores, or busy ones, make the share larger.
The samples cost a hundredth or two of a core. A thread that counted instead would take a whole one
of those that copy, and could not tell a lock that is held from a thread that is not awake yet.

    python -m kvstore_bench.lock_samples FILE serve --set ...

is `kvstore serve` with such a thread. FILE has how many samples were taken, and how many found the
lock held. Who maps FILE reads both.
"""

from __future__ import annotations

import random
import resource
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from kvstore.cli import main
from kvstore.system.scheduling import run_promptly
from kvstore_bench.mapped_file import MappedFile

PERIOD_S = 0.002
SOON_S = 5e-5  # a shorter sleep may end before it begins
STOP_S = 10.0
_COUNTS = struct.Struct("QQ")


class Counts(NamedTuple):
    """Samples taken, and those of them that found the lock held."""

    taken: int
    held: int

    def since(self, before: Counts) -> Counts:
        return Counts(self.taken - before.taken, self.held - before.held)

    def and_also(self, more: Counts) -> Counts:
        return Counts(self.taken + more.taken, self.held + more.held)

    @property
    def share(self) -> float:
        """The share of the time in which the lock was held, from 0 to 1; 0 without a sample."""
        return self.held / self.taken if self.taken else 0.0


class LockSamples(MappedFile):
    """What is counted, in the file."""

    @property
    def counts(self) -> Counts:
        """Return what was counted, ever."""
        return Counts(*_COUNTS.unpack_from(self._shared))

    def note(self, *, held: bool, times: int = 1) -> None:
        """Count so many samples. For the one process that samples."""
        counts = self.counts
        _COUNTS.pack_into(self._shared, 0, counts.taken + times, counts.held + times * held)


@contextmanager
def sampled(to: LockSamples) -> Iterator[None]:
    """Sample this process's lock in a thread."""
    stop = threading.Event()
    thread = threading.Thread(
        target=_sample, args=(to, stop), name="kvstore-bench-samples", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(STOP_S)


def _sample(to: LockSamples, stop: threading.Event) -> None:
    run_promptly()  # a sample that is late for want of a processor is taken when others rest
    draw = random.Random(0)  # not in step with what is sampled
    due, before = time.perf_counter(), _waits()
    while not stop.is_set():
        now = time.perf_counter()
        while due < now + SOON_S:
            due += PERIOD_S * draw.uniform(0.5, 1.5)
        time.sleep(due - now)
        waits = _waits()
        held = waits - before > 1
        # While it waited for the lock, samples were due that would have found it held, too.
        missed = int((time.perf_counter() - due) / PERIOD_S) if held else 0
        to.note(held=held, times=1 + missed)
        before = waits


def _waits() -> int:
    """Return how often this thread has left its processor to wait for something."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


class LockWatch:
    """How long locks are held while something is done: those of one process or of several."""

    def __init__(self, processes: Mapping[str, LockSamples]) -> None:
        """processes: the samples of each, by what its names begin with."""
        self._processes = processes
        self._counts: dict[str, Counts] = {}
        self._took_s: dict[str, float] = {}
        self._nbytes: dict[str, int] = {}

    @contextmanager
    def during(self, kind: str, nbytes: int = 0) -> Iterator[None]:
        """Watch something that is done, which moves `nbytes`, for what is known of its kind."""
        before = {side: samples.counts for side, samples in self._processes.items()}
        began = time.perf_counter()
        yield
        took_s = time.perf_counter() - began
        for side, samples in self._processes.items():
            name, counts = f"{side}{kind}", samples.counts.since(before[side])
            self._counts[name] = self._counts.get(name, Counts(0, 0)).and_also(counts)
            self._took_s[name] = self._took_s.get(name, 0.0) + took_s
            self._nbytes[name] = self._nbytes.get(name, 0) + nbytes

    def held_shares(self) -> dict[str, float]:
        """Return the share of the time in which a lock was held, by process and kind."""
        return {name: counts.share for name, counts in self._counts.items()}

    def held_s_per_gb(self) -> dict[str, float]:
        """Return seconds per GB moved (10^9 bytes), by process and kind."""
        return {
            name: share * self._took_s[name] / (self._nbytes[name] / 1e9)
            for name, share in self.held_shares().items()
        }


@contextmanager
def own_watch() -> Iterator[LockWatch]:
    """Watch the lock of this process."""
    with (
        tempfile.TemporaryDirectory(prefix="kvstore-bench-") as directory,
        LockSamples(Path(directory) / "lock") as samples,
        sampled(samples),
    ):
        yield LockWatch({"": samples})


if __name__ == "__main__":
    with LockSamples(Path(sys.argv.pop(1))) as samples, sampled(samples):
        main()
