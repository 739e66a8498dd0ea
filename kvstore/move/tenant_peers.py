"""The other hosts, for the store of one tenant: which of them has a prefix, and deletes there.

A tenant borrows of the same tenant of other hosts, and of nobody else. What is known of their heads
and of their pace is its own, so that nothing of it tells what other tenants have or do.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

from kvstore.decide.ask import Ask
from kvstore.decide.heads import head_step
from kvstore.metrics import Metrics
from kvstore.model.block import BlockKey, Match, Namespace, NamespaceId
from kvstore.model.errors import Unavailable
from kvstore.model.member import Holds, NodeId, Origin
from kvstore.model.tenant import NO_TENANT_ID, TenantId
from kvstore.move.load import block_nbytes
from kvstore.move.peer_heads import PeerHeads
from kvstore.move.peer_source import PeerListing, PeerSource
from kvstore.move.peers import Peer, Peers
from kvstore.move.source import Candidate
from kvstore.peer.base import (
    KEYS_MAX,
    NAMED_KEYS_MAX,
    PeerError,
    PeerIncompatible,
    PeerLink,
    PeerMatch,
)
from kvstore.peer.choice import ASKED_MAX, LOOKED_AT_MAX, Offer, best_first, choose
from kvstore.system.bandwidth import Lane

MATCH_S = 0.05  # for an answer to that
MATCH_ROUND_TRIPS = 4  # or so many: a host that does not know the namespace is told of it first
MATCH_S_MAX = 1.0
FAR_S = 4 * MATCH_S  # more, for who may have more than others, if no pace says what that is worth
NAMED_MATCH_S = 0.5  # from the host that the request names
VIEW_NBYTES_MAX = 256 << 20
DELETE_S = 3.0
WITHOUT_S = 2.0  # a host that does not have the tenant is asked again


class Wish(NamedTuple):
    """What is to become longer: the prefix of `ask`, beyond `match`, until a deadline."""

    ask: Ask
    namespace: Namespace
    match: Match
    deadline: float
    registers: bool = True  # else hosts that do not know the namespace are not told of it


class TenantPeers:
    """Every other host, as one tenant knows it. `close` it, or all of `peers`."""

    def __init__(
        self,
        peers: Peers,
        metrics: Metrics,
        now: Callable[[], float],
        *,
        tenant: TenantId = NO_TENANT_ID,
        view_nbytes_max: int = VIEW_NBYTES_MAX,
        zone: str = "",
        lane: Lane | None = None,
    ) -> None:
        """metrics: the tenant's. view_nbytes_max: of what is known of others' heads. zone: of this
        host. lane: what the tenant may move; None: no bound."""
        self.tenant = tenant
        self.heads = PeerHeads(view_nbytes_max, now, peers.followed)
        self._peers = peers
        self._metrics = metrics
        self._now = now
        self._zone = zone
        self._lane = lane
        self._random = random.Random(peers.own)  # hosts differ, so not all ask the same one
        self._sources: dict[NodeId, PeerSource] = {}
        self.doubtful: Callable[[], Collection[NodeId]] = tuple  # they are not borrowed from
        self._without: dict[NodeId, float] = {}  # hosts without the tenant: until when to believe
        peers.tenants.append(self)

    async def close(self) -> None:
        """Ask nobody any more."""
        if self in self._peers.tenants:
            self._peers.tenants.remove(self)
        await self.heads.close()

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._peers)

    def follow(self, node: NodeId, link: PeerLink) -> None:
        """Follow the heads of a host over a link, until that ends."""
        if not self.heads.follows(node):
            self.heads.follow(node, link.of(self.tenant))

    async def forget(self, node: NodeId) -> None:
        """Drop what is known of a host that has left the fleet."""
        self._sources.pop(node, None)
        self._without.pop(node, None)
        await self.heads.forget(node)

    def source(self, peer: Peer) -> PeerSource:
        """Return a host as a source of the tenant's blocks."""
        found = self._sources.get(peer.member.node)
        if found is None:
            found = self._sources[peer.member.node] = PeerSource(
                peer, self._metrics, self._now, tenant=self.tenant, lane=self._lane
            )
        return found

    async def holders(
        self, ask: Ask, namespace: Namespace, match: Match, deadline: float
    ) -> Sequence[Candidate]:
        """Return those that have more of a prefix than `match`, the best first."""
        return await self._holders(Wish(ask, namespace, match, deadline))

    async def reach(self, ask: Ask, namespace: Namespace, match: Match, deadline: float) -> int:
        """Return how long a prefix would be with what some host has, which need not know of the
        namespace before. Each has as long to say it as for `holders`."""
        found = await self._holders(Wish(ask, namespace, match, deadline, registers=False))
        return max((each.listing.found for each in found), default=match.hit_blocks)

    async def _holders(self, wish: Wish) -> Sequence[Candidate]:
        ask, namespace = wish.ask, wish.namespace
        named = self._named(ask.origin) if ask.origin is not None else None
        if named is not None and ask.origin is not None:
            expected = ask.origin.expect_blocks
            found = await self._asked(named, wish, NAMED_MATCH_S, expected)
            if found is not None:
                return [found]
        others = self._seem_to_have(wish, besides=named)
        if not others:
            return []
        answers = await self._answers(others, wish)
        offers = [
            (candidate, self._offer(peer, candidate, wish))
            for peer, candidate in zip(others, answers, strict=True)
            if candidate is not None
        ]
        # Of a window group, each reads what a hit of its own length needs: all for nothing, if the
        # next one makes it longer.
        step = 1 if namespace.has_windows else head_step(namespace.block_tokens)
        return best_first(offers, step=step, shuffle=self._random.shuffle)

    async def _answers(self, others: Sequence[Peer], wish: Wish) -> list[Candidate | None]:
        """Ask several peers. Who is far away is not waited for once another one has it all."""
        asking = [
            asyncio.get_running_loop().create_task(self._asked(each, wish, MATCH_S))
            for each in others
        ]
        had_time = False
        try:
            done, late = await asyncio.wait(asking, timeout=MATCH_S)
            had_time = True
            if late and not any(_has_all(each.result(), wish.ask) for each in done):
                # With a pace, `look_until` bounds each.
                some = any(each.result() is not None for each in done)
                bounded = some and not wish.ask.recompute_s_per_block
                await asyncio.wait(late, timeout=FAR_S if bounded else None)
        finally:
            for peer, each in zip(others, asking, strict=True):
                if had_time and not each.done() and _round_trips_s(peer) <= MATCH_S:
                    peer.pinged_at = -math.inf  # is it there?
                each.cancel()
        return [each.result() if each.done() else None for each in asking]

    def _offer(self, peer: Peer, candidate: Candidate, wish: Wish) -> Offer:
        found = candidate.listing.found
        each_nbytes = block_nbytes(wish.namespace, fine=wish.ask.refined)
        return Offer(
            found,
            self._is_near(peer),
            self.source(peer).expected_s((found - wish.match.hit_blocks) * each_nbytes),
        )

    def _is_near(self, peer: Peer) -> bool:
        return peer.member.zone == self._zone

    def seem_to_have(
        self, namespace: Namespace, keys: Sequence[BlockKey], most: int
    ) -> list[Holds]:
        """See `kvstore.move.sources.Peers`."""
        size, found = namespace.block_tokens, []
        for node, heads in self.heads.holders(keys, size, 0, most):
            if (peer := self._peers.get(node)) is not None and peer.usable:
                at, engines = peer.member.address, peer.member.engines
                blocks, age_s = heads * head_step(size), self.heads.age_s(node)
                found.append(Holds(node, at, engines, blocks, age_s))
        return sorted(found, key=lambda each: -each.blocks)

    def _named(self, origin: Origin) -> Peer | None:
        """Return the host that a request names, None if it may not be asked."""
        peer, reason = self._peers.find(origin)
        if peer is not None and peer.member.node in self.doubtful():
            peer, reason = None, "unreachable"
        if reason:
            self._metrics.peer_refused.labels(reason).inc()
        return peer

    def _may_ask(self, peer: Peer) -> bool:
        node = peer.member.node
        in_time = self._now() >= self._without.get(node, -math.inf)
        return peer.usable and in_time and node not in self.doubtful()

    def may_have(self, ask: Ask, namespace: Namespace, match: Match) -> bool:
        """Say, without asking them, whether any may have more of a prefix: most acquires of what
        nobody has end here."""
        if ask.origin is not None or len(self._peers) <= ASKED_MAX:
            return True
        return self.heads.knows(ask.keys, namespace, match.hit_blocks)

    def _seem_to_have(self, wish: Wish, *, besides: Peer | None) -> list[Peer]:
        """Return the peers to ask: all if they are few, else those whose heads say that they have
        more, the longest first. Of those within one head, any may be first, but for the zone."""
        if len(self._peers) <= ASKED_MAX:
            return [each for each in self if self._may_ask(each) and each is not besides]
        found = self.heads.holders(
            wish.ask.keys, wish.namespace.block_tokens, wish.match.hit_blocks, LOOKED_AT_MAX
        )
        if not found:
            return []
        known = ((self._peers.get(node), heads) for node, heads in found)
        there = [(p, n) for p, n in known if p and self._may_ask(p) and p is not besides]
        return choose(there, is_near=self._is_near, shuffle=self._random.shuffle)

    async def _asked(
        self, peer: Peer, wish: Wish, answer_s: float, expected: int = 0
    ) -> Candidate | None:
        """Ask a peer how much it has; None: not more than is here, or no answer."""
        ask, namespace, match, deadline, registers = wish
        source = self.source(peer)
        began = self._now()
        far_s = min(_round_trips_s(peer), MATCH_S_MAX)
        until = min(deadline, ask.look_until, began + max(answer_s, far_s))
        keys = ask.keys[:KEYS_MAX]
        # Of a window group, it may be this host that lacks blocks before the end of its own hit.
        skip = ask.skip_blocks if namespace.has_windows else match.hit_blocks
        try:
            answer = await source.open_link().match(
                namespace,
                keys,
                skip_blocks=skip,
                refined=ask.refined,
                registers=registers,
                deadline=until,
            )
        except PeerError as error:
            self._metrics.peer_match_seconds.labels(error.outcome).observe(self._now() - began)
            if isinstance(error, PeerIncompatible) and error.reason == "tenant":
                self._without[peer.member.node] = self._now() + WITHOUT_S
                return None
            peer.failed(error)
            peer.pinged_at = -math.inf  # is it there? The next requests may not have to wait
            return None
        self._metrics.peer_match_seconds.labels("answered").observe(self._now() - began)
        expected = min(expected, len(keys))
        hit = _believed(answer, len(keys))
        if max(hit, expected) <= match.hit_blocks:
            return None
        listing = PeerListing(
            source, ask, namespace, hit_blocks=hit, expected=expected, until=deadline
        )
        return Candidate(source, listing)

    async def delete(
        self, namespace_id: NamespaceId | None, keys: Sequence[BlockKey] | None
    ) -> None:
        """Delete blocks on every member; None: all of a namespace, or of all of them.

        Raises Unavailable that names those that did not confirm: what they hold may come back. A
        host that does not have this tenant holds nothing of it.
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
        link, deadline = self.source(peer).open_link(), self._now() + DELETE_S
        try:
            if keys is None:
                await link.delete(namespace_id, None, deadline=deadline)
                return link
            assert namespace_id is not None
            for first in range(0, len(keys), NAMED_KEYS_MAX):
                part = keys[first : first + NAMED_KEYS_MAX]
                await link.delete(namespace_id, part, deadline=deadline)
        except PeerIncompatible as error:
            if error.reason != "tenant":
                raise
        return link

    def stats(self) -> list[dict[str, Any]]:
        """Return a status of each host, by address, with what this tenant has borrowed of it."""
        found = []
        for peer in self._peers:
            source = self._sources.get(peer.member.node)
            borrowed = source.borrowed_bytes if source is not None else 0
            age_s = self.heads.age_s(peer.member.node)
            found.append({**peer.status(), "borrowed_bytes": borrowed, "view_age_s": age_s})
        return sorted(found, key=lambda each: str(each["address"]))


def _has_all(candidate: Candidate | None, ask: Ask) -> bool:
    return candidate is not None and candidate.listing.found >= min(len(ask.keys), KEYS_MAX)


def _round_trips_s(peer: Peer) -> float:
    return MATCH_ROUND_TRIPS * peer.distance_s


def _believed(answer: PeerMatch, most: int) -> int:
    return 0 if answer.busy else min(answer.hit_blocks, most)
