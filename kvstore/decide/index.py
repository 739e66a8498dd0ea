"""What is stored where: one entry per block, its parts under it.

Only the planner writes here. Everybody else reads, on the daemon's one event loop, so there is no
lock. Nothing here knows a policy, a deadline or a byte of payload.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from kvstore.decide.changed import Changed
from kvstore.decide.heads import Heads
from kvstore.decide.namespaces import Namespaces, StoredNamespace
from kvstore.model.block import BlockKey, Namespace, NamespaceId, Part, Slot

Extent = Any  # a place of the file tier; opaque here
_OFFSET_BITS = 48
_OFFSET_MASK = (1 << _OFFSET_BITS) - 1
SIZES_MAX = 1 << 12  # of records, that are known to be the same number
LISTED_MAX = 4  # records of a block that are kept in a tuple
MASKS_MAX = 1 << 12  # pairs of group masks that are known to be the same
_UNJUDGED = -1  # in the place of group masks: what the namespace is was not known
ABSENT = (0, 0)  # `StoredBlock.refined` of a block that is not there
_masks: dict[tuple[int, int], tuple[int, int]] = {}  # one object per pair: see `_own_masks`


class HeldSlot:
    """An arena slot and who keeps it from reuse: the index, and every lease or move on it.

    There is one for each record in the arena, so it is kept small: extent and offset in one number.
    """

    __slots__ = ("_place", "indexed", "nbytes", "pins")

    def __init__(self, slot: Slot) -> None:
        self._place = slot.extent << _OFFSET_BITS | slot.offset
        self.nbytes = slot.nbytes
        self.pins = 0
        self.indexed = False

    @property
    def slot(self) -> Slot:
        place = self._place
        return Slot(place >> _OFFSET_BITS, place & _OFFSET_MASK, self.nbytes)


class StoredFrame:
    """A run in the file tier. It leaves as a whole; pins are reads and writes under way, and leases
    of clients that read it in its file. sequence: the higher one is the newer one. checked_at: when
    its bytes were last seen to be good, on the planner's clock. is_out: its disk went out of use,
    and what becomes of it there is not known any more."""

    __slots__ = (
        "blocks",
        "checked_at",
        "codec_id",
        "extent",
        "is_out",
        "part",
        "pins",
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
        self.blocks: dict[int, StoredBlock] = {}  # position in the frame -> block that is live
        self.pins = 0
        self.is_out = False
        self.checked_at = float("-inf")


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

    Most blocks have one record or two: a dictionary is made beyond a few only, because it takes as
    much memory as all else that is known of a block.
    """

    __slots__ = (
        "_stored",
        "block_index",
        "complete",
        "framed_parts",
        "key",
        "namespace_id",
        "parent",
        "refined",
        "resident_groups",
        "resident_parts",
    )

    def __init__(
        self, key: BlockKey, namespace_id: NamespaceId, block_index: int, parent: BlockKey | None
    ) -> None:
        self.key = key
        self.namespace_id = namespace_id
        self.block_index = block_index
        self.parent = parent
        self._stored: StoredPart | tuple[StoredPart, ...] | dict[Part, StoredPart] | None = None
        self.resident_parts = 0
        self.framed_parts = 0
        self.complete = 0
        self.resident_groups = 0
        self.refined = ABSENT

    @property
    def records(self) -> Sequence[StoredPart]:
        """The records there are, in the order they came; a copy, so they may change meanwhile."""
        stored = self._stored
        if stored is None:
            return ()
        if isinstance(stored, tuple):
            return stored
        return tuple(stored.values()) if isinstance(stored, dict) else (stored,)

    def record(self, part: Part) -> StoredPart | None:
        """Return the record of a part, if there is one."""
        stored = self._stored
        if isinstance(stored, dict):
            return stored.get(part)
        if isinstance(stored, tuple):
            return next((record for record in stored if record.part == part), None)
        return stored if stored is not None and stored.part == part else None

    def add(self, record: StoredPart) -> None:
        """Add a record of a part that is not there."""
        stored = self._stored
        if isinstance(stored, dict):
            stored[record.part] = record
        else:
            self._keep((*self.records, record))

    def remove(self, record: StoredPart) -> None:
        """Remove a record that is there."""
        stored = self._stored
        if isinstance(stored, dict) and len(stored) > LISTED_MAX + 1:
            del stored[record.part]
        else:
            self._keep(tuple(each for each in self.records if each.part != record.part))

    def _keep(self, records: tuple[StoredPart, ...]) -> None:
        if len(records) > LISTED_MAX:
            self._stored = {record.part: record for record in records}
        elif len(records) == 1:
            (self._stored,) = records
        else:
            self._stored = records or None

    @property
    def nbytes(self) -> int:
        return sum(record.nbytes for record in self.records)

    def refresh(self, namespace: Namespace | None) -> None:
        """Recompute the group masks after a part came or went. None: it is not known (yet) what
        they are to be complete for."""
        if namespace is None:
            self.complete = self.resident_groups = _UNJUDGED
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


class Index:
    """Blocks by key. A key is unique over namespaces: its chain starts from the namespace id."""

    def __init__(self) -> None:
        self._blocks: dict[BlockKey, StoredBlock] = {}
        self._parts: dict[Part, Part] = {}  # one object per part: see `own_part`
        self._sizes: dict[int, int] = {}  # and for each of some sizes: see `own_size`
        self.namespaces = Namespaces()
        self.heads: Heads | None = None  # told to other hosts, if there are some
        self.changed: Changed | None = None  # told to routers, if somebody announces

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[StoredBlock]:
        return iter(self._blocks.values())

    def get(self, namespace_id: NamespaceId, key: BlockKey) -> StoredBlock | None:
        """Return the block, if this namespace has it."""
        block = self._blocks.get(key)
        if block is None or block.namespace_id != namespace_id:
            return None
        if block.complete == _UNJUDGED:
            self.refresh(block)
        return block

    def find(self, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> list[StoredBlock | None]:
        """Return `get` of every key, at the speed of a dictionary."""
        namespace = self.namespaces.find(namespace_id)
        if namespace is None:
            return [None] * len(keys)
        namespace_id = namespace.id  # the object that its blocks have: compared by `is`
        found = [
            block if block is not None and block.namespace_id is namespace_id else None
            for block in map(self._blocks.get, keys)
        ]
        if namespace.is_stale:
            self._judge(found, namespace)
        return found

    def own_part(self, part: Part) -> Part:
        """Return an equal part that other records have, too: it costs them no memory."""
        return self._parts.setdefault(part, part)

    def own_size(self, nbytes: int) -> int:
        """Return an equal number that other records have, too. Coded records have few sizes."""
        if len(self._sizes) >= SIZES_MAX:
            return self._sizes.get(nbytes, nbytes)
        return self._sizes.setdefault(nbytes, nbytes)

    def by_key(self, key: BlockKey) -> StoredBlock | None:
        return self._blocks.get(key)

    def blocks_in(self, namespace_id: NamespaceId) -> Iterator[StoredBlock]:
        """Yield the blocks of a namespace. It walks over others, too, until it has found all."""
        namespace = self.namespaces.find(namespace_id)
        left = namespace.blocks if namespace is not None else 0
        blocks = iter(self._blocks.values())
        while left:
            block = next(blocks)
            if block.namespace_id == namespace_id:
                left -= 1
                yield block

    def blocks_of(self, namespace_id: NamespaceId) -> int:
        """Return how many blocks a namespace has, all tiers and incomplete ones included."""
        namespace = self.namespaces.find(namespace_id)
        return namespace.blocks if namespace is not None else 0

    def add(self, block: StoredBlock) -> None:
        block.namespace_id = self.namespaces.block_added(block.namespace_id)
        self._blocks[block.key] = block

    def remove(self, block: StoredBlock) -> None:
        del self._blocks[block.key]
        if self.heads is not None:
            self.heads.left(block)
        if self.changed is not None:
            self.changed.note(block)
        self.namespaces.block_removed(block.namespace_id)

    def register(self, namespace: Namespace) -> NamespaceId:
        """Learn what a namespace id stands for. Blocks that were there before are judged when
        somebody looks for them."""
        return self.namespaces.register(namespace)

    def refresh(self, block: StoredBlock) -> None:
        namespace = self.namespaces.spec(block.namespace_id)
        block.refresh(namespace)
        if self.heads is not None:
            self.heads.look(block, namespace)
        if self.changed is not None:
            self.changed.note(block)

    def _judge(self, blocks: Iterable[StoredBlock | None], namespace: StoredNamespace) -> None:
        """Compute the group masks of blocks that came, or changed, without their specification."""
        for block in blocks:
            if block is not None and block.complete == _UNJUDGED:
                block.refresh(namespace.spec)
                if self.heads is not None:
                    self.heads.look(block, namespace.spec)
                if self.changed is not None:
                    self.changed.note(block)


def _own_masks(masks: tuple[int, int]) -> tuple[int, int]:
    """Return an equal pair that other blocks have, too: it costs them no memory."""
    if len(_masks) >= MASKS_MAX:
        return _masks.get(masks, masks)
    return _masks.setdefault(masks, masks)
