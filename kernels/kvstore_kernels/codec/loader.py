"""Records from slots into an engine's memory: one call of the native library for a batch.

Each record is copied to private memory, and summed up and decoded there, before the next one: a
core's cache holds one. No thread holds the interpreter's lock meanwhile. `native/load.h` does it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_STORED = np.dtype([("address", "<u8"), ("nbytes", "<u8"), ("checksum", "<u8")])


class Fine(NamedTuple):
    """A stored fine part, and what its checksum has to be."""

    record: memoryview
    checksum: int


class Loaded(IntEnum):
    """What became of a record. LEFT: it is neither L3 nor EP; nothing was decoded."""

    BASE_ONLY = 0
    REFINED = 1
    WRONG = 2
    LEFT = 3


class _Load(ctypes.Structure):
    _fields_ = (
        ("plan", ctypes.c_void_p),
        ("headers", ctypes.c_void_p),
        ("planes", ctypes.c_void_p),
        ("room", ctypes.c_void_p),
        ("record_nbytes", ctypes.c_uint64),
        ("base_nbytes", ctypes.c_uint64),
        ("fine_nbytes", ctypes.c_uint64),
    )


class Loader:
    """Loads records of one shape. Safe from several threads at once, into different blocks."""

    def __init__(
        self,
        library: ctypes.CDLL,
        plan: int,
        headers: bytes,
        planes: npt.NDArray[np.uint8],
        sizes: tuple[int, int, int],
    ) -> None:
        """plan: the address of a coder's plan, which the caller keeps. headers: those of L3, of
        EP's base and of its fine part. planes: of keys and values in the base, then in the fine
        part. sizes: the most a base part has, EP's base, its fine part, in bytes."""
        self._library = library
        self._plan = plan
        self._headers = np.frombuffer(headers, np.uint8)
        self._planes = planes
        self._sizes = sizes
        record_nbytes, _, fine_nbytes = sizes
        self.room_nbytes = whole(record_nbytes) + whole(fine_nbytes)
        """What a call needs of private memory: a base part and a fine one."""

    def load(
        self,
        blocks: Sequence[int],
        bases: Sequence[memoryview],
        fines: Sequence[Fine | None],
        room: npt.NDArray[np.uint8],
    ) -> tuple[list[int], list[Loaded]]:
        """Load records into blocks, with the fine parts that there are and that belong to them.

        Returns the checksum of each base as it was copied, and what became of it; a record that is
        larger than any has none. room: uint8, private, of this call alone.
        """
        if len(room) < self.room_nbytes or not len(blocks) == len(bases) == len(fines):
            raise ValueError(f"blocks, bases, fine parts, and {self.room_nbytes:,} bytes of room")
        load = _Load(
            self._plan,
            self._headers.ctypes.data,
            self._planes.ctypes.data,
            room.ctypes.data,
            *self._sizes,
        )
        ids = np.array(blocks, np.int64)
        sums, states = np.zeros(len(ids), np.uint64), np.empty(len(ids), np.uint8)
        first, kept = _stored([Fine(base, 0) for base in bases])
        second, kept_too = _stored(fines)
        self._library.kvstore_load(
            ctypes.addressof(load),
            len(ids),
            ids.ctypes.data,
            first.ctypes.data,
            second.ctypes.data,
            sums.ctypes.data,
            states.ctypes.data,
        )
        del kept, kept_too
        return sums.tolist(), [Loaded(state) for state in states.tolist()]


def whole(nbytes: int) -> int:
    """Return how much room a record takes beside others."""
    return -(-nbytes // 64) * 64


def _stored(
    records: Sequence[Fine | None],
) -> tuple[npt.NDArray[np.void], list[npt.NDArray[np.uint8]]]:
    """Return where records lie, and what has to be kept meanwhile."""
    table = np.zeros(len(records), _STORED)
    views = []
    for at, each in enumerate(records):
        if each is not None and len(each.record):
            views.append(np.frombuffer(each.record, np.uint8))
            table[at] = (views[-1].ctypes.data, len(views[-1]), each.checksum)
    return table, views
