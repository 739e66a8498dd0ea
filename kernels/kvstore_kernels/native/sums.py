"""Checksums of records, and copies that are summed up, without the interpreter lock.

What they sum up, and how, is kvstore/model/checksum.py's to say; it has the same in Python. Every
call needs the native library; `native.library()` says whether there is one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore_kernels import native

LEAF_NBYTES = 64 * 1024
WORTHWHILE_NBYTES = 2 * LEAF_NBYTES
"""Less than this is summed up sooner than the interpreter lock is had back beside a busy thread."""

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

    A source is read once: what is summed up is what is stored, whoever writes to it meanwhile.
    """
    return _copied(sources, targets)


def addresses_of(
    buffers: Sequence[Buffer],
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Return where each buffer begins and how many bytes it has. The caller keeps the buffers."""
    views = [np.frombuffer(each, np.uint8) for each in buffers]
    sizes = np.array([len(each) for each in views], np.uint64)
    return np.array([each.ctypes.data for each in views], np.uint64), sizes


def _copied(sources: Sequence[Buffer], targets: Sequence[memoryview] | None) -> list[int]:
    starts, sizes = addresses_of(sources)
    ends = None
    if targets is not None:
        ends, room = addresses_of(targets)
        if not np.array_equal(sizes, room):
            raise ValueError("a record and where it is copied to differ in size")
    found = np.empty(len(sources), np.uint64)
    _library().kvstore_copies(
        len(sources),
        starts.ctypes.data,
        None if ends is None else ends.ctypes.data,
        sizes.ctypes.data,
        found.ctypes.data,
    )
    return found.tolist()


def _library() -> ctypes.CDLL:
    library = native.library()
    if library is None:
        raise RuntimeError(native.reason())
    return library
