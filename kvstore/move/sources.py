"""All the sources of a node, in the order in which they are asked: hosts of the fleet, the pool,
then the bucket, which costs money and takes longer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstore.decide.ask import Ask
from kvstore.decide.planner import Planner
from kvstore.decide.slow_log import SlowLog, Waits
from kvstore.model.block import BlockKey, Match, Namespace
from kvstore.model.member import Holds
from kvstore.model.outcome import Reason
from kvstore.move.fetch import Fetch
from kvstore.move.load_race import Ended
from kvstore.move.source import Candidate

ANSWER_S = 0.02
"""The others are asked for what no host has, or when they take longer to say."""


@dataclass(slots=True)
class Brought:
    """What sources added to a hit. why: what kept it from being longer. peer: the other host that
    gave most, or should have. peer_blocks, pool_blocks: how much longer the hit is by such hosts,
    and by the pool."""

    why: Reason | None = None
    peer: str = ""
    peer_blocks: int = 0
    pool_blocks: int = 0


class Bucket(Protocol):
    """The object tier as a source."""

    @property
    def name(self) -> str: ...

    def candidate(self, ask: Ask, namespace: Namespace, hit: int) -> Candidate: ...


class Pool(Protocol):
    """The pool as a source."""

    @property
    def name(self) -> str: ...

    def candidate(self, ask: Ask, namespace: Namespace, hit: int) -> Candidate | None:
        """Return what will be found of a prefix; None while the pool does not answer."""


class Peers(Protocol):
    """The other hosts of the fleet."""

    async def holders(
        self, ask: Ask, namespace: Namespace, match: Match, deadline: float
    ) -> Sequence[Candidate]:
        """Return those that have more of a prefix than `match`, the best first."""

    async def reach(self, ask: Ask, namespace: Namespace, match: Match, deadline: float) -> int:
        """Return how long a prefix would be with what some host has. No host is told of a namespace
        that it does not know."""

    def seem_to_have(
        self, namespace: Namespace, keys: Sequence[BlockKey], most: int
    ) -> list[Holds]:
        """Return at most so many that seem to have some of a prefix, the longest first, without
        asking them."""

    def may_have(self, ask: Ask, namespace: Namespace, match: Match) -> bool:
        """Say, without asking them, whether any may have more of a prefix than `match`."""


class Sources:
    """match: returns how long the prefix of an ask is now."""

    def __init__(
        self,
        fetch: Fetch,
        planner: Planner,
        match: Callable[[Ask], Match],
        *,
        bucket: Bucket | None,
        pool: Pool | None = None,
    ) -> None:
        self._fetch = fetch
        self._planner = planner
        self._match = match
        self._bucket = bucket
        self._pool = pool
        self.peers: Peers | None = None  # set once they are known
        self.slow: SlowLog | None = None

    def may_have(self, ask: Ask, match: Match) -> bool:
        """Say, without asking them, whether any may have more of a prefix than `match`."""
        if self._far:
            return True
        if self.peers is None:
            return False
        return self.peers.may_have(ask, self._planner.namespace(ask.namespace_id), match)

    @property
    def _far(self) -> bool:
        """Whether there are some that are no hosts of the fleet."""
        return self._bucket is not None or self._pool is not None

    async def promote(self, ask: Ask, match: Match, deadline: float) -> Brought:
        """Make the hit of a prefix longer than `match`, as far as a source has more of it."""
        brought = Brought()
        if self.peers is None:
            await self._from_far(ask, match, deadline, brought)
            return brought
        if not self._far:
            await self._from_peers(self.peers, ask, match, deadline, brought)
            return brought
        asking = asyncio.create_task(self._from_peers(self.peers, ask, match, deadline, brought))
        try:
            await asyncio.wait({asking}, timeout=ANSWER_S)
            if not brought.peer:  # they have not said yet that they have some
                await self._from_far(ask, match, deadline, brought)
                if self._match(ask).hit_blocks == len(ask.keys):
                    return brought
            await asking
        finally:
            asking.cancel()
        if brought.peer:
            await self._from_far(ask, self._match(ask), deadline, brought)
        return brought

    async def _from_peers(
        self, peers: Peers, ask: Ask, match: Match, deadline: float, brought: Brought
    ) -> None:
        namespace = self._planner.namespace(ask.namespace_id)
        with ask.waits.on("answers of peers"):
            holders = await peers.holders(ask, namespace, match, deadline)
        most, failed = 0, list[tuple[Reason, Candidate]]()
        for candidate in holders:
            match = self._match(ask)
            if candidate.listing.found <= match.hit_blocks:
                continue
            brought.peer = brought.peer or candidate.source.name
            more = await self._from(candidate, ask, match, deadline, tier="peer", brought=brought)
            brought.peer_blocks += more
            if more > most:
                most, brought.peer = more, candidate.source.name
            if brought.why is not None:
                failed.append((brought.why, candidate))
            if brought.why is Reason.DEADLINE:
                break
        if failed:
            self._blame(failed, ask, brought, names=not most)

    def _blame(
        self,
        failed: Sequence[tuple[Reason, Candidate]],
        ask: Ask,
        brought: Brought,
        *,
        names: bool,
    ) -> None:
        """Say why the hit is shorter than what peers have, by the one that has most of it; if
        others gave the rest, nothing is wrong. names: it is the peer, too: nobody gave anything."""
        hit = self._match(ask).hit_blocks
        owing = [each for each in failed if each[1].listing.found > hit]
        brought.why = None
        if owing:
            brought.why, candidate = max(owing, key=lambda each: each[1].listing.found)
            if names:
                brought.peer = candidate.source.name

    async def _from_far(self, ask: Ask, match: Match, deadline: float, brought: Brought) -> None:
        """Fetch from the pool, and from the bucket what is still missing."""
        if self._pool is not None:
            namespace = self._planner.namespace(ask.namespace_id)
            candidate = self._pool.candidate(ask, namespace, match.hit_blocks)
            if candidate is not None and match.hit_blocks < len(ask.keys):
                more = await self._from(
                    candidate, ask, match, deadline, tier="pool", brought=brought
                )
                brought.pool_blocks += more
                if brought.why is Reason.DEADLINE:
                    return
                match = self._match(ask) if more else match
        why = brought.why
        await self._from_bucket(ask, match, deadline, brought)
        if brought.why is None and self._match(ask).hit_blocks < len(ask.keys):
            brought.why = why  # of the pool, which should have had it

    async def _from_bucket(self, ask: Ask, match: Match, deadline: float, brought: Brought) -> None:
        if self._bucket is None or match.hit_blocks == len(ask.keys):
            return
        namespace = self._planner.namespace(ask.namespace_id)
        candidate = self._bucket.candidate(ask, namespace, match.hit_blocks)
        await self._from(candidate, ask, match, deadline, tier="object", brought=brought)

    async def _from(
        self,
        candidate: Candidate,
        ask: Ask,
        match: Match,
        deadline: float,
        *,
        tier: str,
        brought: Brought,
    ) -> int:
        """Fetch from a source; return how much longer the hit is by it."""
        own = Waits(self._fetch.now)
        with ask.waits.on(tier), own.on(tier):
            ended = await self._fetch.promote(candidate, ask, match, deadline)
        more = self._match(ask).hit_blocks - max(ask.skip_blocks, match.hit_blocks)
        brought.why = _WHY.get(ended) or candidate.listing.failure
        if self.slow is not None:
            self.slow.note(
                "load",
                own.seconds[tier],
                own.seconds,
                blocks=max(0, more),
                namespace_id=ask.namespace_id,
                request_id=ask.request_id,
                client=ask.client,
                session_id=ask.session_id,
                result=str(brought.why or ended.value),
            )
        return max(0, more)


_WHY = {Ended.LATE: Reason.DEADLINE, Ended.CUT: Reason.SLOWER}
