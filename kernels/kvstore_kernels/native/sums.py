"""Checksums of records, and copies that are summed up, without the interpreter lock.

What they sum up, and how, is kvstore/model/checksum.py's to say; it has the same in Python. Every
call needs the native library; `native.library()` says whether there is one.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore_kernels import native

LEAF_NBYTES = 64 * 1024
WORTHWHILE_NBYTES = 2 * LEAF_NBYTES
"""Less than this is summed up sooner than the interpreter lock is had back beside a busy thread."""

PAST_CACHES_NBYTES = 8 << 20
"""A batch as large is copied past the caches; PAST_CACHES of library.cpp is the same number."""

DIFFER = "a record and where it is copied to differ in size"

Buffer = bytes | bytearray | memoryview


def leaves_of(data: Buffer) -> list[int]:
    """Return the checksum of each leaf of `data`."""
    found = np.empty(-(-len(data) // LEAF_NBYTES), np.uint64)
    view = np.frombuffer(data, np.uint8)
    _library().kvstore_leaves(view.ctypes.data, len(view), found.ctypes.data)
    return found.tolist()


def sums_of(records: Sequence[Buffer]) -> list[int]:
    """Return the checksum of each record."""
    return _copied(records, None)


def copies(sources: Sequence[Buffer], targets: Sequence[memoryview]) -> list[int]:
    """Copy each source to the target of the same size; return the checksum of each.

    What is summed up is what is stored, whoever writes to a source meanwhile. Bytes are read once,
    but for up to 63 before the end of a record, which are summed up as often as they are read.
    """
    return _copied(sources, targets)


def received(fd: int, targets: Sequence[memoryview]) -> list[int]:
    """Fill targets from a socket that blocks, one behind the other; return the checksums of what
    has come. One call, however many pieces it comes in.

    Raises EOFError if the other side ends the connection first, and OSError: BlockingIOError after
    a silence as long as the socket's timeout.
    """
    starts, sizes = places_of(targets)
    outcome, found = ctypes.c_int64(), np.empty(len(targets), np.uint64)
    _library().kvstore_receive(
        fd,
        len(targets),
        starts.ctypes.data,
        sizes.ctypes.data,
        ctypes.byref(outcome),
        found.ctypes.data,
    )
    if outcome.value < 0:
        raise EOFError("the connection has ended")
    if outcome.value:
        raise OSError(outcome.value, os.strerror(outcome.value))
    return found.tolist()


class SharedCopies:
    """Copies that several threads make together: each calls `take_part`. When all of those calls
    have returned, the copies are there. A thread that comes late finds nothing left to do."""

    def __init__(self, sources: Sequence[Buffer], targets: Sequence[memoryview]) -> None:
        """Raises ValueError unless each source has the size of its target, which may be written."""
        self._kept: Final = (sources, targets)
        starts, sizes = addresses_of(sources)
        ends, room = places_of(targets)
        if not np.array_equal(sizes, room):
            raise ValueError(DIFFER)
        firsts = np.zeros(len(sizes) + 1, np.uint64)
        np.cumsum(-(-sizes.astype(np.int64) // LEAF_NBYTES), out=firsts[1:], dtype=np.uint64)
        leaves, self._sums = np.empty(int(firsts[-1]), np.uint64), np.empty(len(sizes), np.uint64)
        self._arrays: Final = (starts, ends, sizes, firsts, leaves, self._sums)
        self.nbytes: Final = int(sizes.sum())
        past = self.nbytes >= PAST_CACHES_NBYTES
        places = [each.ctypes.data for each in self._arrays]
        self._shared: Final = np.array([len(sizes), *places, past, 0, 0], np.uint64)
        self._library: Final = _library()

    def take_part(self) -> None:
        """Copy until nothing is left to begin with; others may not have ended by then."""
        self._library.kvstore_share(self._shared.ctypes.data)

    @property
    def checksums(self) -> list[int]:
        """Of each record as it was copied, when all have ended."""
        return self._sums.tolist()


def addresses_of(
    buffers: Sequence[Buffer],
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Return where each buffer begins and how many bytes it has. The caller keeps the buffers."""
    sizes = np.array([memoryview(each).nbytes for each in buffers], np.uint64)
    return np.array([_address_of(each) for each in buffers], np.uint64), sizes


def places_of(
    targets: Sequence[memoryview],
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Return the same of buffers that are written to. Raises ValueError for one that may not be."""
    if any(each.readonly for each in targets):
        raise ValueError("a target cannot be written to")
    return addresses_of(targets)


def _copied(sources: Sequence[Buffer], targets: Sequence[memoryview] | None) -> list[int]:
    starts, sizes = addresses_of(sources)
    ends = None
    if targets is not None:
        ends, room = places_of(targets)
        if not np.array_equal(sizes, room):
            raise ValueError(DIFFER)
    found = np.empty(len(sources), np.uint64)
    _library().kvstore_copies(
        len(sources),
        starts.ctypes.data,
        None if ends is None else ends.ctypes.data,
        sizes.ctypes.data,
        found.ctypes.data,
    )
    return found.tolist()


def _address_of(buffer: Buffer) -> int:
    if isinstance(buffer, memoryview) and buffer and not buffer.readonly:
        return ctypes.addressof(ctypes.c_char.from_buffer(buffer))  # a fifth of the time
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)


def _library() -> ctypes.CDLL:
    library = native.library()
    if library is None:
        raise RuntimeError(native.reason())
    return library
