"""What the device gives right now: the yardstick of gets that read it.

A shared disk gives twice as much in one minute as in the next; what a system reads is compared with
what plain reads got just before and just after, so that it does not matter when its turn was.
"""

from __future__ import annotations

import time
from pathlib import Path

from kvstore.model.errors import Unavailable
from kvstore_bench.peers.blocks import Blocks
from kvstore_bench.peers.plain import Plain
from kvstore_bench.peers.system import Place

NBYTES_MAX = 256 << 20


class Device:
    """The device under `directory`, read as the floor reads it: one file a block, O_DIRECT."""

    def __init__(self, directory: Path, blocks: Blocks, threads: int) -> None:
        """Writes the blocks into `directory`, and leaves them there."""
        self._nbytes = blocks.count * blocks.nbytes
        self._plain = Plain(Place(directory, directory, blocks, threads))
        self._keys = blocks.keys(0)
        self._plain.put(self._keys)
        self._plain.flush()

    def bytes_per_s(self) -> float:
        """Read all of them once. Raises Unavailable if they are not there any more."""
        began = time.perf_counter()
        found = self._plain.get(self._keys)
        elapsed_s = time.perf_counter() - began
        if not all(found):
            raise Unavailable("the yardstick cannot be read: is the disk full?")
        return self._nbytes / elapsed_s

    def close(self) -> None:
        self._plain.close()


def yardstick_blocks(*, count: int, nbytes: int, seed: int) -> Blocks:
    """Return its memory: for as many turns as there are."""
    return Blocks(count=min(count, max(1, NBYTES_MAX // nbytes)), nbytes=nbytes, seed=seed)
