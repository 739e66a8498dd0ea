"""Slots for what is put, and publishing what was written into them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from kvstore.decide.index import HeldSlot, StoredBlock, StoredPart
from kvstore.decide.planner.admission import Admission
from kvstore.decide.planner.eviction import Eviction
from kvstore.decide.planner.leases import Reservation
from kvstore.decide.planner.ledger import Ledger
from kvstore.decide.planner.steps import STEP_BLOCKS, Steps
from kvstore.model.block import BlockKey, NamespaceId, Span


@dataclass(frozen=True, slots=True)
class Placement:
    """What `place` found: unpinned slots over the spans, and how many records had no room."""

    held: tuple[HeldSlot | None, ...]
    refused: int


class Puts:
    """Steps of a put: `place`, the client writes, `commit`."""

    def __init__(self, ledger: Ledger, eviction: Eviction, admission: Admission) -> None:
        self._ledger = ledger
        self._index = ledger.index
        self._eviction = eviction
        self._admission = admission

    def place(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        spans: Sequence[Span],
        parent: BlockKey | None = None,
        *,
        sizes: Sequence[int] = (),
    ) -> Steps[Placement]:
        """Find slots for records, evicting for them; None where one is stored already.

        Blocks are served from the first on: where room ends, every later one is refused, because
        the start of a prefix is worth more than its end. What the arena has of the prefix stays.
        parent: the block before the first one. sizes: of each record, in bytes, over the spans;
        none: what the namespace says.
        """
        namespace = self._index.namespaces.use(namespace_id)
        starts = _starts(spans)
        held: list[HeldSlot | None] = [None] * starts.pop()
        refused = 0
        tail: list[HeldSlot] = []  # pinned: of the last block that is here, so all before it stay
        self._move_pin(tail, self._index.get(namespace_id, parent) if parent is not None else None)
        try:
            for i in range(len(keys)):
                if i and i % STEP_BLOCKS == 0:
                    yield
                block = self._index.get(namespace_id, keys[i])
                self._move_pin(tail, block)
                for span, start in zip(spans, starts, strict=True):
                    if not span.begin <= i < span.end or (block and block.record(span.part)):
                        continue
                    at = start + i - span.begin
                    nbytes = sizes[at] if sizes else namespace.record_nbytes(span.part)
                    slot = None if refused else self._eviction.find_slot(nbytes)
                    held[at] = slot
                    refused += slot is None
        except BaseException:  # nobody waits for the answer any more
            for slot in held:
                if slot is not None:
                    self._ledger.unpin(slot)
            raise
        finally:
            self._ledger.drop_pins(tail)
        return Placement(tuple(held), refused)

    def _move_pin(self, tail: list[HeldSlot], block: StoredBlock | None) -> None:
        """Pin what the arena has of a block, instead of `tail`."""
        if block is None or not block.resident_parts:
            return
        slots = [r.resident for r in block.records if r.resident is not None]
        for slot in slots:
            slot.pins += 1
        self._ledger.drop_pins(tail)
        tail[:] = slots

    def commit(
        self,
        reservation: Reservation,
        held: Sequence[HeldSlot | None],
        checksums: Sequence[int],
        *,
        durable: bool = False,
    ) -> Steps[tuple[int, int]]:
        """Publish what was written into reserved slots. Keep them pinned until the last step.

        durable: write it behind at once in any case.

        Returns how many records are new, and how many another writer had published meanwhile.
        """
        new = existing = 0
        spans, index = reservation.spans, self._index
        starts = _starts(spans)
        for i in range(len(reservation.keys)):
            if i and i % STEP_BLOCKS == 0:
                yield
            touched = None
            for (part, begin, end), start in zip(spans, starts[:-1], strict=True):
                at = start + i - begin
                slot = held[at] if begin <= i < end else None
                if slot is None:
                    continue
                block = self._block_of(reservation, i)
                if block is None or block.record(part) is not None:
                    existing += 1
                    continue
                record = StoredPart(index.own_part(part), slot.nbytes, checksums[at])
                block.add(record)
                self._ledger.make_resident(block, record, slot)
                now = durable or self._admission.is_written_at_once(block)
                if self._ledger.has_file and now and self._admission.to_be_written(block, record):
                    self._ledger.dirty.add(block, part, record)
                touched = block
                new += 1
            if touched is not None:
                index.refresh(touched)
        return new, existing

    def _block_of(self, reservation: Reservation, i: int) -> StoredBlock | None:
        """Return the block to store under, None if another namespace has its key."""
        key = reservation.keys[i]
        block = self._index.get(reservation.namespace_id, key)
        if block is None and self._index.by_key(key) is None:
            parent = reservation.keys[i - 1] if i else reservation.parent
            if not i and parent is not None and (above := self._index.by_key(parent)) is not None:
                parent = above.key  # the same object
            block = StoredBlock(key, reservation.namespace_id, reservation.first_block + i, parent)
            self._index.add(block)
        return block


def _starts(spans: Sequence[Span]) -> list[int]:
    """Return where the slots of each span start in a grant, and at last how many there are."""
    return [0, *accumulate(end - begin for _, begin, end in spans)]
