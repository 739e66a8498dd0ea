"""Promotes a prefix for a request that waits for it: from every tier, as far as it may be leased,
until a deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from kvstore.decide.ask import Ask
from kvstore.decide.pace import Stakes
from kvstore.decide.planner import Leases, Planner, is_readable, needed_spans
from kvstore.model.block import Match, Namespace, Span, padded
from kvstore.model.outcome import POOL_REASONS, Reason
from kvstore.move.fetch import Fetch
from kvstore.move.filling import Filling
from kvstore.move.promote import Promoted, Promotion
from kvstore.move.sources import Bucket, Pool, Sources
from kvstore.move.write_behind import WriteBehind

ROUNDS_MAX = 6  # each but the first for what is left, or for a prefix that may find room
SHORTENED_SHARE = 4  # one block in so many is given up where all came but the windows


class Acquired(NamedTuple):
    """How much of a prefix is resident, why not all of it, and how much was at first.

    affordable: False if the bound on leases does not let it go now.
    """

    hit: int
    why: Reason | None
    resident: int
    affordable: bool = True
    objects: int = 0  # of the hit, from the object tier
    peers: int = 0  # of the hit, from other hosts
    peer: str = ""  # the one of these that gave most, or should have
    pool: int = 0  # of the hit, from the pool
    filling: Filling | None = None  # what of the hit is still read into its slots


class Acquisition:
    """Promotes prefixes. leasable_bytes: what leases may hold of the arena, all together."""

    def __init__(
        self,
        planner: Planner,
        promotion: Promotion,
        write_behind: WriteBehind,
        leases: Leases,
        *,
        fetch: Fetch,
        bucket: Bucket | None = None,
        pool: Pool | None = None,
        leasable_bytes: int,
        now: Callable[[], float],
    ) -> None:
        self._planner = planner
        self._promotion = promotion
        self._write_behind = write_behind
        self._reads = write_behind.reads
        self._leases = leases
        self.sources = Sources(fetch, planner, self._match, bucket=bucket, pool=pool)
        self.sources.slow = self._reads.slow
        self.leasable_bytes = leasable_bytes
        self._now = now

    @property
    def room_bytes(self) -> int:
        """What may be leased for reading now; less than nothing when reservations exceed it."""
        return self.leasable_bytes - self._leases.leased_bytes

    async def promote(self, ask: Ask, deadline: float) -> Acquired:
        """Promote as much of the prefix as may be leased and arrives before the deadline.

        What this node lacks comes from the object tier, while the rest comes from the file tier.
        Fine parts come last, in the time that is left.
        """
        acquired = await self._promote_all(ask, deadline)
        refines = acquired.affordable and not ask.refined
        if refines and await self._refine(ask, acquired.hit, deadline):
            return self._still(ask, acquired)
        return acquired

    def _still(self, ask: Ask, acquired: Acquired) -> Acquired:
        """Return what is left of a hit after others had their turn: nobody holds it yet."""
        if not acquired.affordable or acquired.hit <= ask.skip_blocks:
            return acquired
        hit = self._match(ask, acquired.hit).resident_blocks
        if hit == acquired.hit:
            return acquired
        # What was fetched is the end of a hit, so its end goes first.
        fetched = acquired.objects + acquired.peers + acquired.pool
        fetched = max(0, fetched - max(0, acquired.hit - hit))
        peers = min(fetched, acquired.peers)
        pool = min(fetched - peers, acquired.pool)
        return acquired._replace(
            hit=hit,
            why=acquired.why or Reason.NO_ROOM,
            objects=fetched - peers - pool,
            peers=peers,
            pool=pool,
        )

    async def _refine(self, ask: Ask, hit: int, deadline: float) -> bool:
        """Promote the fine parts of a hit from the file tier, as far as they come in time. Returns
        whether it took any time."""
        namespace = self._planner.namespace(ask.namespace_id)
        until = min(deadline, ask.look_until)
        if not namespace.fine or ask.in_files or hit <= ask.skip_blocks or self._now() >= until:
            return False
        spans = needed_spans(namespace, hit, ask.skip_blocks, fine=True)
        with ask.waits.on("fine parts"):
            await self._promotion.promote(ask.namespace_id, ask.keys, spans, until)
        return True

    async def _promote_all(self, ask: Ask, deadline: float) -> Acquired:
        match = self._match(ask)
        if match.hit_blocks == len(ask.keys) or not self.sources.may_have(ask, match):
            return await self._promote(ask, deadline, match, early=ask.early)
        fetch = asyncio.create_task(self.sources.promote(ask, match, deadline))
        try:
            reached = await self._promote(ask, deadline, match)
            brought = await fetch
        finally:
            fetch.cancel()  # if nobody waits any more; what it began still ends by itself
        reached = self._still(ask, reached)
        if self._match(ask).hit_blocks <= match.hit_blocks or not reached.affordable:
            return reached._replace(why=reached.why or brought.why, peer=brought.peer)
        again = await self._promote(ask, deadline, self._match(ask))
        fetched = max(0, again.hit - max(ask.skip_blocks, match.hit_blocks))
        peers = min(fetched, brought.peer_blocks)
        pool = min(fetched - peers, brought.pool_blocks)
        told = brought.peer or brought.why in POOL_REASONS
        return again._replace(
            resident=reached.resident,
            objects=fetched - peers - pool,
            peers=peers,
            peer=brought.peer,
            pool=pool,
            why=again.why or (brought.why if told else None),
        )

    async def _promote(
        self, ask: Ask, deadline: float, match: Match, *, early: bool = False
    ) -> Acquired:
        """Promote what this node has of a prefix. match: of this moment. early: the last of it may
        still be on its way."""
        namespace = self._planner.namespace(ask.namespace_id)
        early = early and not ask.in_files and not namespace.fine
        failed_reads, over_quota = self._reads.failed, self._reads.over_quota
        resident = match.resident_blocks
        if ask.in_files:  # what it reads itself is no less from the file tier
            there = self._planner.match(
                ask.namespace_id, ask.keys, ask.skip_blocks, refined=ask.refined
            )
            resident = there.resident_blocks
            await asyncio.sleep(0)  # every record was looked at several times: let others run
        longest = len(ask.keys)  # that there may be room for
        came_before = -1
        for attempt in range(ROUNDS_MAX):
            if attempt:  # a block that was lost meanwhile makes the prefix shorter
                match = self._match(ask)
            cut = match.hit_blocks > longest
            stored = self._match(ask, longest).hit_blocks if cut else match.hit_blocks
            wanted = self._affordable(namespace, ask, stored)
            if wanted is None:
                return Acquired(match.hit_blocks, Reason.LEASED_BYTES, resident, affordable=False)
            short = Reason.NO_ROOM if cut else Reason.LEASED_BYTES
            why = short if wanted < match.hit_blocks else None
            if wanted == match.resident_blocks and not ask.in_files:
                return Acquired(wanted, why, resident)  # no record was looked at, none woken
            spans = needed_spans(namespace, wanted, ask.skip_blocks, fine=ask.refined)
            stakes = ask.stakes(replace(match, hit_blocks=wanted))
            early_blocks = wanted if early else 0
            brought = await self._bring_up(ask, spans, deadline, stakes, early_blocks=early_blocks)
            hit = wanted if brought.filling else self._match(ask, wanted).resident_blocks
            if hit == wanted:
                return Acquired(hit, why, resident, filling=brought.filling)
            if brought.slower or self._reads.over_quota > over_quota:
                return Acquired(hit, Reason.SLOWER if brought.slower else Reason.DEADLINE, resident)
            if self._reads.failed == failed_reads:
                came = self._came(ask, wanted)
                if came == came_before or not await self._is_written(ask, deadline):
                    longest = self._shorter(ask, wanted, came)
                came_before = came
            if self._now() >= deadline:
                return Acquired(hit, Reason.DEADLINE, resident)
        failed = self._reads.failed > failed_reads
        return Acquired(hit, Reason.READ_FAILED if failed else Reason.NO_ROOM, resident)

    async def _bring_up(
        self,
        ask: Ask,
        spans: Sequence[Span],
        deadline: float,
        stakes: Stakes | None,
        *,
        early_blocks: int,
    ) -> Promoted:
        """Promote `spans`, and begin to write what has to leave the arena for them."""
        if not ask.in_files:
            await write_ahead(self._planner, self.slots_nbytes(ask, spans), deadline, self._now)
            if self._planner.dirty.count:
                self._write_behind.wake()
        with ask.waits.on("file"):
            brought = await self._promotion.promote(
                ask.namespace_id,
                ask.keys,
                spans,
                deadline,
                stakes,
                in_files=ask.in_files,
                early_blocks=early_blocks,
            )
        if ask.in_files:
            await asyncio.sleep(0)
        return brought

    async def _is_written(self, ask: Ask, deadline: float) -> bool:
        """Wait until what is to be written now is in the file tier: then it may leave the arena.
        False: nothing is to be written, or the time is over."""
        if not self._planner.dirty.count:
            return False
        with ask.waits.on("room"):
            until = min(deadline, ask.look_until)
            return await self._write_behind.settle(self._planner.dirty.last, until)

    def _came(self, ask: Ask, wanted: int) -> int:
        """Return how much of a prefix is resident, but for its windows."""
        return self._planner.match(
            ask.namespace_id,
            ask.keys[:wanted],
            ask.skip_blocks,
            in_files=ask.in_files,
            refined=ask.refined,
            windows=False,
        ).resident_blocks

    def _shorter(self, ask: Ask, wanted: int, came: int) -> int:
        """Return how long a prefix to try where there was no room for one of `wanted` blocks.

        Blocks come in prefix order, so what has come of it is a shorter one, but for its windows.
        These may take the place of blocks behind it, which nobody holds for it any more.
        """
        shorter = wanted - max(1, (wanted - ask.skip_blocks) // SHORTENED_SHARE)
        return max(ask.skip_blocks, min(came, shorter))

    def slots_nbytes(self, ask: Ask, spans: Sequence[Span]) -> int:
        """Return what `spans` take of the arena: all, but for what the asker reads in files. Where
        there is room for the most that they may take, it is that: no record is looked at."""
        namespace = self._planner.namespace(ask.namespace_id)
        most = span_nbytes(namespace, spans)
        if most <= self.room_bytes or not (ask.in_files or namespace.varies):
            return most
        found = self._planner.find(ask.namespace_id, ask.keys, spans)
        return sum(
            padded(record.nbytes)
            for record in found
            if record is not None
            and (not ask.in_files or record.resident is not None or not is_readable(record))
        )

    def _match(self, ask: Ask, blocks: int | None = None) -> Match:
        """Match the prefix, or the first `blocks` of it."""
        return self._planner.match(
            ask.namespace_id,
            ask.keys[:blocks],
            ask.skip_blocks,
            in_files=ask.in_files,
            refined=ask.refined,
        )

    def _affordable(self, namespace: Namespace, ask: Ask, hit: int) -> int | None:
        """Return the hit that may be leased now; None if only other leases stand in its way."""
        skip = ask.skip_blocks
        bound = self.leasable_bytes
        needed = self.slots_nbytes(ask, needed_spans(namespace, hit, skip, fine=ask.refined))
        while needed > bound and hit > skip:  # windows do not shrink with the prefix
            hit = self._match(ask, skip + int((hit - skip) * bound / needed)).hit_blocks
            needed = self.slots_nbytes(ask, needed_spans(namespace, hit, skip, fine=ask.refined))
        return hit if needed <= self.room_bytes or hit == skip else None


async def write_ahead(
    planner: Planner, nbytes: int, deadline: float, now: Callable[[], float]
) -> None:
    """Queue the writes of what will leave the arena for so many bytes. What is to be written of it
    is decided in steps, so that others run between them."""
    while True:
        is_decided = planner.eviction.write_ahead(nbytes)
        if is_decided or now() >= deadline:
            return
        await asyncio.sleep(0)


def span_nbytes(namespace: Namespace, spans: Sequence[Span]) -> int:
    """Return the bytes of the slots of `spans`."""
    return sum((end - begin) * padded(namespace.record_nbytes(part)) for part, begin, end in spans)
