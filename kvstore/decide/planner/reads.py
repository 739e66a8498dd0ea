"""Promotion: which frames are read for a prefix, into which slots, and what became of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from kvstore.decide.index import HeldSlot, StoredBlock, StoredFrame, StoredPart
from kvstore.decide.planner.eviction import Eviction
from kvstore.decide.planner.fine_parts import base_of
from kvstore.decide.planner.ledger import Ledger
from kvstore.decide.planner.moves import Read
from kvstore.decide.planner.places import is_readable
from kvstore.model.block import BlockKey, NamespaceId, Part, Span, padded
from kvstore.model.outcome import Reason

READ_NBYTES = 2 << 20
LARGE_LOAD_NBYTES = 32 << 20  # of such a load, reads are longer: each costs the loop as much
LARGER = 2


@dataclass(slots=True)
class _Piece:
    """What one read promotes: position in the frame, which record, where it goes."""

    frame: StoredFrame  # pinned
    items: list[tuple[int, StoredBlock, StoredPart, HeldSlot]] = field(default_factory=list)

    def read(self) -> Read:
        self.items.sort(key=itemgetter(0))
        positions, blocks, records, slots = zip(*self.items, strict=True)
        return Read(self.frame, self.frame.extent, positions, blocks, records, slots)


class Reads:
    """Reads of frames. read_nbytes_max: what one read promotes at most, if more than a record; of a
    large load, LARGER times as much."""

    def __init__(self, ledger: Ledger, eviction: Eviction, read_nbytes_max: int) -> None:
        self._ledger = ledger
        self._index = ledger.index
        self._eviction = eviction
        self._read_nbytes_max = read_nbytes_max

    def plan(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        spans: Sequence[Span],
        *,
        nbytes: int = 0,
        first_alone: bool = False,
        in_files: bool = False,
    ) -> Generator[Read]:
        """Plan to promote what `spans` names and the arena lacks, as far as there is room.

        In prefix order, in pieces of a few megabytes or one record, each yielded as soon as it is
        planned: the disk reads the first while the last are still looked for, and one large frame
        keeps a device's queue busy. Closed early, it gives back what it took.
        nbytes: about as many will be read.
        first_alone: the first block comes in reads of its own, and so is resident sooner.
        in_files: what the asker can read in files by itself stays there.
        """
        pieces: dict[Part, _Piece] = {}
        planned: deque[Read] = deque()
        most = self._read_nbytes_max * (LARGER if nbytes >= LARGE_LOAD_NBYTES else 1)
        try:
            first = min((span.begin for span in spans), default=0)
            for index in range(first, max((span.end for span in spans), default=0)):
                while planned:
                    yield planned.popleft()
                block = self._index.get(namespace_id, keys[index])
                wanted = [part for part, begin, end in spans if begin <= index < end]
                if block and in_files:
                    wanted = [part for part in wanted if not is_readable(block.record(part))]
                if block and not all(
                    self._arrives(block, p, most, pieces, planned) for p in wanted
                ):
                    break
                if first_alone and pieces:
                    planned += [piece.read() for piece in pieces.values()]
                    pieces.clear()
                    first_alone = False
            planned += [piece.read() for piece in pieces.values()]
            pieces.clear()
            while planned:
                yield planned.popleft()
        finally:
            for read in (*planned, *(piece.read() for piece in pieces.values())):
                self.done(read, read.positions, corrupt=False)

    def _arrives(
        self,
        block: StoredBlock,
        part: Part,
        most: int,
        pieces: dict[Part, _Piece],
        planned: deque[Read],
    ) -> bool:
        """Put a record that is only in a frame into the part's piece, which has `most` bytes, or
        one record. False: there is no room."""
        record = block.record(part)
        if record is None or record.frame is None or record.resident or record.loading:
            return True
        if record.fine and self._base_checksum(block, record) is None:
            return True  # its base may be on a disk that is missing
        slot = self._eviction.find_slot(record.nbytes, fine=record.fine)
        if slot is None:
            return False
        slot.pins += 1
        record.loading = slot
        piece = pieces.get(part)
        limit = most // padded(record.nbytes)
        if piece is not None and (piece.frame is not record.frame or len(piece.items) >= limit):
            planned.append(piece.read())
            piece = None
        if piece is None:
            record.frame.pins += 1
            piece = pieces[part] = _Piece(record.frame)
        piece.items.append((record.position, block, record, slot))
        return True

    def unpaired(self, read: Read, named: Sequence[int | None]) -> list[int]:
        """Return the positions of fine parts that belong to another base than the one that is here.

        named: the checksum of the base that each record says it was made with; None: it says none.
        """
        items = zip(read.positions, read.blocks, read.stored, named, strict=True)
        return [
            position
            for position, block, record, value in items
            if record.fine and value is not None and value != self._base_checksum(block, record)
        ]

    def _base_checksum(self, block: StoredBlock, fine: StoredPart) -> int | None:
        namespace = self._index.namespaces.spec(block.namespace_id)
        base = block.record(base_of(namespace, fine.part)) if namespace is not None else None
        return base.checksum if base is not None else None

    def done(self, read: Read, bad: Sequence[int], *, corrupt: bool) -> None:
        """Note which blocks came up; positions in `bad` did not, and are forgotten if `corrupt`."""
        items = zip(read.positions, read.blocks, read.stored, read.held, strict=True)
        for position, block, record, slot in items:
            record.loading = None
            if block.record(read.frame.part) is not record:
                continue  # deleted meanwhile
            if position not in bad:
                self._ledger.make_resident(block, record, slot)
                self._index.refresh(block)
            elif (
                corrupt and record.frame is read.frame
            ):  # else a disk that is back has a better one
                self._ledger.forget_part(block, record, Reason.CORRUPT)
        self._ledger.drop_pins(read.held)
        self._ledger.unpin_frame(read.frame)
