"""The pool as a source: which records of a prefix it has, and how they come into the arena."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence

from kvstore.decide.ask import Ask
from kvstore.decide.index import ABSENT, StoredBlock
from kvstore.metrics import Metrics
from kvstore.model.block import BlockKey, Namespace, NamespaceId, Part, Span
from kvstore.model.outcome import Reason
from kvstore.move.load_race import LoadRaces
from kvstore.move.pool_graves import PoolGraves
from kvstore.move.source import WINDOW_NBYTES, Candidate, Reading, Window
from kvstore.tier.pool import PoolFailed, PoolRecord, PoolTier, record_name

LOOK_S = 0.25  # for a whole prefix: an answer takes a millisecond for a thousand names
GET_S = 5.0  # for the records of one window, whoever waits for them
NAMES_MAX = 2048  # looked for at once
FIRST_BLOCKS = 64  # looked for first: most prefixes that go on elsewhere are short, or not there


class PoolSource:
    """A pool. Its pace is its own."""

    name = "pool"

    def __init__(
        self,
        tier: PoolTier,
        graves: PoolGraves,
        metrics: Metrics,
        now: Callable[[], float],
    ) -> None:
        self.graves = graves
        self.races = LoadRaces(metrics, now)
        self.tier = tier
        self.now = now

    def candidate(self, ask: Ask, namespace: Namespace, hit: int) -> Candidate | None:
        """Return what will be found of a prefix of which `hit` blocks are here; None while the pool
        does not answer, or what was deleted is not known yet."""
        if not (self.tier.up and self.graves.loaded):
            return None
        return Candidate(self, PoolListing(self, ask, namespace, hit))


class PoolListing:
    """What of one prefix is in the pool. Fine parts never are."""

    brings_fine = False
    coming = 0
    copies = False
    start_window_nbytes = WINDOW_NBYTES

    def __init__(self, source: PoolSource, ask: Ask, namespace: Namespace, hit: int) -> None:
        self.found = hit
        self.failure: Reason | None = None
        self._source = source
        self._ask = ask
        self._namespace = namespace
        self._parts = base_parts(namespace)
        self._start = max(ask.skip_blocks, hit - _window_blocks(namespace))
        self._there: set[tuple[Part, BlockKey]] = set()

    async def look(self, deadline: float) -> AsyncIterator[None]:
        source, keys = self._source, self._ask.keys
        until = min(deadline, source.now() + LOOK_S)
        at, step = self._start, FIRST_BLOCKS
        while at < len(keys):
            some = keys[at : at + max(1, min(step, NAMES_MAX // len(self._parts)))]
            records = [(part, key) for key in some for part in self._parts]
            names = [record_name(self._ask.namespace_id, key, part) for part, key in records]
            try:
                there = await source.tier.exists(names, until)
            except PoolFailed as error:
                self.fail(error)
                return
            self._there.update(
                record for record, is_there in zip(records, there, strict=True) if is_there
            )
            at += len(some)
            self.found = max(self.found, at)
            yield
            if not any(there[-len(self._parts) :]):
                return  # the prefix ends before
            step = NAMES_MAX

    def has(self, part: Part, key: BlockKey) -> bool:
        return (part, key) in self._there

    def with_fine(self, key: BlockKey, block: StoredBlock | None, mask: int) -> int:
        """Return a block's mask with the bits of the groups that refine others: those of their
        bases; for who insists on fine parts, of what is here."""
        here, _ = ABSENT if block is None else block.refined
        for index in self._namespace.fine:
            bit = 1 << index
            has_base = mask >> self._namespace.groups[index].refines & 1
            mask &= ~bit
            if has_base and (not self._ask.refined or here & bit):
                mask |= bit
        return mask

    def fine_spans(self, keys: Sequence[BlockKey], spans: Sequence[Span]) -> tuple[Span, ...]:
        return ()

    async def open(self, window: Window) -> Reading | None:
        records = [
            (part, key) for part, begin, end in window.spans for key in window.keys[begin:end]
        ]
        most = [self._namespace.record_nbytes(part) for part, _ in records]
        sizes = [
            nbytes if record in self._there else 0
            for record, nbytes in zip(records, most, strict=True)
        ]
        if self._namespace.varies:
            try:
                sizes = await self._own_sizes(window.namespace_id, records, most)
            except PoolFailed as error:
                self.fail(error)
                return None
        floor = self._source.graves.floor
        found = [
            PoolRecord(window.namespace_id, part, key, nbytes, floor(window.namespace_id, key))
            for (part, key), nbytes in zip(records, sizes, strict=True)
        ]
        return PoolReading(self, found)

    async def _own_sizes(
        self,
        namespace_id: NamespaceId,
        records: Sequence[tuple[Part, BlockKey]],
        most: Sequence[int],
    ) -> list[int]:
        """Return the size of each record as the pool says, 0 where it has none that fits."""
        there = [record for record in records if record in self._there]
        names = [record_name(namespace_id, key, part) for part, key in there]
        told = await self._source.tier.sizes(names, self._source.now() + GET_S)
        sizes = dict(zip(there, told, strict=True))
        found = [sizes.get(record, 0) for record in records]
        return [nbytes if nbytes <= limit else 0 for nbytes, limit in zip(found, most, strict=True)]

    def forget(self, records: Sequence[tuple[Part, BlockKey]]) -> None:
        """It has no fine parts."""

    def fail(self, error: PoolFailed) -> None:
        """Take note of why looking or reading failed."""
        if error.reason != "busy":
            self.failure = _REASONS.get(error.reason, Reason.POOL_GONE)

    async def get(
        self, wanted: Sequence[tuple[PoolRecord, memoryview]], deadline: float
    ) -> list[int] | None:
        """Read records into their targets; return their checksums, None if one cannot be had."""
        try:
            return await self._source.tier.get(wanted, min(deadline, self._source.now() + GET_S))
        except PoolFailed as error:
            self.fail(error)
            return None


class PoolReading:
    """Records of the pool; of no bytes where it has none."""

    limbo = None
    checksums: Sequence[int] = ()
    wrong: Sequence[int] = ()

    def __init__(self, listing: PoolListing, records: Sequence[PoolRecord]) -> None:
        self._listing = listing
        self._records = records
        self.sizes = [record.nbytes for record in records]

    async def fill(self, targets: Sequence[memoryview | None], deadline: float) -> list[int] | None:
        wanted = [
            (record, target)
            for record, target in zip(self._records, targets, strict=True)
            if target is not None
        ]
        if not all(record.nbytes for record, _ in wanted):
            return None
        found = await self._listing.get(wanted, deadline)
        if found is None:
            return None
        left = iter(found)
        return [next(left) if target is not None else 0 for target in targets]

    async def close(self) -> None:
        """A pool holds nothing for a reader."""


def base_parts(namespace: Namespace) -> list[Part]:
    """Return the parts of a block that a pool keeps: all but the fine ones."""
    return [
        Part(group, shard)
        for group, spec in enumerate(namespace.groups)
        if spec.refines == -1
        for shard in range(spec.shards)
    ]


def _window_blocks(namespace: Namespace) -> int:
    """Return how many blocks before its end a hit may need of window groups alone."""
    most = max(group.window_tokens for group in namespace.groups)
    return -(-most // namespace.block_tokens)


_REASONS = {"slow": Reason.POOL_SLOW, "corrupt": Reason.POOL_CORRUPT}
