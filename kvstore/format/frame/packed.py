"""Many frame headers at once, packed as a footer holds them: looked through as vectors, parsed one
by one when somebody wants one.

A million headers take Python ten seconds to parse. What a start needs of all of them (where each
frame is, how large, how old, which keys) numpy finds in a few hundredths of that.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore.format.frame.header import (
    KILLED_MAX,
    PLAIN,
    RUN_BLOCKS_MAX,
    SEALED,
    STORED_NBYTES_MAX,
    FrameHeader,
    FrameKind,
    unpack_header,
)
from kvstore.format.frame.page import SegmentTag
from kvstore.model.block import KEY_NBYTES, PAGE_NBYTES, NamespaceId

Ints: TypeAlias = npt.NDArray[np.int64]
Unsigned: TypeAlias = npt.NDArray[np.uint64]
Bytes: TypeAlias = npt.NDArray[np.uint8]

_NBYTES = struct.Struct("<H")
# Where things are in a packed header: see `kvstore.format.frame`.
_KIND, _SEQUENCE, _OFFSET, _NAMESPACE, _COUNT, _ENTRIES = 10, 16, 24, 56, 132, 136
_STORED = 36
_GUARD_NBYTES = 8
ALIKE = 16  # records of one size in a row; then it is worth to look at many at once
PACKED_NBYTES_MAX = _NBYTES.size + _ENTRIES + KILLED_MAX * KEY_NBYTES + _GUARD_NBYTES


class PackedFrames:
    """The frames of one segment. All arrays are (frames,) but `heads`, and not to be changed.

    offsets: of the header page in the file. nbytes: of header page and padded payload. blocks: how
    many a run has, 0 in tombstones. heads: (blocks,) the first eight bytes of every block's key,
    frame after frame.
    """

    def __init__(self, body: bytes, tag: SegmentTag, *, sealed: bool = False) -> None:
        """Take a footer's body; sealed: of a sealed segment, opened. Raises ValueError where it is
        not one."""
        self.tag = tag
        self.sealed = sealed
        self._layout = SEALED if sealed else PLAIN
        self._body = body
        self._starts, self._sizes = _records(body)
        data = np.frombuffer(body, np.uint8)
        if np.any(self._sizes < _ENTRIES + _GUARD_NBYTES):
            raise ValueError("a record too short for a header")
        kinds = _numbers(data, self._starts + _KIND, 1)
        counts = _numbers(data, self._starts + _COUNT, 4)
        runs = kinds == FrameKind.RUN
        entry_nbytes = np.where(runs, self._layout.entry.size, KEY_NBYTES)
        most = np.where(runs, RUN_BLOCKS_MAX, KILLED_MAX)
        fits = self._sizes == _ENTRIES + counts * entry_nbytes + _GUARD_NBYTES
        if not np.all(fits & (counts <= most) & (counts >= runs)):
            raise ValueError("a record whose size is not that of its entries")
        self.offsets = _numbers(data, self._starts + _OFFSET, 8)
        self.sequences: Unsigned = _numbers(data, self._starts + _SEQUENCE, 8).view(np.uint64)
        self.blocks: Ints = np.where(runs, counts, 0)
        entries = self._entries()
        self.heads: Unsigned = _numbers(data, entries, 8).view(np.uint64)
        stored = _numbers(data, entries + _STORED, 4)
        if np.any((stored < 1) | (stored > STORED_NBYTES_MAX)):
            raise ValueError("a block of an impossible size")
        self.nbytes = PAGE_NBYTES + self._sums(-(-stored // PAGE_NBYTES) * PAGE_NBYTES)
        if np.any((self.offsets < 0) | (self.offsets % PAGE_NBYTES != 0)):
            raise ValueError("a frame at an impossible offset")

    @classmethod
    def of(cls, packed: Iterable[bytes], tag: SegmentTag, *, sealed: bool = False) -> PackedFrames:
        """Return the frames of packed headers."""
        return cls(join_packed(packed), tag, sealed=sealed)

    def __len__(self) -> int:
        return len(self.offsets)

    def header(self, index: int) -> FrameHeader | None:
        """Parse a header; None if it is damaged."""
        found = unpack_header(self.packed(index), self.tag, self._layout)
        return found[1] if found is not None else None

    def headers(self) -> list[tuple[int, FrameHeader]]:
        """Parse all: offset and header of those that are not damaged."""
        headers = map(self.header, range(len(self)))
        pairs = zip(self.offsets.tolist(), headers, strict=True)
        return [(offset, header) for offset, header in pairs if header is not None]

    def packed(self, index: int) -> bytes:
        """Return a packed header as `pack_header` made it."""
        start = int(self._starts[index])
        return self._body[start : start + int(self._sizes[index])]

    def namespaces(self) -> set[NamespaceId]:
        """Return the namespaces of all runs and tombstones."""
        data = np.frombuffer(self._body, np.uint8)
        numbers = [
            _numbers(data, self._starts + at, 8)
            for at in range(_NAMESPACE, _NAMESPACE + KEY_NBYTES, 8)
        ]
        first = np.ones(len(self), np.bool_)  # of frames in a row that are of one namespace
        first[1:] = np.any([each[1:] != each[:-1] for each in numbers], axis=0)
        places = (self._starts[first] + _NAMESPACE).tolist()
        return {NamespaceId(self._body[at : at + KEY_NBYTES]) for at in places}

    def where(self, wanted: npt.NDArray[np.bool_]) -> PackedFrames:
        """Return some of the frames. wanted: (frames,)."""
        if wanted.all():
            return self
        chosen = map(self.packed, np.flatnonzero(wanted).tolist())
        return PackedFrames.of(chosen, self.tag, sealed=self.sealed)

    def _entries(self) -> Ints:
        """Return where every block's entry starts in the body."""
        first = np.cumsum(self.blocks) - self.blocks
        at = np.arange(int(self.blocks.sum())) - np.repeat(first, self.blocks)
        return np.repeat(self._starts + _ENTRIES, self.blocks) + at * self._layout.entry.size

    def _sums(self, values: Ints) -> Ints:
        """Add up a value per block to one per frame."""
        total = np.concatenate(([0], np.cumsum(values)))
        ends = np.cumsum(self.blocks)
        sums: Ints = total[ends] - total[ends - self.blocks]
        return sums


def join_packed(packed: Iterable[bytes]) -> bytes:
    """Return the body of a footer."""
    return b"".join(_NBYTES.pack(len(record)) + record for record in packed)


def footer_record_nbytes(header: FrameHeader) -> int:
    """Return what a sealed footer takes for a frame."""
    entries = len(header.blocks) * SEALED.entry.size + len(header.killed) * KEY_NBYTES
    return _NBYTES.size + _ENTRIES + entries + _GUARD_NBYTES


def _records(body: bytes) -> tuple[Ints, Ints]:
    """Return where each record starts, and its bytes. Raises ValueError."""
    starts: list[int] = []
    sizes: list[int] = []
    at, end, last, alike = 0, len(body), -1, 0
    while at + _NBYTES.size <= end:
        nbytes = body[at] | body[at + 1] << 8
        alike = alike + 1 if nbytes == last else 0
        last, count = nbytes, 1
        if alike >= ALIKE:
            count, alike = _count_alike(body, at, nbytes), 0
        step = _NBYTES.size + nbytes
        starts.extend(range(at + _NBYTES.size, at + _NBYTES.size + count * step, step))
        sizes.extend([nbytes] * count)
        at += count * step
    if at != end:
        raise ValueError("the last record is cut")
    return _ints(starts), _ints(sizes)


def _count_alike(body: bytes, at: int, nbytes: int) -> int:
    """Return how many records from `at` on say that they have `nbytes`: one or more."""
    step = _NBYTES.size + nbytes
    most = (len(body) - at - _NBYTES.size) // step + 1
    said = np.ndarray((most,), "<u2", body, offset=at, strides=(step,))
    others = np.flatnonzero(said != nbytes)
    return int(others[0]) if len(others) else most


def _ints(values: Sequence[int]) -> Ints:
    return np.array(values, np.int64)


def _numbers(data: Bytes, places: Ints, nbytes: int) -> Ints:
    """Return the little-endian number of 1, 4 or 8 bytes at each place."""
    if not len(places):
        return _ints([])
    # One number at every byte, overlapping: gathered at once, wherever they stand.
    everywhere = np.ndarray((len(data) - nbytes + 1,), f"<u{nbytes}", data, strides=(1,))
    return everywhere[places].astype(np.int64)
