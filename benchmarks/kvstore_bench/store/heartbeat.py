"""`kvstore serve` that notes the longest pause of its event loop.

    python -m kvstore_bench.store.heartbeat FILE serve --set ...

The loop is to beat every millisecond. FILE has the longest that a beat was late, in seconds, as one
double. Who maps FILE may set it to 0, and reads later what was longest since.
"""

from __future__ import annotations

import asyncio
import struct
import sys
import time
from pathlib import Path
from typing import Any

from kvstore import daemon
from kvstore.cli import main
from kvstore_bench.mapped_file import MappedFile

BEAT_S = 0.001
_LATE = struct.Struct("d")


class Heartbeat(MappedFile):
    """What is counted, in the file."""

    @property
    def longest_s(self) -> float:
        """The longest pause since `reset`."""
        longest: float = _LATE.unpack_from(self._shared)[0]
        return longest

    def note(self, late_s: float) -> None:
        """Keep a pause if it is the longest."""
        if late_s > self.longest_s:
            _LATE.pack_into(self._shared, 0, late_s)

    def reset(self) -> None:
        _LATE.pack_into(self._shared, 0, 0.0)


async def _beat(to: Heartbeat) -> None:
    before = time.monotonic()
    while True:
        await asyncio.sleep(BEAT_S)
        now = time.monotonic()
        to.note(now - before - BEAT_S)
        before = now


def beating(to: Heartbeat, serve: Any) -> Any:
    """Return a coroutine function that serves while the loop beats."""

    async def served(*args: Any, **kwargs: Any) -> None:
        beats = asyncio.create_task(_beat(to))
        try:
            await serve(*args, **kwargs)
        finally:
            beats.cancel()

    return served


if __name__ == "__main__":
    daemon.serve = beating(Heartbeat(Path(sys.argv.pop(1))), daemon.serve)
    main()
