"""What is known of a block while somebody uses it: its records, their slots, and their frames.

A block that nobody uses rests in columns instead: see `resting.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from kvstore.model.block import PAGE_NBYTES, BlockKey, Namespace, NamespaceId, Part, Slot

Extent = Any  # a place of the file tier; opaque here
_PAGE_SHIFT = PAGE_NBYTES.bit_length() - 1
_OFFSET_BITS = 48 - _PAGE_SHIFT  # of pages: the rest of 64 bits numbers extents, of which many come
_OFFSET_MASK = (1 << _OFFSET_BITS) - 1
LISTED_MAX = 4  # records of a block that are kept in a tuple
MASKS_MAX = 1 << 12  # pairs of group masks that are known to be the same
UNJUDGED = -1  # in the place of group masks: what the namespace is was not known
ABSENT = (0, 0)  # `StoredBlock.refined` of a block that is not there
_masks: dict[tuple[int, int], tuple[int, int]] = {}  # one object per pair: see `_own_masks`


class HeldSlot:
    """An arena slot and who keeps it from reuse: the index, and every lease or move on it.

    place: extent and offset in one number, of 64 bits. Offsets are whole pages.
    """

    __slots__ = ("indexed", "nbytes", "pins", "place")

    def __init__(self, slot: Slot) -> None:
        self.place = slot.extent << _OFFSET_BITS | slot.offset >> _PAGE_SHIFT
        self.nbytes = slot.nbytes
        self.pins = 0
        self.indexed = False

    @classmethod
    def at(cls, place: int, nbytes: int) -> HeldSlot:
        """Return a slot that the index, and nobody else, holds."""
        held = cls.__new__(cls)
        held.place, held.nbytes, held.pins, held.indexed = place, nbytes, 0, True
        return held

    @property
    def slot(self) -> Slot:
        return slot_at(self.place, self.nbytes)


def slot_at(place: int, nbytes: int) -> Slot:
    """Return the slot at a place: extent and offset in one number."""
    offset = (place & _OFFSET_MASK) << _PAGE_SHIFT
    return Slot._make((place >> _OFFSET_BITS, offset, nbytes))  # half the time


class StoredFrame:
    """A run in the file tier. It leaves as a whole; pins are reads and writes under way, and leases
    of clients that read it in its file. sequence: the higher one is the newer one. checked_at: when
    its bytes were last seen to be good, on the planner's clock. is_out: its disk went out of use,
    and what becomes of it there is not known any more. number, resting: see `resting.Frames`."""

    __slots__ = (
        "blocks",
        "checked_at",
        "codec_id",
        "extent",
        "is_out",
        "number",
        "part",
        "pins",
        "resting",
        "sequence",
        "stored_nbytes",
    )

    def __init__(
        self,
        extent: Extent,
        part: Part,
        codec_id: int,
        stored_nbytes: tuple[int, ...],
        sequence: int,
    ) -> None:
        self.extent = extent
        self.sequence = sequence
        self.part = part
        self.codec_id = codec_id
        self.stored_nbytes = stored_nbytes
        self.blocks: dict[int, BlockKey] = {}  # position in the frame -> block that is live
        self.pins = 0
        self.number = self.resting = 0
        self.is_out = False
        self.checked_at = float("-inf")


class FoundRun(NamedTuple):
    """What a frame found on disk says of the blocks in it that are live, one or more. Sequences of
    one item for each of them.

    first_block: the index of the block at position 0.
    """

    namespace_id: NamespaceId
    first_block: int
    positions: Sequence[int]
    keys: Sequence[BlockKey]
    parents: Sequence[BlockKey | None]
    sizes: Sequence[int]
    checksums: Sequence[int]

    @property
    def fits_rows(self) -> bool:
        """Whether the rows of `resting.py` have room for its numbers."""
        last = max(self.positions)
        return last < 1 << 16 and self.first_block + last < 1 << 32 and max(self.sizes) < 1 << 32


class StoredPart:
    """One record: its checksum and where its bytes are. `loading` is a slot a read is filling.
    fine: its group refines another one."""

    __slots__ = (
        "checksum",
        "dirty",
        "fine",
        "frame",
        "loading",
        "nbytes",
        "part",
        "position",
        "resident",
    )

    def __init__(self, part: Part, nbytes: int, checksum: int, *, fine: bool = False) -> None:
        self.fine = fine
        self.part = part
        self.nbytes = nbytes
        self.checksum = checksum
        self.resident: HeldSlot | None = None
        self.loading: HeldSlot | None = None
        self.frame: StoredFrame | None = None
        self.position = 0
        self.dirty = 0  # sequence of its commit while the file tier has not answered for it


class StoredBlock:
    """A block and its records. Bit g of `complete` says that every shard of group g is stored
    somewhere; of `resident_groups`, that every shard is in the arena. Of a group that refines
    another, both bits are the other's: nobody waits for fine parts. refined: both masks for those
    who do, where the bit of a group that refines another says as well that each base record that
    should have one has its fine part.

    stored: its records, for `resting.py`. Most blocks have one or two: a dictionary is made beyond
    a few only, because it takes as much memory as all else that is known of a block.
    """

    __slots__ = (
        "block_index",
        "complete",
        "framed_parts",
        "key",
        "namespace_id",
        "parent",
        "refined",
        "resident_groups",
        "resident_parts",
        "stored",
    )

    def __init__(
        self, key: BlockKey, namespace_id: NamespaceId, block_index: int, parent: BlockKey | None
    ) -> None:
        self.key = key
        self.namespace_id = namespace_id
        self.block_index = block_index
        self.parent = parent
        self.stored: StoredPart | tuple[StoredPart, ...] | dict[Part, StoredPart] | None = None
        self.resident_parts = 0
        self.framed_parts = 0
        self.complete = 0
        self.resident_groups = 0
        self.refined = ABSENT

    @property
    def records(self) -> tuple[StoredPart, ...]:
        """The records there are, in the order they came; a copy, so they may change meanwhile."""
        stored = self.stored
        if isinstance(stored, StoredPart):
            return (stored,)
        if stored is None:
            return ()
        return stored if isinstance(stored, tuple) else tuple(stored.values())

    @property
    def unframed(self) -> int:
        """The groups, as bits, of which a record is in no frame."""
        return groups_of(each.part for each in self.records if each.frame is None)

    def record(self, part: Part) -> StoredPart | None:
        """Return the record of a part, if there is one."""
        stored = self.stored
        if isinstance(stored, StoredPart):
            return stored if stored.part == part else None
        if isinstance(stored, tuple):
            return next((record for record in stored if record.part == part), None)
        return stored.get(part) if stored is not None else None

    def add(self, record: StoredPart) -> None:
        """Add a record of a part that is not there."""
        stored = self.stored
        if stored is None:
            self.stored = record
        elif isinstance(stored, dict):
            stored[record.part] = record
        else:
            self._keep((*self.records, record))

    def remove(self, record: StoredPart) -> None:
        """Remove a record that is there."""
        stored = self.stored
        if stored is record:
            self.stored = None
        elif isinstance(stored, dict) and len(stored) > LISTED_MAX + 1:
            del stored[record.part]
        else:
            self._keep(tuple(each for each in self.records if each.part != record.part))

    def _keep(self, records: tuple[StoredPart, ...]) -> None:
        if len(records) > LISTED_MAX:
            self.stored = {record.part: record for record in records}
        elif len(records) == 1:
            (self.stored,) = records
        else:
            self.stored = records or None

    @property
    def nbytes(self) -> int:
        return sum(record.nbytes for record in self.records)

    def refresh(self, namespace: Namespace | None) -> None:
        """Recompute the group masks after a part came or went. None: it is not known (yet) what
        they are to be complete for."""
        if namespace is None:
            self.complete = self.resident_groups = UNJUDGED
            return
        groups = namespace.groups
        stored, resident = [0] * len(groups), [0] * len(groups)
        complete = resident_groups = 0
        for record in self.records:
            group = record.part.group
            if group >= len(groups):
                continue
            if groups[group].refines != -1:
                record.fine = True
                continue
            shards = groups[group].shards
            stored[group] += 1
            if stored[group] == shards:
                complete |= 1 << group
            if record.resident is not None:
                resident[group] += 1
                if resident[group] == shards:
                    resident_groups |= 1 << group
        for index in namespace.fine:
            base = groups[index].refines
            complete |= (complete >> base & 1) << index
            resident_groups |= (resident_groups >> base & 1) << index
        self.complete, self.resident_groups = complete, resident_groups
        if namespace.fine:
            self.refined = self._refined(namespace)

    def _refined(self, namespace: Namespace) -> tuple[int, int]:
        """Return both masks without the groups of which a fine part is missing."""
        complete, resident_groups = self.complete, self.resident_groups
        for index in namespace.fine:
            group = namespace.groups[index]
            for shard in range(group.shards):
                base = self.record(Part(group.refines, shard))
                if base is None or base.nbytes != group.base_nbytes:
                    continue  # it has none, or it is exact and needs none
                fine = self.record(Part(index, shard))
                if fine is None:
                    complete &= ~(1 << index)
                if fine is None or fine.resident is None:
                    resident_groups &= ~(1 << index)
        return _own_masks((complete, resident_groups))


def groups_of(parts: Iterable[Part]) -> int:
    """Return the groups of parts, as bits."""
    groups = 0
    for part in parts:
        groups |= 1 << part.group
    return groups


def _own_masks(masks: tuple[int, int]) -> tuple[int, int]:
    """Return an equal pair that other blocks have, too: it costs them no memory."""
    if len(_masks) >= MASKS_MAX:
        return _masks.get(masks, masks)
    return _masks.setdefault(masks, masks)
