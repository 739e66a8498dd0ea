"""What is known of a prefix while it is fetched from the object tier: where its records are, and in
which pieces they come."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.decide.ask import Ask
from kvstore.decide.index import StoredBlock
from kvstore.decide.planner import refined_groups
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
    def begin(self) -> int:
        before = self.frame.header.blocks[: self.position]
        return PAGE_NBYTES + sum(padded(block.stored_nbytes) for block in before)


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
    hit: int
    blocks_max: int  # to be fetched
    places: defaultdict[Part, dict[BlockKey, Place]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    found: int = 0
    begun: int = 0
    nbytes: int = 0
    began: float = 0.0
    parts: list[asyncio.Task[bool]] = field(default_factory=list)
    _frames: int = 0

    @property
    def goal_max(self) -> int:
        return self.hit + self.blocks_max

    async def note(self, found: Found, start: int) -> None:
        """Take note of what was found from block `start` on."""
        for number, frame in enumerate(found.frames[self._frames :]):
            if number % (STEP_BLOCKS // RUN_BLOCKS_MAX) == 0:
                await asyncio.sleep(0)
            blocks = frame.header.blocks
            self.places[frame.header.part] |= {
                blocks[at].key: Place(frame, at) for at in frame.live
            }
        self._frames = len(found.frames)
        self.found = start + found.blocks


def with_fine(
    namespace: Namespace, load: Load, key: BlockKey, block: StoredBlock | None, mask: int
) -> int:
    """Return a block's mask with the bits of the groups that refine others: those of their bases,
    or, for who insists on fine parts, whether these are here or in the bucket as well."""
    here = refined_groups(block, namespace, resident=False) if block is not None else 0
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
    """Return, of the fine parts of `spans`, the first consecutive ones that the bucket has."""
    found = []
    for index in namespace.fine:
        for base, begin, end in spans:
            if base.group != namespace.groups[index].refines:
                continue
            part = Part(index, base.shard)
            there = [key in places.get(part, {}) for key in keys[begin:end]]
            if any(there):
                first = there.index(True)
                length = next((n for n, one in enumerate(there[first:]) if not one), None)
                last = end if length is None else begin + first + length
                found.append(Span(part, begin + first, last))
    return tuple(found)


def window_blocks(namespace: Namespace) -> int:
    return max(1, WINDOW_NBYTES // block_nbytes(namespace))


def block_nbytes(namespace: Namespace) -> int:
    return sum(padded(group.record_nbytes) * group.shards for group in namespace.groups)
