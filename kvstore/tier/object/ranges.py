"""Which bytes to ask for, when these reads are wanted. Pure.

Reads that stand close together in one object become one request, as the frames of a run do: the
gap, a header page, costs less than a round trip. What is too large for one request is cut, so that
several connections carry it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.checksum import copy_bytes
from kvstore.errors import InvalidRequest
from kvstore.tier.object.layout import ObjectExtent

PART_NBYTES = 8 << 20  # one connection carries this at full speed; the cost of a request is small
GAP_NBYTES_MAX = 64 << 10


@dataclass(frozen=True, slots=True)
class ObjectRead:
    """Fill `targets` one after the other from byte `offset` of the frame at `extent`."""

    extent: ObjectExtent
    offset: int
    targets: Sequence[memoryview]

    @property
    def nbytes(self) -> int:
        return sum(target.nbytes for target in self.targets)


class Piece(NamedTuple):
    """`target` is filled from byte `offset` of the object. read: which of the reads it is of."""

    offset: int
    target: memoryview
    read: int


class Request(NamedTuple):
    """One ranged request, and what of its answer goes where, in ascending order."""

    name: str
    start: int
    nbytes: int
    pieces: tuple[Piece, ...]


def plan_requests(reads: Sequence[ObjectRead], part_nbytes: int = PART_NBYTES) -> list[Request]:
    """Return the requests that carry `reads` out. Raises InvalidRequest for impossible ones."""
    by_name: dict[str, list[Piece]] = {}
    for index, read in enumerate(reads):
        if read.offset < 0 or read.offset + read.nbytes > read.extent.nbytes:
            raise InvalidRequest(f"bytes {read.offset}..+{read.nbytes} of {read.extent.nbytes}")
        by_name.setdefault(read.extent.name, []).extend(_pieces(index, read, part_nbytes))
    return [
        request
        for name, pieces in by_name.items()
        for request in _joined(name, sorted(pieces, key=lambda piece: piece.offset), part_nbytes)
    ]


def scatter(request: Request, position: int, data: memoryview) -> None:
    """Put bytes of the answer, which stand at `position` in it, where they go."""
    begin = request.start + position
    end = begin + len(data)
    for offset, target, _ in request.pieces:
        first, last = max(begin, offset), min(end, offset + len(target))
        if first < last:
            copy_bytes(data[first - begin : last - begin], target[first - offset : last - offset])


def _pieces(index: int, read: ObjectRead, part_nbytes: int) -> Iterator[Piece]:
    position = read.extent.offset + read.offset
    for target in read.targets:
        view = target.cast("B")
        for start in range(0, len(view), part_nbytes):
            piece = view[start : start + part_nbytes]
            yield Piece(position, piece, index)
            position += len(piece)


def _joined(name: str, pieces: Sequence[Piece], part_nbytes: int) -> Iterator[Request]:
    """Join ascending pieces as long as they are near and make no more than one part."""
    joined: list[Piece] = []
    end = 0
    for piece in pieces:
        stop = piece.offset + len(piece.target)
        if joined and (
            piece.offset - end > GAP_NBYTES_MAX or stop - joined[0].offset > part_nbytes
        ):
            yield Request(name, joined[0].offset, end - joined[0].offset, tuple(joined))
            joined, end = [], 0
        joined.append(piece)
        end = max(end, stop)
    if joined:
        yield Request(name, joined[0].offset, end - joined[0].offset, tuple(joined))
