"""Plain direct reads of what the daemon wrote: what the disk takes for so many bytes, and no more.

The files of the store are read past the page cache, by several threads, without an index, without
a checksum, into memory that is there already.
"""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from pathlib import Path
from typing import NamedTuple

from kvstore.model.errors import Unavailable
from kvstore_bench.huge_pages import huge_memory

PIECE_NBYTES = 2 << 20
THREADS = 8  # as many as the file tier has


class _Piece(NamedTuple):
    path: Path
    offset: int


class PlainReads:
    """Reads of the files under `store`, each time of others than the last time."""

    def __init__(self, store: Path) -> None:
        """Raise Unavailable if there is nothing to read."""
        pieces = [each for path in sorted(store.rglob("*.segment")) for each in _pieces(path)]
        if not pieces:
            raise Unavailable(f"there are no segments under {store}")
        self._pieces = cycle(pieces)

    def seconds(self, nbytes: int) -> float:
        """Return how long reading so many bytes takes, in whole pieces, for exactly `nbytes`."""
        pieces = list(islice(self._pieces, max(1, -(-nbytes // PIECE_NBYTES))))
        files = {path: os.open(path, os.O_RDONLY | os.O_DIRECT) for path, _ in pieces}
        try:
            with huge_memory(len(pieces) * PIECE_NBYTES) as memory:
                took_s = _read(pieces, files, memory)
        finally:
            for fd in files.values():
                os.close(fd)
        return took_s * nbytes / (len(pieces) * PIECE_NBYTES)


def _read(pieces: list[_Piece], files: dict[Path, int], memory: mmap.mmap) -> float:
    for at in range(0, len(memory), mmap.PAGESIZE):
        memory[at] = 1  # the page is there
    with memoryview(memory) as view, ThreadPoolExecutor(THREADS) as threads:
        parts = [view[at : at + PIECE_NBYTES] for at in range(0, len(memory), PIECE_NBYTES)]
        list(threads.map(lambda _: time.sleep(0.001), range(THREADS)))  # they have begun
        began = time.perf_counter()
        reads = [
            threads.submit(os.preadv, files[path], [part], offset)
            for (path, offset), part in zip(pieces, parts, strict=True)
        ]
        done = sum(read.result() for read in reads)
        took_s = time.perf_counter() - began
        for part in parts:
            part.release()
    if done != len(memory):
        raise Unavailable("a segment became shorter while it was read")
    return took_s


def _pieces(path: Path) -> Iterator[_Piece]:
    """Yield the whole pieces of a file that hold anything: a hole costs a disk nothing."""
    fd = os.open(path, os.O_RDONLY)
    try:
        end = 0
        while True:
            begin = os.lseek(fd, end, os.SEEK_DATA)
            end = os.lseek(fd, begin, os.SEEK_HOLE)
            for offset in range(begin, end - PIECE_NBYTES + 1, PIECE_NBYTES):
                yield _Piece(path, offset)
    except OSError as error:
        if error.errno != errno.ENXIO:  # no more data
            raise
    finally:
        os.close(fd)
