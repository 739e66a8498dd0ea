"""Slots for what is put, and publishing what was written into them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.decide.index import HeldSlot, StoredBlock, StoredPart
from kvstore.decide.planner.admission import Admission
from kvstore.decide.planner.eviction import Eviction
from kvstore.decide.planner.fine_parts import base_of, fine_slots, lacks_fine, starts_of
from kvstore.decide.planner.leases import Reservation
from kvstore.decide.planner.ledger import Ledger
from kvstore.decide.planner.steps import STEP_BLOCKS, Steps
from kvstore.model.block import BlockKey, Namespace, NamespaceId, Part, Span, padded


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
        refined: bool = False,
        bases: Sequence[int] = (),
    ) -> Steps[Placement]:
        """Find slots for records, evicting for them; None where one is stored already.

        Blocks are served from the first on: where room ends, every later one is refused, because
        the start of a prefix is worth more than its end. What the arena has of the prefix stays.
        Fine parts come last, so that those of a prefix lie together: a fine part has a slot only
        where its base has one, and none is not a refusal. parent: the block before the first one.
        sizes: of each record, in bytes, over the spans; none: what the namespace says. refined: a
        base that lacks its fine part is not stored. bases: as of `Reservation`; a fine part has a
        slot, too, where the arena has just that base, without it.
        """
        namespace = self._index.namespaces.use(namespace_id)
        starts = starts_of(spans)
        held: list[HeldSlot | None] = [None] * starts.pop()
        refused = 0
        base = [(s, at) for s, at in zip(spans, starts, strict=True) if not _is_fine(namespace, s)]
        tail: list[HeldSlot] = []  # pinned: of the last block that is here, so all before it stay
        self._move_pin(tail, self._index.get(namespace_id, parent) if parent is not None else None)
        try:
            for i in range(len(keys)):
                if i and i % STEP_BLOCKS == 0:
                    yield
                block = self._index.get(namespace_id, keys[i])
                self._move_pin(tail, block)
                for span, start in base:
                    if not span.begin <= i < span.end:
                        continue
                    if block and self._stays(namespace, block, span.part, refined=refined):
                        continue
                    at = start + i - span.begin
                    nbytes = self._nbytes(namespace, span.part, sizes, at)
                    slot = None if refused else self._eviction.find_slot(nbytes)
                    held[at] = slot
                    refused += slot is None
            if len(base) < len(spans):
                yield from self._place_fine(
                    namespace_id, keys, spans, sizes, held=held, bases=bases
                )
        except BaseException:  # nobody waits for the answer any more
            for slot in held:
                if slot is not None:
                    self._ledger.unpin(slot)
            raise
        finally:
            self._ledger.drop_pins(tail)
        return Placement(tuple(held), refused)

    def stored(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        spans: Sequence[Span],
        *,
        refined: bool = False,
    ) -> list[bool]:
        """Say of each record over the spans whether `place` would find it stored."""
        namespace = self._index.namespaces.use(namespace_id)
        blocks = self._index.find(namespace_id, keys)
        return [
            block is not None and self._stays(namespace, block, part, refined=refined)
            for part, begin, end in spans
            for block in blocks[begin:end]
        ]

    def _place_fine(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        spans: Sequence[Span],
        sizes: Sequence[int],
        *,
        held: list[HeldSlot | None],
        bases: Sequence[int],
    ) -> Steps[None]:
        """Find slots for the fine parts of the bases that have one in `held`, or are `bases`."""
        namespace = self._index.namespaces.use(namespace_id)
        whose = [key for _, begin, end in spans for key in keys[begin:end]] if bases else []
        looked_at = placed_nbytes = 0
        for at, base_at, part in fine_slots(namespace, spans):
            looked_at += 1
            if looked_at % STEP_BLOCKS == 0:
                yield
            base = held[base_at]
            if base is not None:
                takes = base.nbytes == namespace.groups[part.group].base_nbytes
            else:
                block = self._index.get(namespace_id, whose[at]) if bases else None
                takes = block is not None and _may_get(namespace, block, part, bases[base_at])
            if not takes:
                continue
            nbytes = self._nbytes(namespace, part, sizes, at)
            slot = self._eviction.find_slot(nbytes, fine=True, placed_nbytes=placed_nbytes)
            placed_nbytes += padded(nbytes) if slot is not None else 0
            held[at] = slot

    def _nbytes(self, namespace: Namespace, part: Part, sizes: Sequence[int], at: int) -> int:
        nbytes = sizes[at] if sizes else namespace.record_nbytes(part)
        return self._index.own_size(nbytes)

    def _stays(
        self, namespace: Namespace, block: StoredBlock, part: Part, *, refined: bool
    ) -> bool:
        """Say whether what is stored of a base part is what a put wants to be stored."""
        if block.record(part) is None:
            return False
        fine = (Part(i, part.shard) for i in namespace.fine if part.group == _refines(namespace, i))
        return not refined or not any(lacks_fine(namespace, block, each) for each in fine)

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
        starts = starts_of(spans)
        namespace = index.namespaces.use(reservation.namespace_id)
        order = sorted(range(len(spans)), key=lambda each: _is_fine(namespace, spans[each]))
        pairs = fine_slots(namespace, spans) if reservation.bases else ()
        added_to = {at: base_at for at, base_at, _ in pairs if held[base_at] is None}
        for i in range(len(reservation.keys)):
            if i and i % STEP_BLOCKS == 0:
                yield
            touched = None
            came: set[Part] = set()  # base parts that this step publishes
            for each in order:
                part, begin, end = spans[each]
                at = starts[each] + i - begin
                slot = held[at] if begin <= i < end else None
                if slot is None:
                    continue
                fine = part.group in namespace.fine
                if fine and base_of(namespace, part) not in came:
                    there = index.get(reservation.namespace_id, reservation.keys[i])
                    if there is None or at not in added_to:
                        continue  # another writer's base is there, or ours was taken away
                    if not _may_get(namespace, there, part, reservation.bases[added_to[at]]):
                        continue
                block = self._block_of(reservation, i)
                before = block.record(part) if block is not None else None
                if block is None or not (
                    before is None or fine or self._gives_way(reservation, namespace, block, part)
                ):
                    existing += 1
                    continue
                came.add(part)
                record = StoredPart(index.own_part(part), slot.nbytes, checksums[at], fine=fine)
                replaced = before is not None and self._replace(block, before, record)
                block.add(record)
                self._ledger.make_resident(block, record, slot)
                must = durable or replaced
                if self._is_queued(block, record, must=must, copy=reservation.copy):
                    self._ledger.dirty.add(block, part, record)
                touched = block
                new += 1
            if touched is not None:
                index.refresh(touched)
        return new, existing

    def _gives_way(
        self, reservation: Reservation, namespace: Namespace, block: StoredBlock, part: Part
    ) -> bool:
        """Say whether a refined put replaces the base that is there."""
        refined = reservation.refined
        return refined and not self._stays(namespace, block, part, refined=refined)

    def _replace(self, block: StoredBlock, before: StoredPart, record: StoredPart) -> bool:
        """Drop a base without its fine part, or a fine part that a file has of an older base.

        Returns whether the durable copy of a base stays on its disk until `record` is durable.
        """
        kept = None if record.fine else self._ledger.replaced.keep(block, before)
        self._ledger.drop(block, before)
        self._ledger.replaced.by(record, kept)
        return kept is not None

    def _is_queued(self, block: StoredBlock, record: StoredPart, *, must: bool, copy: bool) -> bool:
        """Say whether a record that was just put is written to the file tier now."""
        if not self._ledger.has_file or not self._ledger.dirty.takes(record):
            return False
        if copy and not must:
            self._admission.copied(block.key)
            return False
        now = must or self._admission.is_written_at_once(block)
        return now and self._admission.to_be_written(block, record)

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


def _refines(namespace: Namespace, group: int) -> int:
    return namespace.groups[group].refines


def _may_get(namespace: Namespace, block: StoredBlock, part: Part, base_checksum: int) -> bool:
    """Say whether the arena has just that base of a block, and it lacks its fine part `part`."""
    base = block.record(base_of(namespace, part))
    is_it = base is not None and base.resident is not None and base.checksum == base_checksum
    return is_it and lacks_fine(namespace, block, part)


def _is_fine(namespace: Namespace, span: Span) -> bool:
    return span.part.group in namespace.fine
