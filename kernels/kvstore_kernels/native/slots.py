"""A hash table of row numbers, looked up without the interpreter lock.

What is in it, and what for, is kvstore/events/table.py's to say; it has the same in Python. Every
call needs the native library; `native.library()` says whether there is one.
"""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from kvstore_kernels import native

Hashes = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.int64]


class Slots:
    """Where a table lies: the caller keeps the arrays, and makes another of these when they move.

    slots, tags: of the table, 8 for each bucket; how many buckets there are is a power of 2.
    """

    def __init__(self, slots: npt.NDArray[np.int32], tags: npt.NDArray[np.uint8]) -> None:
        library = native.library()
        if library is None:
            raise RuntimeError(native.reason())
        self._library: ctypes.CDLL = library
        self._at = (len(slots) // 8, slots.ctypes.data, tags.ctypes.data)

    def find(self, hashes: Hashes, wanted: Hashes) -> tuple[Rows, Rows]:
        """Return the row of each of `wanted` and its slot, -1 where there is none. hashes: of each
        row."""
        found = np.empty((2, len(wanted)), np.int64)
        wanted = np.ascontiguousarray(wanted)
        rows = found.ctypes.data
        self._library.kvstore_slots_find(
            *self._at,
            hashes.ctypes.data,
            len(wanted),
            wanted.ctypes.data,
            rows,
            rows + found.itemsize * len(wanted),
        )
        return found[0], found[1]

    def place(self, hashes: Hashes, rows: Rows) -> int:
        """Give each hash a slot; returns how many of them were those of rows that left."""
        hashes, rows = np.ascontiguousarray(hashes), np.ascontiguousarray(rows)
        dead = np.empty(1, np.int64)
        self._library.kvstore_slots_place(
            *self._at, len(rows), hashes.ctypes.data, rows.ctypes.data, dead.ctypes.data
        )
        return int(dead[0])
