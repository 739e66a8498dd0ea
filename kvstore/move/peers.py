"""The other hosts of the fleet: links to them, how they behave, and which of them has a prefix."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from kvstore.decide.ask import Ask
from kvstore.metrics import Metrics
from kvstore.model.block import BlockKey, Match, Namespace, NamespaceId
from kvstore.model.errors import KVStoreError, Unavailable
from kvstore.model.member import Member, NodeId, Origin, State
from kvstore.move.peer_heads import PeerHeads
from kvstore.move.peer_source import PeerListing, PeerSource
from kvstore.move.source import Candidate
from kvstore.peer.base import KEYS_MAX, NAMED_KEYS_MAX, PeerCorrupt, PeerError, PeerLink, PeerMatch
from kvstore.peer.choice import ASKED_MAX, LOOKED_AT_MAX, choose
from kvstore.system.breaker import Breaker

logger = logging.getLogger(__name__)

Dial = Callable[[Member, float], Awaitable[PeerLink]]

MATCH_S = 0.05  # for an answer to that
NAMED_MATCH_S = 0.5  # from the host that the request names
VIEW_NBYTES_MAX = 256 << 20
DIAL_S = 2.0
PING_EVERY_S = 2.0
PING_S = 2.0
BACKOFF_MIN_S, BACKOFF_MAX_S = 0.2, 10.0
LOOK_S = 0.2
DELETE_S = 3.0
DEMERITS_MAX = 3  # wrong answers within
DEMERITS_S = 600.0  # this time: then it is not asked for as long again


class Wish(NamedTuple):
    """What is to become longer: the prefix of `ask`, beyond `match`, until a deadline."""

    ask: Ask
    namespace: Namespace
    match: Match
    deadline: float


class Peer:
    """One other host. Its source, and what is known of its pace, outlives its links."""

    def __init__(self, member: Member, metrics: Metrics, now: Callable[[], float]) -> None:
        self.member = member
        self.source = PeerSource(member.node, metrics, now, self._failed)
        self.breaker = Breaker(now, BACKOFF_MIN_S, BACKOFF_MAX_S)
        self.rtt_s: float | None = None
        self.last_error = ""
        self._demerits: deque[float] = deque(maxlen=DEMERITS_MAX)
        self._now = now
        self.pinged_at = now()

    @property
    def link(self) -> PeerLink | None:
        link = self.source.link
        return link if link is not None and link.open else None

    @property
    def quarantined(self) -> bool:
        """Whether it was wrong too often lately."""
        demerits = self._demerits
        return len(demerits) == DEMERITS_MAX and self._now() - demerits[0] < DEMERITS_S

    @property
    def usable(self) -> bool:
        """Whether it may be asked."""
        is_up = self.member.state is State.UP and self.link is not None
        return is_up and self.breaker.closed and not self.quarantined

    @property
    def state(self) -> str:
        """One word: up, down, draining or quarantined."""
        if self.quarantined:
            return "quarantined"
        if self.link is None or not self.breaker.closed:
            return "down"
        return str(self.member.state)

    def status(self) -> dict[str, Any]:
        """Return what `kvstore members` shows."""
        return {
            "node": self.member.node,
            "address": self.member.address,
            "state": self.state,
            "version": self.member.version,
            "zone": self.member.zone,
            "engines": list(self.member.engines),
            "arena_bytes": self.member.arena_bytes,
            "file_bytes": self.member.file_bytes,
            "round_trip_s": self.rtt_s,
            "borrowed_bytes": self.source.borrowed_bytes,
            "breaker": self.breaker.state.value,
            "demerits": sum(self._now() - at < DEMERITS_S for at in self._demerits),
            "last_error": self.last_error,
        }

    def _failed(self, error: PeerError) -> None:
        self.last_error = str(error)[:200]
        if isinstance(error, PeerCorrupt):
            self._demerits.append(self._now())
        logger.warning(
            "peer=failed node=%s outcome=%s reason=%r", self.member.node, error.outcome, str(error)
        )

    async def close(self) -> None:
        """End the link. Reads on one that is lost already may still end well."""
        link, self.source.link = self.source.link, None
        if link is not None and link.open:
            await link.close()


class Peers:
    """Every other member of the fleet. dial: makes a link to one. own: this daemon's id."""

    def __init__(
        self,
        dial: Dial,
        own: NodeId,
        metrics: Metrics,
        now: Callable[[], float],
        *,
        view_nbytes_max: int = VIEW_NBYTES_MAX,
        zone: str = "",
    ) -> None:
        """view_nbytes_max: of what is known of others' heads. zone: of this host."""
        self.heads = PeerHeads(view_nbytes_max, now)
        self._zone = zone
        self._dial = dial
        self._own = own
        self._metrics = metrics
        self._now = now
        self._peers: dict[NodeId, Peer] = {}
        self._by_engine: dict[str, NodeId] = {}
        self._dialling: dict[NodeId, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()

    def __iter__(self) -> Any:
        return iter(list(self._peers.values()))

    def know(self, members: Mapping[NodeId, Member]) -> None:
        """Take note of who is in the fleet now."""
        for node in self._peers.keys() - members.keys():
            gone = self._peers.pop(node)
            self._keep(node, self._let_go(gone))
        for node, member in members.items():
            if node == self._own:
                continue
            known = self._peers.get(node)
            if known is None:
                self._peers[node] = Peer(member, self._metrics, self._now)
            elif known.member != member:
                moved = known.member.address != member.address
                restarted = known.member.instance != member.instance
                known.member = member
                if moved or restarted:
                    self._keep(node, known.close())
        self._index_engines()
        self._changed.set()

    async def _let_go(self, peer: Peer) -> None:
        await peer.close()
        await self.heads.forget(peer.member.node)

    async def run(self) -> None:
        """Keep a link to every peer: dial, ping, and dial again."""
        while True:
            for node, peer in list(self._peers.items()):
                if node not in self._dialling and self._is_due(peer):
                    self._keep(node, self._tend(peer))
                if (link := peer.link) is not None:
                    self.heads.follow(node, link)
            counts = dict.fromkeys(("up", "down", "draining", "quarantined"), 0)
            for peer in self._peers.values():
                counts[peer.state] += 1
            for state, count in counts.items():
                self._metrics.peers.labels(state).set(count)
            self._changed.clear()
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def _is_due(self, peer: Peer) -> bool:
        if peer.link is None:
            return not peer.breaker.retry_after_s
        return self._now() - peer.pinged_at >= PING_EVERY_S

    def _keep(self, node: NodeId, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        before = self._dialling.get(node)
        if before is not None:
            before.cancel()
        self._dialling[node] = task

        def over(done: asyncio.Task[None]) -> None:
            if self._dialling.get(node) is done:
                del self._dialling[node]

        task.add_done_callback(over)

    async def _tend(self, peer: Peer) -> None:
        """Dial a peer, or see whether it still answers."""
        peer.pinged_at = self._now()
        try:
            link = peer.link
            if link is None or link.worn:
                await peer.close()
                link = await self._dial(peer.member, self._now() + DIAL_S)
                peer.source.link = link
                logger.info("peer=linked node=%s address=%s", peer.member.node, peer.member.address)
            peer.rtt_s = await link.ping(self._now() + PING_S)
            self._learn(peer, link.peer)
        except KVStoreError as error:
            peer.last_error = str(error)[:200]
            closed = peer.breaker.closed
            peer.breaker.trip() if closed else peer.breaker.probe_failed()
            await peer.close()
            if closed:
                logger.warning("peer=down node=%s reason=%r", peer.member.node, peer.last_error)
        else:
            peer.breaker.success()

    def _learn(self, peer: Peer, told: Member) -> None:
        """Take what a peer says of itself: it is newer than what the membership says."""
        if told != peer.member and self._peers.get(told.node) is peer:
            peer.member = replace(told, address=peer.member.address)
            self._index_engines()

    def _index_engines(self) -> None:
        self._by_engine = {
            address: node for node, peer in self._peers.items() for address in peer.member.engines
        }

    async def close(self) -> None:
        """End every link."""
        await self.heads.close()
        tasks = list(self._dialling.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(peer.close() for peer in self), return_exceptions=True)

    def find(self, origin: Origin) -> Peer | None:
        """Return the peer that a request names, None if it is no member, or cannot be asked. A
        request never makes a daemon connect anywhere."""
        node = self._by_engine.get(origin.source, NodeId(origin.source))
        peer = self._peers.get(node)
        if peer is not None and peer.usable:
            return peer
        if node != self._own:
            reason = "unknown" if peer is None else "unreachable"
            self._metrics.peer_refused.labels(reason).inc()
        return None

    async def holders(
        self, ask: Ask, namespace: Namespace, match: Match, deadline: float
    ) -> Sequence[Candidate]:
        """Return those that have more of a prefix than `match`, the longest first."""
        wish = Wish(ask, namespace, match, deadline)
        named = self.find(ask.origin) if ask.origin is not None else None
        if named is not None and ask.origin is not None:
            expected = ask.origin.expect_blocks
            found = await self._asked(named, wish, NAMED_MATCH_S, expected)
            if found is not None:
                return [found]
        others = self._seem_to_have(wish, besides=named)
        if not others:
            return []
        answers = await asyncio.gather(*(self._asked(each, wish, MATCH_S) for each in others))
        there = [each for each in answers if each is not None]
        return sorted(there, key=lambda each: -each.listing.found)

    def may_have(self, ask: Ask, namespace: Namespace) -> bool:
        """Say, without asking them, whether any may have some of a prefix: most acquires of what
        nobody has end here."""
        if ask.origin is not None or len(self._peers) <= ASKED_MAX:
            return True
        return self.heads.knows(ask.keys, namespace.block_tokens)

    def _seem_to_have(self, wish: Wish, *, besides: Peer | None) -> list[Peer]:
        """Return the peers to ask: all if they are few, else those whose heads say that they have
        more, the longest first. Of those within one head, any may be first, but for the zone."""
        if len(self._peers) <= ASKED_MAX:
            return [peer for peer in self if peer.usable and peer is not besides]
        found = self.heads.holders(
            wish.ask.keys, wish.namespace.block_tokens, wish.match.hit_blocks, LOOKED_AT_MAX
        )
        if not found:
            return []
        known = ((self._peers.get(node), heads) for node, heads in found)
        there = [(p, heads) for p, heads in known if p and p.usable and p is not besides]
        return choose(there, is_near=lambda peer: bool(peer.member.zone == self._zone))

    async def _asked(
        self, peer: Peer, wish: Wish, answer_s: float, expected: int = 0
    ) -> Candidate | None:
        """Ask a peer how much it has; None: not more than is here, or no answer."""
        ask, namespace, match, deadline = wish
        began = self._now()
        until = min(deadline, ask.look_until, began + answer_s)
        keys = ask.keys[:KEYS_MAX]
        # Of a window group, it may be this host that lacks blocks before the end of its own hit.
        skip = ask.skip_blocks if namespace.has_windows else match.hit_blocks
        try:
            answer = await peer.source.open_link().match(
                namespace, keys, skip_blocks=skip, refined=ask.refined, deadline=until
            )
        except PeerError as error:
            self._metrics.peer_match_seconds.labels(error.outcome).observe(self._now() - began)
            peer.source.failed(error)
            peer.pinged_at = -math.inf  # is it there? The next requests may not have to wait
            return None
        self._metrics.peer_match_seconds.labels("answered").observe(self._now() - began)
        expected = min(expected, len(keys))
        hit = _believed(answer, len(keys))
        if max(hit, expected) <= match.hit_blocks:
            return None
        listing = PeerListing(
            peer.source, ask, namespace, hit_blocks=hit, expected=expected, until=deadline
        )
        return Candidate(peer.source, listing)

    async def delete(
        self, namespace_id: NamespaceId | None, keys: Sequence[BlockKey] | None
    ) -> None:
        """Delete blocks on every member; None: all of a namespace, or of all of them.

        Raises Unavailable that names those that did not confirm: what they hold may come back.
        """
        peers = list(self)
        results = await asyncio.gather(
            *(self._delete_at(peer, namespace_id, keys) for peer in peers), return_exceptions=True
        )
        missing = [
            f"{peer.member.node[:8]} at {peer.member.address}"
            for peer, link in zip(peers, results, strict=True)
            # One that ended since: a new start of it may have read from who was told last.
            if isinstance(link, BaseException) or not link.open
        ]
        if missing:
            raise Unavailable(
                f"deleted on {len(peers) - len(missing)} of {len(peers)} other daemons, not on "
                f"{', '.join(missing[:8])}: delete again once they are back, or their copies may "
                "return",
                reason="fleet",
            )

    async def _delete_at(
        self, peer: Peer, namespace_id: NamespaceId | None, keys: Sequence[BlockKey] | None
    ) -> PeerLink:
        """Delete blocks on one member; return the link by which it has confirmed."""
        link, deadline = peer.source.open_link(), self._now() + DELETE_S
        if keys is None:
            await link.delete(namespace_id, None, deadline=deadline)
            return link
        assert namespace_id is not None
        for first in range(0, len(keys), NAMED_KEYS_MAX):
            part = keys[first : first + NAMED_KEYS_MAX]
            await link.delete(namespace_id, part, deadline=deadline)
        return link

    def stats(self) -> list[dict[str, Any]]:
        """Return a status of each, by address."""
        return sorted((peer.status() for peer in self), key=lambda each: each["address"])


def _believed(answer: PeerMatch, most: int) -> int:
    return 0 if answer.busy else min(answer.hit_blocks, most)
