"""Plan the ranged requests for a list of reads. Pure.

Reads that are close together in one object become one request, as the frames of a run do: the gap,
a header page, costs less than a round trip. Larger ranges are cut, so that several connections
carry them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.format.frame import FrameHeader, open_block
from kvstore.model.errors import InvalidRequest
from kvstore.tier.object.layout import ObjectExtent

# One connection carries this at full speed, and the request itself costs little.
PART_NBYTES = 8 << 20
GAP_NBYTES_MAX = 64 << 10


@dataclass(frozen=True, slots=True)
class ObjectRead:
    """Fill `targets` one after the other from byte `offset` of the frame at `extent`.

    then: called by a thread as soon as they are full and before the read returns, while the bytes
    may still be in the processor's cache. Called again if they are filled again. Must not raise.
    block: of an encrypted object, the frame's header and which of its blocks this is: the only
    target is filled with its plain bytes, or with zeros if its tag is wrong.
    """

    extent: ObjectExtent
    offset: int
    targets: Sequence[memoryview]
    then: Callable[[], None] | None = None
    block: tuple[FrameHeader, int] | None = None

    @property
    def nbytes(self) -> int:
        return sum(target.nbytes for target in self.targets)


class Piece(NamedTuple):
    """`target` is filled from byte `offset` of the object. read: the index of its read."""

    offset: int
    target: memoryview
    read: int


class Request(NamedTuple):
    """One ranged request; its answer fills `buffers` one after the other. reads: for each buffer
    the index of its read, -1 for none."""

    name: str
    start: int
    buffers: tuple[memoryview, ...]
    reads: tuple[int, ...]

    def ends(self, index: int) -> int:
        """Return the read whose last buffer here is buffer `index`, -1 for none."""
        following = self.reads[index + 1] if index + 1 < len(self.reads) else -1
        return self.reads[index] if self.reads[index] != following else -1

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.buffers))


def is_sealed(read: ObjectRead) -> bool:
    """Say whether a read is of an encrypted block."""
    return read.extent.key is not None and read.block is not None


def opened(read: ObjectRead) -> Callable[[], None]:
    """Return what decrypts an encrypted block where it was received, and then tells of it: also of
    zeros, because an earlier attempt may have told of the right bytes."""
    key = read.extent.key
    assert key is not None
    assert read.block is not None
    (header, position), (target,) = read.block, read.targets

    def run() -> None:
        open_block(header, position, key, target)
        if read.then is not None:
            read.then()

    return run


def plan_requests(reads: Sequence[ObjectRead], part_nbytes: int = PART_NBYTES) -> list[Request]:
    """Return the requests for `reads`. Raises InvalidRequest for impossible ones."""
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


def _pieces(index: int, read: ObjectRead, part_nbytes: int) -> Iterator[Piece]:
    position = read.extent.offset + read.offset
    for target in read.targets:
        view = target.cast("B")
        for start in range(0, len(view), part_nbytes):
            piece = view[start : start + part_nbytes]
            yield Piece(position, piece, index)
            position += len(piece)


def _joined(name: str, pieces: Sequence[Piece], part_nbytes: int) -> Iterator[Request]:
    """Join ascending pieces while they are near and make at most one part. Bytes that two reads
    want are requested twice, because an answer fills each byte into one buffer."""
    joined: list[Piece] = []
    end = 0
    for piece in pieces:
        stop = piece.offset + len(piece.target)
        far = not end <= piece.offset <= end + GAP_NBYTES_MAX
        if joined and (far or stop - joined[0].offset > part_nbytes):
            yield _request(name, joined)
            joined = []
        joined.append(piece)
        end = stop
    if joined:
        yield _request(name, joined)


def _request(name: str, pieces: Sequence[Piece]) -> Request:
    """Return the request for pieces in ascending order; the bytes between them are discarded."""
    filled: list[tuple[memoryview, int]] = []
    end = start = pieces[0].offset
    for piece in pieces:
        if piece.offset > end:
            filled.append((memoryview(bytearray(piece.offset - end)), -1))
        filled.append((piece.target, piece.read))
        end = piece.offset + len(piece.target)
    buffers, reads = zip(*filled, strict=True)
    return Request(name, start, buffers, reads)
