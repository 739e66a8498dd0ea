"""What is stored where: one entry per block, its parts under it.

Only the planner writes here. Everybody else reads, on the daemon's one event loop, so there is no
lock. Nothing here knows a policy, a deadline or a byte of payload.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

from kvstore.decide.changed import Changed, place_of
from kvstore.decide.heads import Heads
from kvstore.decide.namespaces import Namespaces, StoredNamespace
from kvstore.decide.resting import LOOKED_AT, LOOKED_AT_IN_A_MATCH, Resting
from kvstore.decide.rows import Rows
from kvstore.decide.shapes import Shape
from kvstore.decide.stored import (
    ABSENT,
    LISTED_MAX,
    UNJUDGED,
    Extent,
    FoundRun,
    HeldSlot,
    StoredBlock,
    StoredFrame,
    StoredPart,
)
from kvstore.decide.walks import ORDER_MAX, Walks
from kvstore.model.block import BlockKey, Namespace, NamespaceId, Part, Slot, padded

__all__ = [
    "ABSENT",
    "LISTED_MAX",
    "Extent",
    "FoundRun",
    "HeldSlot",
    "Index",
    "StoredBlock",
    "StoredFrame",
    "StoredPart",
]
SIZES_MAX = 1 << 12  # of records, that are known to be the same number


class Index:
    """Blocks by key. A key is unique over namespaces: its chain starts from the namespace id.

    rows: shared with whoever else keeps columns.
    """

    def __init__(self, rows: Rows | None = None) -> None:
        self.rows = rows if rows is not None else Rows()
        self._keeper = self.rows.keeper()
        self._blocks = Resting(self.rows)
        self.walks = Walks(self.rows, self._keeper, self._blocks)
        self._parts: dict[Part, Part] = {}  # one object per part: see `own_part`
        self._sizes: dict[int, int] = {}  # and for each of some sizes: see `own_size`
        self.namespaces = Namespaces()
        self.heads: Heads | None = None  # told to other hosts, if there are some
        self.changed: Changed | None = None  # told to routers, if somebody announces
        self._noted: list[list[BlockKey]] = []  # see `noting`

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[StoredBlock]:
        """Yield all blocks, the oldest first. It looks at all before it yields one, and wakes each:
        not for a daemon at work, see `walks`."""
        orders, find = self.walks.orders, self.rows.find
        found = map(self.by_key, sorted(self.keys(), key=lambda key: orders[find(key)]))
        return (block for block in found if block is not None)

    def keys(self, namespace_id: NamespaceId | None = None) -> Iterator[BlockKey]:
        """Yield the keys of all blocks, or of a namespace's, in no order, waking none: what
        `walks.steps` yields, in one."""
        only = None if namespace_id is None else (namespace_id,)
        return chain.from_iterable(self.walks.steps(only))

    @contextmanager
    def noting(self) -> Iterator[list[BlockKey]]:
        """Note the keys of blocks that are added within the context."""
        came: list[BlockKey] = []
        self._noted.append(came)
        try:
            yield came
        finally:
            self._noted = [each for each in self._noted if each is not came]

    def get(self, namespace_id: NamespaceId, key: BlockKey) -> StoredBlock | None:
        """Return the block, if this namespace has it."""
        row = self.rows.shards[key[-1]].get(key, 0)
        blocks = self._blocks
        block = blocks.wake(row) if blocks.shape_of[row] else blocks.awake.get(row)
        if block is None or block.namespace_id != namespace_id:
            return None
        if block.complete == UNJUDGED:
            self.refresh(block)
        return block

    def find(self, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> list[StoredBlock | None]:
        """Return `get` of every key."""
        namespace = self.namespaces.find(namespace_id)
        if namespace is None:
            return [None] * len(keys)
        namespace_id = namespace.id  # the object that its blocks have: compared by `is`
        found = [
            block if block is not None and block.namespace_id is namespace_id else None
            for block in map(self.by_key, keys)
        ]
        if namespace.is_stale:
            self._judge(found, namespace)
        return found

    def masks(
        self, namespace_id: NamespaceId, keys: Sequence[BlockKey], *, refined: bool = False
    ) -> tuple[list[int], list[int]]:
        """Return which groups of each block are stored, and which are resident: see `StoredBlock`.
        It wakes none. refined: the masks for those who wait for fine parts."""
        namespace = self.namespaces.find(namespace_id)
        if namespace is None:
            return [0] * len(keys), [0] * len(keys)
        namespace_id = namespace.id  # the object that its blocks have: compared by `is`
        self._blocks.settle(LOOKED_AT_IN_A_MATCH)
        shapes, rows = self._blocks.shapes, self.rows.find_all(keys)
        numbers = list(map(self._blocks.shape_of.__getitem__, rows))
        if numbers and numbers.count(numbers[0]) == len(numbers):  # all of them are alike
            shape = shapes[numbers[0]]
            if shape is not None and shape.complete != UNJUDGED:
                mine = shape if shape.namespace_id is namespace_id else None
                one, other = _masks_of(mine, refined=refined)
                return [one] * len(keys), [other] * len(keys)
        stored_of, here_of, odd = dict[int, int](), dict[int, int](), set[int]()
        for number in set(numbers):
            shape = shapes[number]
            if shape is None or (namespace.is_stale and shape.complete == UNJUDGED):
                odd.add(number)
                shape = None
            elif shape.namespace_id is not namespace_id:
                shape = None
            stored_of[number], here_of[number] = _masks_of(shape, refined=refined)
        stored = list(map(stored_of.__getitem__, numbers))
        here = list(map(here_of.__getitem__, numbers))
        awake = self._blocks.awake.get
        for number in odd:
            at = -1
            for _ in range(numbers.count(number)):
                at = numbers.index(number, at + 1)
                block = self.get(namespace_id, keys[at]) if number else awake(rows[at])
                if block is None or block.namespace_id is not namespace_id:
                    continue
                if block.complete == UNJUDGED:
                    self.refresh(block)
                if refined:
                    stored[at], here[at] = block.refined
                else:
                    stored[at], here[at] = block.complete, block.resident_groups
        return stored, here

    def places(self, namespace_id: NamespaceId, keys: Sequence[BlockKey], needed: int) -> bytes:
        """Return `place_of` the block of each key, 0 where this namespace has none. It wakes none,
        but those that are to be judged."""
        namespace = self.namespaces.find(namespace_id)
        if namespace is None or namespace.spec is None:
            return bytes(len(keys))
        namespace_id = namespace.id  # the object that its blocks have: compared by `is`
        shapes, shape_of, awake = self._blocks.shapes, self._blocks.shape_of, self._blocks.awake.get
        found, place = bytearray(len(keys)), 0
        last: Shape | StoredBlock | None = None
        for at, row in enumerate(self.rows.find_all(keys)):
            each = shapes[shape_of[row]] or awake(row)
            if each is not last:
                if each is not None and each.complete == UNJUDGED:
                    each = self.get(namespace_id, keys[at])
                last, place = each, 0
                if each is not None and each.namespace_id is namespace_id:
                    masks = each.complete, each.resident_groups, each.unframed
                    place = place_of(*masks, needed)
            found[at] = place
        return bytes(found)

    def own_part(self, part: Part) -> Part:
        """Return an equal part that other records have, too: it costs them no memory."""
        return self._parts.setdefault(part, part)

    def own_size(self, nbytes: int) -> int:
        """Return an equal number that other records have, too. Coded records have few sizes."""
        if len(self._sizes) >= SIZES_MAX:
            return self._sizes.get(nbytes, nbytes)
        return self._sizes.setdefault(nbytes, nbytes)

    def by_key(self, key: BlockKey) -> StoredBlock | None:
        row = self.rows.shards[key[-1]].get(key, 0)
        blocks = self._blocks
        return blocks.wake(row) if blocks.shape_of[row] else blocks.awake.get(row)

    def blocks_of(self, namespace_id: NamespaceId) -> int:
        """Return how many blocks a namespace has, all tiers and incomplete ones included."""
        namespace = self.namespaces.find(namespace_id)
        return namespace.blocks if namespace is not None else 0

    def add(self, block: StoredBlock) -> None:
        block.namespace_id = self.namespaces.block_added(block.namespace_id)
        row = self.rows.keep(block.key, self._keeper)
        block.key = self.rows.keys[row]  # the same object
        walks = self.walks
        walks.orders[row] = walks.added = walks.added + 1 & ORDER_MAX
        self._blocks.came(row, block)
        for came in self._noted:
            came.append(block.key)

    def adopt(self, frame: StoredFrame, run: FoundRun) -> bool:
        """Add the blocks of a frame that was found on disk, all in one, and resting. False: each
        has to be added by itself, because the index has one of them, or it may have several
        records; nothing has changed then."""
        spec = self.namespaces.spec(run.namespace_id)
        is_one = spec is not None and len(spec.groups) == 1 and spec.groups[0].shards == 1
        if not is_one or frame.part != (0, 0) or not run.fits_rows:
            return False
        rows = self.rows.keep_new(run.keys, self._keeper)
        if rows is None:
            return False
        self.walks.came(rows)
        namespace_id = self.namespaces.block_added(run.namespace_id, len(rows))
        like = StoredBlock(run.keys[0], namespace_id, run.first_block, None)
        record = StoredPart(frame.part, 0, 0)
        record.frame = frame
        like.add(record)
        like.refresh(spec)
        self._blocks.found(rows, run, frame, like)
        for came in self._noted:
            came.extend(run.keys)
        if self.heads is not None or self.changed is not None:
            for key, position in zip(run.keys, run.positions, strict=True):
                like.key, like.block_index = key, run.first_block + position
                self._tell(like, spec)
        return True

    def remove(self, block: StoredBlock) -> None:
        row = self.rows.find(block.key)
        self._blocks.forget(row)
        self._gone(row, block.key, block.namespace_id)

    def _gone(self, row: int, key: BlockKey, namespace_id: NamespaceId) -> None:
        self.rows.drop(row, self._keeper)
        if self.heads is not None:
            self.heads.left(key)
        if self.changed is not None:
            self.changed.note(key, namespace_id)
        self.namespaces.block_removed(namespace_id)

    def take(self, key: BlockKey) -> Slot | None:
        """Remove a block that rests, of which there is one record, in the arena alone; return its
        slot. None: it stays, and has to be looked at."""
        row = self.rows.find(key)
        taken = self._blocks.take(row)
        if taken is None:
            return None
        shape, slot = taken
        (record,) = shape.records
        self.namespaces.in_dram(shape.namespace_id, -padded(slot.nbytes), record[0].group)
        self._gone(row, key, shape.namespace_id)
        return slot

    def demote(self, key: BlockKey) -> Slot | None:
        """Note that a block that rests, with one record, in the arena and in a frame, has left the
        arena; return its slot. None: it is another one, and has to be looked at."""
        demoted = self._blocks.demote(self.rows.find(key))
        if demoted is None:
            return None
        shape, slot = demoted
        self.namespaces.in_dram(shape.namespace_id, -padded(slot.nbytes), shape.part.group)
        if self.changed is not None:
            self.changed.note(key, shape.namespace_id)
        return slot

    def settle(self, blocks: int) -> None:
        """Let blocks rest that nobody uses, after `blocks` of them were asked for."""
        self._blocks.settle(LOOKED_AT * blocks)

    def rest(self) -> None:
        """Let all blocks rest that nobody uses."""
        self._blocks.rest_all()

    def register(self, namespace: Namespace) -> NamespaceId:
        """Learn what a namespace id stands for. Blocks that were there before are judged when
        somebody looks for them."""
        return self.namespaces.register(namespace)

    def refresh(self, block: StoredBlock) -> None:
        namespace = self.namespaces.spec(block.namespace_id)
        block.refresh(namespace)
        self._tell(block, namespace)

    def _tell(self, block: StoredBlock, namespace: Namespace | None) -> None:
        """Tell others what became of a block."""
        if self.heads is not None:
            self.heads.look(block, namespace)
        if self.changed is not None:
            self.changed.note(block.key, block.namespace_id)

    def _judge(self, blocks: Iterable[StoredBlock | None], namespace: StoredNamespace) -> None:
        """Compute the group masks of blocks that came, or changed, without their specification."""
        for block in blocks:
            if block is not None and block.complete == UNJUDGED:
                block.refresh(namespace.spec)
                self._tell(block, namespace.spec)


def _masks_of(shape: Shape | None, *, refined: bool) -> tuple[int, int]:
    if shape is None:
        return ABSENT
    return shape.refined if refined else (shape.complete, shape.resident_groups)
