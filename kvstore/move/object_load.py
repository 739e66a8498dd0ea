"""What is known of a prefix while it is fetched from the object tier: where its records are, and in
which pieces they come."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.decide.ask import Ask
from kvstore.decide.index import ABSENT, StoredBlock
from kvstore.decide.planner import base_of
from kvstore.format.frame import RUN_BLOCKS_MAX, RunBlock
from kvstore.model.block import PAGE_NBYTES, BlockKey, Namespace, NamespaceId, Part, Span, padded
from kvstore.tier.object import Found, FoundFrame

WINDOW_NBYTES = 16 << 20  # of records published at once: the first are up while the last are asked
STEP_BLOCKS = 128  # looked at before others run: about a millisecond


class Place(NamedTuple):
    """Where in the bucket a record is."""

    frame: FoundFrame
    position: int

    @property
    def block(self) -> RunBlock:
        return self.frame.header.blocks[self.position]

    @property
    def record(self) -> Record:
        return self.frame.location.name, self.frame.header.part, self.block.key

    @property
    def begin(self) -> int:
        before = self.frame.header.blocks[: self.position]
        return PAGE_NBYTES + sum(padded(block.stored_nbytes) for block in before)


Record = tuple[str, Part, BlockKey]  # of an object
Places = Mapping[Part, Mapping[BlockKey, Place]]


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive blocks of a prefix, the parts of them a hit needs, and what of it is to come."""

    namespace_id: NamespaceId
    first: int
    keys: tuple[BlockKey, ...]
    parent: BlockKey | None
    spans: tuple[Span, ...]
    nbytes: int = field(compare=False)
    refined: bool = False


@dataclass(slots=True)
class Load:
    """A prefix that is being fetched. hit: how long it was without the bucket; found: how many of
    its blocks have been looked for; begun: before it, nothing is left to begin."""

    ask: Ask
    namespace: Namespace
    hit: int
    blocks_max: int  # to be fetched
    unpaired: Container[Record] = ()  # fine parts of another base than their object has
    places: defaultdict[Part, dict[BlockKey, Place]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    found: int = 0
    begun: int = 0
    nbytes: int = 0
    began: float = 0.0
    parts: list[asyncio.Task[bool]] = field(default_factory=list)
    _frames: int = 0
    _bases: dict[Record, Place] = field(default_factory=dict)

    @property
    def goal_max(self) -> int:
        return self.hit + self.blocks_max

    async def note(self, found: Found, start: int) -> None:
        """Take note of what was found from block `start` on.

        Of a lossy namespace, each object that has a record: a fine part comes from the object from
        which its base comes, and is worth that its base comes from another one than the first.
        """
        fine = self.namespace.fine
        frames = sorted(found.frames[self._frames :], key=lambda f: f.header.part.group in fine)
        for number, frame in enumerate(frames):
            if number % (STEP_BLOCKS // RUN_BLOCKS_MAX) == 0:
                await asyncio.sleep(0)
            if frame.header.part.group not in fine:
                self._note_bases(frame)
            else:
                self._note_fine(frame)
        self._frames = len(found.frames)
        self.found = start + found.blocks

    def _note_bases(self, frame: FoundFrame) -> None:
        """Take note of bases: of several, an exact one is worth more than one that has to do
        without its fine part."""
        part, places = frame.header.part, self.places[frame.header.part]
        fine = self._fine_part(part)
        for at in frame.live:
            place = Place(frame, at)
            key = place.block.key
            if fine is None:
                places[key] = place
                continue
            self._bases[place.record] = place
            coarse = key in places and key not in self.places[fine]
            if key not in places or (coarse and self._is_exact(place, fine)):
                places[key] = place

    def _fine_part(self, base: Part) -> Part | None:
        groups = self.namespace.groups
        found = (i for i in self.namespace.fine if groups[i].refines == base.group)
        return next((Part(i, base.shard) for i in found), None)

    def _is_exact(self, place: Place, fine: Part) -> bool:
        return place.block.raw_nbytes != self.namespace.groups[fine.group].base_nbytes

    def _note_fine(self, frame: FoundFrame) -> None:
        """Take note of fine parts, after the bases of their object."""
        part = frame.header.part
        base = base_of(self.namespace, part)
        for at in frame.live:
            place = Place(frame, at)
            key = place.block.key
            mine = self._bases.get((frame.location.name, base, key))
            known = key in self.places[part] or place.record in self.unpaired
            if mine is not None and not known:
                self.places[part][key], self.places[base][key] = place, mine


def with_fine(
    namespace: Namespace, load: Load, key: BlockKey, block: StoredBlock | None, mask: int
) -> int:
    """Return a block's mask with the bits of the groups that refine others: those of their bases,
    or, for who insists on fine parts, whether these are here or in the bucket as well."""
    here, _ = ABSENT if block is None else block.refined
    for index in namespace.fine:
        spec, bit = namespace.groups[index], 1 << index
        mask &= ~bit
        there = bool(mask >> spec.refines & 1)
        if there and load.ask.refined and not here & bit:
            for shard in range(spec.shards):
                base = load.places.get(Part(spec.refines, shard), {}).get(key)
                fine = load.places.get(Part(index, shard), {}).get(key)
                is_exact = base is not None and base.block.raw_nbytes != spec.base_nbytes
                there &= is_exact or (base is not None and fine is not None)
        mask |= bit if there else 0
    return mask


def fine_spans(
    namespace: Namespace, places: Places, keys: Sequence[BlockKey], spans: Sequence[Span]
) -> tuple[Span, ...]:
    """Return, of the fine parts of `spans`, the first consecutive ones that the bucket has. A block
    without a base in the bucket, or with an exact one, is not in their way: it gets no slot."""
    found = []
    for index in namespace.fine:
        for base, begin, end in spans:
            if base.group != namespace.groups[index].refines:
                continue
            part, nbytes = Part(index, base.shard), namespace.groups[index].base_nbytes
            there = [key in places.get(part, {}) for key in keys[begin:end]]
            if not any(there):
                continue
            bases = [places.get(base, {}).get(key) for key in keys[begin:end]]
            first = there.index(True)
            needs = [each is not None and each.block.raw_nbytes == nbytes for each in bases]
            coarse = (n for n in range(first, end - begin) if needs[n] and not there[n])
            last = next(coarse, end - begin)
            found.append(Span(part, begin + first, begin + last))
    return tuple(found)


def base_spans(namespace: Namespace, spans: Sequence[Span]) -> tuple[Span, ...]:
    """Return the spans without those of fine parts."""
    return tuple(span for span in spans if span.part.group not in namespace.fine)


def window_blocks(namespace: Namespace) -> int:
    return max(1, WINDOW_NBYTES // block_nbytes(namespace))


def block_nbytes(namespace: Namespace) -> int:
    return sum(padded(group.record_nbytes) * group.shards for group in namespace.groups)
