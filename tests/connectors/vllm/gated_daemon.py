"""`kvstore serve` whose disk waits in the middle of a load: `python gated_daemon.py GATE serve ...`

While the file GATE exists, all reads but the first few wait until it is gone; if it says "damage",
they return something else than the file has. Every load from files is answered early.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from kvstore.cli import main
from kvstore.decide.ask import Ask
from kvstore.decide.pace import Pace
from kvstore.decide.planner import Planner
from kvstore.move import promote
from kvstore.tier.file import RealDisk, frames

FREE_READS = 3
HELD_S = 20.0


class Gate:
    """Lets some reads pass and holds the others."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._left = FREE_READS

    def pass_through(self) -> bool:
        """Wait if it is closed. Returns whether the read shall be damaged."""
        with self._lock:
            if not self._path.exists():
                self._left = FREE_READS
                return False
            self._left -= 1
            if self._left >= 0:
                return False
        damage = self._path.read_text() == "damage"
        self._path.with_suffix(".held").touch()
        until = time.monotonic() + HELD_S
        while not damage and self._path.exists() and time.monotonic() < until:
            time.sleep(0.01)
        return damage


def install(gate: Gate) -> None:
    """Change what this process reads, and what it knows of its disk."""
    promote.EARLY_NBYTES_MIN = 0
    frames.SMALL_READ_NBYTES = 0  # these share threads
    Planner.__init__.__kwdefaults__["read_nbytes_max"] = 1  # a read for each record
    predict, preadv = Pace.predict, RealDisk.preadv

    def known(self: Pace, nbytes: int) -> float:
        return predict(self, nbytes) or 0.01

    def held(self: RealDisk, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        done = preadv(self, fd, buffers, offset)
        if gate.pass_through():
            buffers[0][8] ^= 1
        return done

    Pace.predict = known  # type: ignore[method-assign]
    Ask.stakes = lambda self, match: None  # type: ignore[method-assign]  # nothing to race against
    RealDisk.preadv = held  # type: ignore[method-assign]


if __name__ == "__main__":
    install(Gate(Path(sys.argv.pop(1))))
    main()
