"""Fine parts: records that make lossy ones finer, and are the first to make room.

A block of a lossy namespace is a *base part*, which is enough to be a hit, and a *fine part* beside
it. A fine part belongs to the very base it was made with, so it comes with it, and never stays
behind. Rate is lowered by dropping a part: nothing is decoded for that.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate

from kvstore.decide.index import Index, StoredBlock, StoredPart
from kvstore.decide.planner.places import is_readable, reachable_groups
from kvstore.model.block import BlockKey, Grant, Namespace, Part, Span, padded

FINE_SHARE = 0.25
LOOKED_AT_MAX = 64  # for one slot: some are leased, and not every gap is wide enough


def base_of(namespace: Namespace, part: Part) -> Part:
    """Return the part that a fine part refines; of any other part, itself."""
    refines = namespace.groups[part.group].refines
    return part if refines == -1 else Part(refines, part.shard)


def needs_fine(namespace: Namespace, group: int, base: StoredPart | None) -> bool:
    """Say whether a base record has a fine part in `group`: exact ones have none."""
    return base is not None and base.nbytes == namespace.groups[group].base_nbytes


def lacks_fine(namespace: Namespace, block: StoredBlock, part: Part) -> bool:
    """Say whether a block has a base whose fine part `part` is missing."""
    base = block.record(base_of(namespace, part))
    return needs_fine(namespace, part.group, base) and block.record(part) is None


def refined_groups(block: StoredBlock, namespace: Namespace) -> int:
    """Return, as `reachable_groups` does, which groups are there in full fidelity: a base counts
    when its fine part is there, or when it needs none."""
    stored, resident = block.refined
    if resident == stored:
        return resident
    mask = reachable_groups(block, namespace)
    for index in namespace.fine:
        for shard in range(namespace.groups[index].shards):
            part = Part(index, shard)
            if not needs_fine(namespace, index, block.record(base_of(namespace, part))):
                continue
            record = block.record(part)
            if record is None or (record.resident is None and not is_readable(record)):
                mask &= ~(1 << index)
                break
    return mask


def base_blocks(namespace: Namespace, grant: Grant) -> int:
    """Return how many blocks of a lease come without a fine part that they should have."""
    if not namespace.fine:
        return 0
    there: dict[Part, dict[int, int]] = {}  # part -> block -> bytes of its record
    at = 0
    for part, begin, end in grant.spans:
        sizes = there.setdefault(part, {})
        for block in range(begin, end):
            place = grant.slots[at] or (grant.places[at] if grant.places else None)
            if place is not None:
                sizes[block] = place.nbytes
            at += 1
    coarse = {
        block
        for index in namespace.fine
        for shard in range(namespace.groups[index].shards)
        for block, nbytes in there.get(Part(namespace.groups[index].refines, shard), {}).items()
        if nbytes == namespace.groups[index].base_nbytes
        and block not in there.get(Part(index, shard), {})
    }
    return len(coarse)


def fine_slots(namespace: Namespace, spans: Sequence[Span]) -> Iterator[tuple[int, int, Part]]:
    """Yield, of each fine part whose base is in `spans` too: its place, that of its base, and what
    part it is."""
    starts = dict(zip(spans, starts_of(spans)[:-1], strict=True))
    for span, start in starts.items():
        if span.part.group not in namespace.fine:
            continue
        wanted = base_of(namespace, span.part)
        base: dict[int, int] = {}
        for other, at in starts.items():
            if other.part == wanted:
                base |= {i: at + i - other.begin for i in range(other.begin, other.end)}
        for i in range(span.begin, span.end):
            if i in base:
                yield start + i - span.begin, base[i], span.part


def starts_of(spans: Sequence[Span]) -> list[int]:
    """Return where the slots of each span start in a grant, and at last how many there are."""
    return [0, *accumulate(end - begin for _, begin, end in spans)]


class FineParts:
    """The blocks of which the arena has fine parts, those whose fine parts are to leave first in
    front: a ring of rows, made when there is a first one.

    nbytes: of their slots. share: of the arena that fine parts keep when blocks need room.
    """

    def __init__(self, index: Index, share: float = FINE_SHARE) -> None:
        self.nbytes = 0
        self.share = share
        self.nbytes_min = 0
        self._index = index
        self._count = 0
        self._older = self._newer = self._parts = array("I")  # parts: how many a block has here

    def __len__(self) -> int:
        return self._count

    def resize(self, arena_nbytes: int) -> None:
        """Derive from the arena's size what fine parts keep of it."""
        self.nbytes_min = int(self.share * arena_nbytes)

    def came(self, block: StoredBlock, record: StoredPart) -> None:
        """Note a fine part that came into the arena."""
        if not self._parts:
            column = self._index.rows.column
            self._older, self._newer, self._parts = column("I"), column("I"), column("I")
        row = self._index.rows.find(block.key)
        if not self._parts[row]:
            self._link(row)
        self._parts[row] += 1
        self._count += 1
        self.nbytes += padded(record.nbytes)

    def went(self, block: StoredBlock, record: StoredPart) -> None:
        """Note one that left the arena."""
        row = self._index.rows.find(block.key)
        self._parts[row] -= 1
        if not self._parts[row]:
            self._unlink(row)
        self._count -= 1
        self.nbytes -= padded(record.nbytes)

    def touch(self, prefix: Sequence[BlockKey]) -> None:
        """Note that a prefix was used: its parts leave last, the end of it before its start."""
        find, parts = self._index.rows.find, self._parts
        for key in reversed(prefix):
            row = find(key)
            if parts[row]:
                self._unlink(row)
                self._link(row)

    def to_leave(self) -> Iterator[tuple[BlockKey, StoredPart]]:
        """Yield some parts in the order in which they leave; they may leave meanwhile."""
        row, left = self._newer[0] if self._parts else 0, LOOKED_AT_MAX
        while row and left > 0:
            key = self._index.rows.keys[row]
            block = self._index.by_key(key)
            found = block.records if block is not None else ()
            for record in found:
                if record.fine and record.resident is not None:
                    left -= 1
                    yield key, record
            row = self._newer[row]  # what left still points on to newer ones

    def _link(self, row: int) -> None:
        """Make a block's fine parts the last to leave. Row 0 is the end of the ring."""
        older, newer = self._older, self._newer
        below = older[0]
        newer[row], older[row] = 0, below
        newer[below] = older[0] = row

    def _unlink(self, row: int) -> None:
        older, newer = self._older, self._newer
        newer[older[row]], older[newer[row]] = newer[row], older[row]
