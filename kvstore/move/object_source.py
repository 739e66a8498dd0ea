"""The object tier as a source: what is known of a prefix while it is fetched from the bucket."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import AsyncIterator, Callable, Container, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from kvstore.decide.ask import Ask
from kvstore.decide.index import ABSENT, StoredBlock
from kvstore.decide.planner import base_of
from kvstore.format.codec import decodes_to
from kvstore.format.frame import RUN_BLOCKS_MAX, RunBlock
from kvstore.metrics import Metrics
from kvstore.model.block import PAGE_NBYTES, BlockKey, Namespace, Part, Span, padded
from kvstore.model.checksum import checksum
from kvstore.model.outcome import Reason
from kvstore.move.load_race import LoadRaces
from kvstore.move.source import STEP_BLOCKS, WINDOW_NBYTES, Candidate, Reading, Window
from kvstore.tier.object import Found, FoundFrame, ObjectRead, ObjectTier, Outcome, run_blocks

USELESS_MAX = 4096  # fine parts that are remembered, and not read again


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


class ObjectSource:
    """The bucket. fine: fine parts come after all bases; else for those who insist on them."""

    name = "object"

    def __init__(
        self, tier: ObjectTier, metrics: Metrics, now: Callable[[], float], *, fine: bool
    ) -> None:
        self.races = LoadRaces(metrics, now)
        self.fine = fine
        self.tier = tier
        self._metrics = metrics
        self._useless: OrderedDict[Record, None] = OrderedDict()

    def candidate(self, ask: Ask, namespace: Namespace, hit: int) -> Candidate:
        """Return what will be found of a prefix of which `hit` blocks are here."""
        return Candidate(self, ObjectListing(self, ask, namespace, hit, self._useless))

    async def read(
        self, wanted: Sequence[tuple[memoryview, Place]], deadline: float
    ) -> list[bool] | None:
        """Read records into their targets; say of each whether it is what was stored. None: one
        could not be had."""
        if not all(
            place.block.raw_nbytes == len(view) and place.block.stored_nbytes <= 2 * len(view)
            for view, place in wanted
        ):
            return None
        stored = [
            view
            if place.frame.header.codec_id == 0
            else memoryview(bytearray(place.block.stored_nbytes))
            for view, place in wanted
        ]
        good = [False] * len(wanted)

        def verify(index: int) -> None:
            good[index] = _is_good(wanted[index][0], stored[index], wanted[index][1])

        reads = [
            ObjectRead(
                place.frame.location,
                place.begin,
                [buffer],
                partial(verify, index),
                (place.frame.header, place.position),
            )
            for index, ((_, place), buffer) in enumerate(zip(wanted, stored, strict=True))
        ]
        if set(await self.tier.reads.read(reads, deadline)) - {Outcome.READ}:
            return None
        wrong = [place for (_, place), is_good in zip(wanted, good, strict=True) if not is_good]
        if wrong:
            self._metrics.corrupt_blocks.labels("object").inc()
        for place in wrong:
            self.tier.reads.spoil(place.frame.location, [place.record[1:]])
        return good

    def forget(self, places: Sequence[Place]) -> None:
        """Take note of fine parts of another base than their object has, and of wrong ones."""
        for place in places:
            self._useless[place.record] = None
        while len(self._useless) > USELESS_MAX:
            self._useless.popitem(last=False)


class ObjectListing:
    """What of one prefix is in the bucket."""

    def __init__(
        self,
        source: ObjectSource,
        ask: Ask,
        namespace: Namespace,
        hit: int,
        useless: Container[Record] = (),
    ) -> None:
        """useless: fine parts of another base than their object has, and wrong ones."""
        self._source = source
        self._ask = ask
        self._namespace = namespace
        self._useless = useless
        self._aligned = run_blocks(namespace)
        self._start = hit // self._aligned * self._aligned
        self.found = 0
        self.copies = False
        self.start_window_nbytes = WINDOW_NBYTES
        self.coming = 0
        self.failure: Reason | None = None  # that of the ask says enough
        self.places: defaultdict[Part, dict[BlockKey, Place]] = defaultdict(dict)
        self._frames = 0
        self._bases: dict[Record, Place] = {}

    @property
    def brings_fine(self) -> bool:
        return self._source.fine

    async def look(self, deadline: float) -> AsyncIterator[None]:
        looking = self._source.tier.lookups.look(
            self._ask.namespace_id,
            self._ask.keys[self._start :],
            run_blocks=self._aligned,
            deadline=deadline,
            copies=bool(self._namespace.fine),
        )
        async for found in looking:
            await self._note(found)
            yield

    def has(self, part: Part, key: BlockKey) -> bool:
        found = self.places.get(part)
        return found is not None and key in found

    def with_fine(self, key: BlockKey, block: StoredBlock | None, mask: int) -> int:
        """Return a block's mask with the bits of the groups that refine others: those of their
        bases, or, for who insists on fine parts, whether these are here or there as well."""
        here, _ = ABSENT if block is None else block.refined
        for index in self._namespace.fine:
            spec, bit = self._namespace.groups[index], 1 << index
            mask &= ~bit
            there = bool(mask >> spec.refines & 1)
            if there and self._ask.refined and not here & bit:
                for shard in range(spec.shards):
                    base = self.places.get(Part(spec.refines, shard), {}).get(key)
                    fine = self.places.get(Part(index, shard), {}).get(key)
                    is_exact = base is not None and base.block.raw_nbytes != spec.base_nbytes
                    there &= is_exact or (base is not None and fine is not None)
            mask |= bit if there else 0
        return mask

    def fine_spans(self, keys: Sequence[BlockKey], spans: Sequence[Span]) -> tuple[Span, ...]:
        """Return, of the fine parts of `spans`, the first consecutive ones that the bucket has. A
        block without a base in the bucket, or with an exact one, is not in their way: it gets no
        slot."""
        found = []
        for index in self._namespace.fine:
            for base, begin, end in spans:
                if base.group != self._namespace.groups[index].refines:
                    continue
                part, nbytes = Part(index, base.shard), self._namespace.groups[index].base_nbytes
                there = [key in self.places.get(part, {}) for key in keys[begin:end]]
                if not any(there):
                    continue
                bases = [self.places.get(base, {}).get(key) for key in keys[begin:end]]
                first = there.index(True)
                needs = [each is not None and each.block.raw_nbytes == nbytes for each in bases]
                coarse = (n for n in range(first, end - begin) if needs[n] and not there[n])
                last = next(coarse, end - begin)
                found.append(Span(part, begin + first, begin + last))
        return tuple(found)

    async def open(self, window: Window) -> Reading | None:
        return ObjectReading(
            self._source,
            [
                self.places.get(part, {}).get(key)
                for part, begin, end in window.spans
                for key in window.keys[begin:end]
            ],
        )

    def forget(self, records: Sequence[tuple[Part, BlockKey]]) -> None:
        places = [self.places[part].pop(key, None) for part, key in records]
        self._source.forget([place for place in places if place is not None])

    async def _note(self, found: Found) -> None:
        """Take note of what was found.

        Of a lossy namespace, each object that has a record: a fine part comes from the object from
        which its base comes, and is worth that its base comes from another one than the first.
        """
        fine = self._namespace.fine
        frames = sorted(found.frames[self._frames :], key=lambda f: f.header.part.group in fine)
        for number, frame in enumerate(frames):
            if number % (STEP_BLOCKS // RUN_BLOCKS_MAX) == 0:
                await asyncio.sleep(0)
            if frame.header.part.group not in fine:
                self._note_bases(frame)
            else:
                self._note_fine(frame)
        self._frames = len(found.frames)
        self.found = self._start + found.blocks

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
        groups = self._namespace.groups
        found = (i for i in self._namespace.fine if groups[i].refines == base.group)
        return next((Part(i, base.shard) for i in found), None)

    def _is_exact(self, place: Place, fine: Part) -> bool:
        return place.block.raw_nbytes != self._namespace.groups[fine.group].base_nbytes

    def _note_fine(self, frame: FoundFrame) -> None:
        """Take note of fine parts, after the bases of their object."""
        part = frame.header.part
        base = base_of(self._namespace, part)
        for at in frame.live:
            place = Place(frame, at)
            key = place.block.key
            mine = self._bases.get((frame.location.name, base, key))
            known = key in self.places[part] or place.record in self._useless
            if mine is not None and not known:
                self.places[part][key], self.places[base][key] = place, mine


class ObjectReading:
    """Records of the bucket; None where it has none."""

    limbo = None

    def __init__(self, source: ObjectSource, places: Sequence[Place | None]) -> None:
        self._source = source
        self._places = places
        self.sizes = [place.block.raw_nbytes if place else 0 for place in places]
        self.checksums = [place.block.raw_checksum if place else 0 for place in places]
        self.wrong: list[int] = []

    async def fill(self, targets: Sequence[memoryview | None], deadline: float) -> list[int] | None:
        wanted = {
            at: (target, place)
            for at, (target, place) in enumerate(zip(targets, self._places, strict=True))
            if target is not None and place is not None
        }
        if len(wanted) < sum(target is not None for target in targets):
            return None
        good = await self._source.read(list(wanted.values()), deadline)
        if good is None:
            return None
        self.wrong = [at for at, is_good in zip(wanted, good, strict=True) if not is_good]
        if self.wrong:
            return None
        return [known if at in wanted else 0 for at, known in enumerate(self.checksums)]

    async def close(self) -> None:
        """A bucket holds nothing for a reader."""


def _is_good(view: memoryview, stored: memoryview, place: Place) -> bool:
    """Decode a record if it needs it; return whether it is what was put. Blocking."""
    codec_id, expected = place.frame.header.codec_id, place.block.raw_checksum
    if codec_id == 0:
        return checksum(view) == expected
    return decodes_to(codec_id, stored, view, expected)
