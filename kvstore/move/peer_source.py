"""Another host as a source: its daemon said how much of a prefix it has, and lends it."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from kvstore.decide.ask import Ask
from kvstore.decide.index import StoredBlock
from kvstore.decide.pace import FORGET_S
from kvstore.metrics import Metrics
from kvstore.model.block import BlockKey, Namespace, Part, Span
from kvstore.model.errors import Unavailable
from kvstore.model.member import Member
from kvstore.model.outcome import Reason
from kvstore.model.tenant import NO_TENANT_ID, TenantId
from kvstore.move.load_race import LoadRaces
from kvstore.move.source import Reading, Window
from kvstore.peer.base import (
    READ_WAIT_S_MAX,
    Incoming,
    Limbo,
    PeerBusy,
    PeerCorrupt,
    PeerError,
    PeerGone,
    PeerLink,
    PeerSlow,
)
from kvstore.system.bandwidth import Lane

logger = logging.getLogger(__name__)

READ_S = 10.0  # for the bytes of one window, whoever waits for them
REPORT_S = 2.0
START_WINDOW_NBYTES = 8 << 20  # so that all connections bring the start of a prefix first


class Holder(Protocol):
    """One other host, whoever asks it. failed: told of each error."""

    borrowed_bytes: int

    @property
    def member(self) -> Member: ...

    @property
    def link(self) -> PeerLink | None: ...

    def failed(self, error: PeerError) -> None: ...


class PeerSource:
    """One other host, as one tenant knows it. Its pace outlives its links. lane: what the tenant
    may move; None: no bound. borrowed_bytes: by this tenant."""

    def __init__(
        self,
        holder: Holder,
        metrics: Metrics,
        now: Callable[[], float],
        *,
        tenant: TenantId = NO_TENANT_ID,
        lane: Lane | None = None,
    ) -> None:
        self.name = holder.member.node
        self.races = LoadRaces(metrics, now)
        self.lane = lane
        self.borrowed_bytes = 0
        self._failed_at = -math.inf
        self._holder = holder
        self._tenant = tenant
        self._metrics = metrics
        self._now = now

    def open_link(self) -> PeerLink:
        """Return the link, for this tenant's blocks. Raises PeerGone if there is none."""
        link = self._holder.link
        if link is None:
            raise PeerGone(f"{self.name} has no open link", reason="closed")
        return link.of(self._tenant)

    def failed(self, error: PeerError) -> None:
        """Take note of an error of it."""
        if not isinstance(error, PeerBusy):
            self._failed_at = self._now()
        self._holder.failed(error)

    def now(self) -> float:
        return self._now()

    def expected_s(self, nbytes: int) -> float:
        """Return how long reading takes, by what such reads took. 0: nothing is known; inf: one
        that was given up is still under way, or one failed or came too late not long ago."""
        failed_s = self._now() - max(self._failed_at, self.races.late_at)
        if failed_s < FORGET_S or self.races.pace.loses(nbytes, math.inf):
            return math.inf
        return self.races.pace.predict(nbytes) or 0.0

    def ended(self, outcome: str, nbytes: int = 0) -> None:
        """Count a read."""
        self._metrics.peer_reads.labels(outcome).inc()
        self._metrics.peer_bytes.labels("borrowed").inc(nbytes)
        self.borrowed_bytes += nbytes
        self._holder.borrowed_bytes += nbytes


class PeerListing:
    """What a host has of one prefix: its first `found` blocks, whatever parts a hit needs.

    expected: how many will be there, while they are still being computed. until: for these.
    """

    brings_fine = False
    copies = True
    start_window_nbytes = START_WINDOW_NBYTES

    def __init__(
        self,
        source: PeerSource,
        ask: Ask,
        namespace: Namespace,
        *,
        hit_blocks: int,
        expected: int = 0,
        until: float = 0.0,
    ) -> None:
        self.found = max(hit_blocks, expected)
        self.coming = max(0, expected - hit_blocks)
        self.failure: Reason | None = None
        self._source = source
        self._namespace = namespace
        self._refined = ask.refined
        self._hit_blocks = hit_blocks
        self._until = until
        self._here = frozenset(ask.keys[: self.found])

    async def look(self, deadline: float) -> AsyncIterator[None]:
        yield  # it was asked before: see `Peers`

    def has(self, part: Part, key: BlockKey) -> bool:
        return key in self._here

    def with_fine(self, key: BlockKey, block: StoredBlock | None, mask: int) -> int:
        for index in self._namespace.fine:
            bit = 1 << index
            base_is_there = mask >> self._namespace.groups[index].refines & 1
            mask = mask | bit if base_is_there else mask & ~bit
        return mask

    def fine_spans(self, keys: Sequence[BlockKey], spans: Sequence[Span]) -> tuple[Span, ...]:
        return tuple(
            Span(Part(index, base.shard), begin, end)
            for index in self._namespace.fine
            for base, begin, end in spans
            if base.group == self._namespace.groups[index].refines
        )

    async def open(self, window: Window) -> Reading | None:
        source = self._source
        end = window.first + len(window.keys)
        wait_s = max(0.0, self._until - source.now()) if end > self._hit_blocks else 0.0
        wait_s = min(wait_s, READ_WAIT_S_MAX)
        try:
            if source.lane is not None:
                await source.lane.take(window.nbytes)
            incoming = await source.open_link().read(
                self._namespace,
                window.keys,
                window.spans,
                refined=window.refined,
                wait_s=wait_s,
                deadline=source.now() + wait_s + READ_S,
            )
        except PeerError as error:
            self.fail(error)
            return None
        except Unavailable as error:  # of this tenant's own bandwidth: no fault of the host
            self.failure = Reason.PEER_BUSY
            source.ended(PeerBusy.outcome)
            logger.debug("borrowing=refused reason=%r", str(error))
            return None
        return PeerReading(self, window, incoming)

    def forget(self, records: Sequence[tuple[Part, BlockKey]]) -> None:
        """The host's own copies are verified by itself."""

    def fail(self, error: PeerError) -> None:
        """Take note of why a read failed. Wrong bytes are held against the host once a prefix,
        however many reads they were in."""
        repeated = self.failure is Reason.PEER_CORRUPT and isinstance(error, PeerCorrupt)
        self.failure = _REASONS.get(type(error), Reason.PEER_GONE)
        self._source.ended(error.outcome)
        if not repeated:
            self._source.failed(error)

    def now(self) -> float:
        return self._source.now()

    def missing(self) -> None:
        """Take note that the host does not have what it said, or had."""
        self.failure = Reason.PEER_GONE
        self._source.ended("missing")

    def read(self, nbytes: int) -> None:
        """Take note of a read that brought everything."""
        self._source.ended("read", nbytes)

    async def report(self, keys: Sequence[BlockKey]) -> None:
        """Tell the host that its bytes of some blocks were wrong: it verifies them."""
        source = self._source
        try:
            await source.open_link().corrupt(
                self._namespace.id, keys, deadline=source.now() + REPORT_S
            )
        except PeerError as error:
            source.failed(error)


class PeerReading:
    """One READ under way."""

    checksums: Sequence[int] = ()
    wrong: Sequence[int] = ()

    def __init__(self, listing: PeerListing, window: Window, incoming: Incoming) -> None:
        self._listing = listing
        self._window = window
        self._incoming = incoming
        self.sizes = list(incoming.sizes)

    @property
    def limbo(self) -> Limbo | None:
        return self._incoming.limbo

    async def fill(self, targets: Sequence[memoryview | None], deadline: float) -> list[int] | None:
        if any(
            target is not None and not nbytes
            for target, nbytes in zip(targets, self.sizes, strict=True)
        ):
            self._listing.missing()
            return None
        try:
            async with asyncio.timeout(max(0.0, deadline - self._listing.now())):
                await self._incoming.fill(targets)
        except TimeoutError:
            self._listing.fail(PeerSlow("the lease of its slots was over first"))
            return None
        except PeerError as error:
            self._listing.fail(error)
            if isinstance(error, PeerCorrupt) and error.records:
                await self._listing.report(self._keys_of(error.records))
            return None
        self._listing.read(sum(len(target) for target in targets if target is not None))
        checksums = zip(targets, self._incoming.checksums, strict=True)
        return [number if target is not None else 0 for target, number in checksums]

    async def close(self) -> None:
        await self._incoming.close()

    def _keys_of(self, records: Sequence[int]) -> list[BlockKey]:
        keys = [k for _, begin, end in self._window.spans for k in self._window.keys[begin:end]]
        return list(dict.fromkeys(keys[at] for at in records if at < len(keys)))


_REASONS = {
    PeerBusy: Reason.PEER_BUSY,
    PeerSlow: Reason.PEER_SLOW,
    PeerCorrupt: Reason.PEER_CORRUPT,
}
