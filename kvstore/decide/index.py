"""What is stored where: one entry per block, its parts under it.

Only the planner writes here. Everybody else reads, on the daemon's one event loop, so there is no
lock. Nothing here knows a policy, a deadline or a byte of payload.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

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
    HeldSlot,
    StoredBlock,
    StoredFrame,
    StoredPart,
)
from kvstore.model.block import BlockKey, Namespace, NamespaceId, Part, Slot, padded

__all__ = [
    "ABSENT",
    "LISTED_MAX",
    "Extent",
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
        self._orders = self.rows.column("I")
        self._added = 0  # modulo 2**32: the order is of no more than some callers' comfort
        self._parts: dict[Part, Part] = {}  # one object per part: see `own_part`
        self._sizes: dict[int, int] = {}  # and for each of some sizes: see `own_size`
        self.namespaces = Namespaces()
        self.heads: Heads | None = None  # told to other hosts, if there are some
        self.changed: Changed | None = None  # told to routers, if somebody announces

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[StoredBlock]:
        """Yield all blocks, the oldest first. It looks at all before it yields one."""
        keys = self.rows.keys
        rows = sorted(self._all_rows(), key=self._orders.__getitem__)
        found = map(self.by_key, [keys[row] for row in rows])
        return (block for block in found if block is not None)

    def unwritten(self) -> Iterator[StoredBlock]:
        """Yield the blocks of which the arena alone may have a record, the oldest first. It looks
        at all before it yields one, and wakes no other."""
        shapes, shape_of, keys = self._blocks.shapes, self._blocks.shape_of, self.rows.keys
        wanted = {at for at, shape in enumerate(shapes) if shape is None or shape.has_unwritten}
        rows = [row for row in self._all_rows() if shape_of[row] in wanted]
        rows.sort(key=self._orders.__getitem__)
        found = map(self.by_key, [keys[row] for row in rows])
        return (block for block in found if block is not None)

    def keys(self, namespace_id: NamespaceId | None = None) -> Iterator[BlockKey]:
        """Yield the keys of all blocks, or of a namespace's, in no order, waking none. They may
        come and go meanwhile."""
        rows = self._rows_in(namespace_id) if namespace_id is not None else self._all_rows()
        return map(self.rows.keys.__getitem__, rows)

    def named(self) -> Iterator[tuple[BlockKey, NamespaceId]]:
        """Yield the key and the namespace of each block, in no order, waking none. They may come
        and go meanwhile."""
        return ((self.rows.keys[row], self._namespace_of(row)) for row in self._all_rows())

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

    def _at(self, row: int) -> StoredBlock:
        """Return the block of a row that the index keeps."""
        return self._blocks.wake(row) if self._blocks.shape_of[row] else self._blocks.awake[row]

    def blocks_in(self, namespace_id: NamespaceId) -> Iterator[StoredBlock]:
        """Yield the blocks of a namespace, in no order."""
        return map(self._at, self._rows_in(namespace_id))

    def _all_rows(self) -> Iterator[int]:
        return self.rows.kept(self._keeper)

    def _rows_in(self, namespace_id: NamespaceId) -> Iterator[int]:
        """Yield the rows of a namespace. It looks at others, too, until it has found all."""
        namespace = self.namespaces.find(namespace_id)
        left = namespace.blocks if namespace is not None else 0
        rows = self._all_rows()
        while left and (row := next(rows, None)) is not None:
            if self._namespace_of(row) == namespace_id:
                left -= 1
                yield row

    def _namespace_of(self, row: int) -> NamespaceId:
        """Return the namespace of the block of a row that the index keeps."""
        each = self._blocks.shapes[self._blocks.shape_of[row]] or self._blocks.awake[row]
        return each.namespace_id

    def blocks_of(self, namespace_id: NamespaceId) -> int:
        """Return how many blocks a namespace has, all tiers and incomplete ones included."""
        namespace = self.namespaces.find(namespace_id)
        return namespace.blocks if namespace is not None else 0

    def add(self, block: StoredBlock) -> None:
        block.namespace_id = self.namespaces.block_added(block.namespace_id)
        row = self.rows.keep(block.key, self._keeper)
        block.key = self.rows.keys[row]  # the same object
        self._added = self._added + 1 & 0xFFFFFFFF
        self._orders[row] = self._added
        self._blocks.came(row, block)

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
        if self.heads is not None:
            self.heads.look(block, namespace)
        if self.changed is not None:
            self.changed.note(block.key, block.namespace_id)

    def _judge(self, blocks: Iterable[StoredBlock | None], namespace: StoredNamespace) -> None:
        """Compute the group masks of blocks that came, or changed, without their specification."""
        for block in blocks:
            if block is not None and block.complete == UNJUDGED:
                block.refresh(namespace.spec)
                if self.heads is not None:
                    self.heads.look(block, namespace.spec)
                if self.changed is not None:
                    self.changed.note(block.key, block.namespace_id)


def _masks_of(shape: Shape | None, *, refined: bool) -> tuple[int, int]:
    if shape is None:
        return ABSENT
    return shape.refined if refined else (shape.complete, shape.resident_groups)
