"""The blocks of a round: what is put, and room for what is got, in one page-aligned mapping."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Sequence

import numpy as np


class Blocks:
    """`count` random sources and as many targets of `nbytes`, a multiple of 4096, one after the
    other in `mapping`. Every page of a source names round, block and page: a page of another one
    is never taken for it."""

    def __init__(self, *, count: int, nbytes: int, seed: int) -> None:
        self.count = count
        self.nbytes = nbytes
        self._seed = seed
        self.mapping = mmap.mmap(-1, 2 * count * nbytes)
        self.rows = np.frombuffer(self.mapping, np.uint8).reshape(2 * count, nbytes)
        draw = np.random.default_rng(seed)
        for row in self.rows[:count]:
            row[:] = np.frombuffer(draw.bytes(nbytes), np.uint8)
        self.rows[count:] = 0  # touched once: the first touch of a page costs more than a copy

    @property
    def address(self) -> int:
        return int(self.rows.ctypes.data)

    @property
    def sources(self) -> list[memoryview]:
        return [memoryview(row) for row in self.rows[: self.count]]

    @property
    def targets(self) -> list[memoryview]:
        return [memoryview(row) for row in self.rows[self.count :]]

    def keys(self, number: int) -> list[bytes]:
        """Return 32 bytes for each block of a round."""
        names = (f"{self._seed}/{number}/{index}" for index in range(self.count))
        return [hashlib.sha256(name.encode()).digest() for name in names]

    def stamp(self, number: int) -> None:
        """Make the sources those of a round."""
        pages = self.rows[: self.count].reshape(self.count, -1, mmap.PAGESIZE)
        block = np.arange(self.count, dtype=np.uint64)[:, None] << np.uint64(24)
        page = np.arange(pages.shape[1], dtype=np.uint64)[None, :]
        pages[:, :, :8].view(np.uint64)[:, :, 0] = np.uint64(number << 44) | block | page

    def wipe(self) -> None:
        """Empty the targets: what is in them afterwards was got."""
        self.rows[self.count :] = 0

    def wrong(self, found: Sequence[bool]) -> int:
        """Count the blocks that were found and are not what was put."""
        pairs = zip(self.rows[: self.count], self.rows[self.count :], strict=True)
        return sum(
            not np.array_equal(source, target)
            for (source, target), there in zip(pairs, found, strict=True)
            if there
        )
