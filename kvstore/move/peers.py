"""The other hosts of the fleet: links to them, and how they behave. What each tenant asks of them:
see `tenant_peers.py`."""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvstore.metrics import Metrics
from kvstore.model.errors import KVStoreError
from kvstore.model.member import Member, NodeId, Origin, State
from kvstore.peer.base import PeerCorrupt, PeerError, PeerLink
from kvstore.system.breaker import Breaker

if TYPE_CHECKING:
    from kvstore.move.tenant_peers import TenantPeers

logger = logging.getLogger(__name__)

Dial = Callable[[Member, float], Awaitable[PeerLink]]

DIAL_S = 2.0
PING_EVERY_S = 2.0
PINGS_A_SECOND = 25  # to all peers: more of them are asked less often
PING_S = 2.0
PINGS_KEPT = 8  # the shortest of which is the way there and back, without what else was to be done
BACKOFF_MIN_S, BACKOFF_MAX_S = 0.2, 10.0
LOOK_S = 0.2
LOOK_PEERS = 25  # at once: a look at hundreds would make a call wait for a millisecond
DEMERITS_MAX = 3  # wrong answers within
DEMERITS_S = 600.0  # this time: then it is not asked for as long again


class Peer:
    """One other host. What is known of it outlives its links. borrowed_bytes: by all tenants."""

    def __init__(self, member: Member, metrics: Metrics, now: Callable[[], float]) -> None:
        self.member = member
        self._metrics = metrics
        self.borrowed_bytes = 0
        self._link: PeerLink | None = None
        self._faulty: PeerLink | None = None  # the last link whose fault was counted
        self.breaker = Breaker(now, BACKOFF_MIN_S, BACKOFF_MAX_S)
        self._round_trips: deque[float] = deque(maxlen=PINGS_KEPT)
        self.last_error = ""
        self._demerits: deque[float] = deque(maxlen=DEMERITS_MAX)
        self._quarantined_until = float("-inf")
        self._now = now
        self.pinged_at = now()
        self._pings = 0

    @property
    def link(self) -> PeerLink | None:
        """The open link to it, None if there is none."""
        return self._link if self._link is not None and self._link.open else None

    @link.setter
    def link(self, link: PeerLink) -> None:
        self._link = link

    @property
    def patience(self) -> float:
        """Until the next ping, 1 on average. Hosts that were linked at the same moment must not be
        pinged at the same moments for ever."""
        return 0.75 + zlib.crc32(f"{self.member.node} {self._pings}".encode()) / (1 << 33)

    @property
    def rtt_s(self) -> float | None:
        """How long the last ping took; None: none was answered yet."""
        return self._round_trips[-1] if self._round_trips else None

    @property
    def distance_s(self) -> float:
        """How long the way there and back takes at least, as far as is known; 0: it is not."""
        return min(self._round_trips, default=0.0)

    def answered(self, after_s: float) -> None:
        """Note how long a ping took."""
        self._round_trips.append(after_s)

    def note_ping(self) -> None:
        """Note that it is asked now whether it is there."""
        self.pinged_at, self._pings = self._now(), self._pings + 1

    @property
    def quarantined(self) -> bool:
        """Whether it was wrong too often lately."""
        return self._now() < self._quarantined_until

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
            "link": self.link.medium if self.link is not None else None,
            "read_bytes": self.link.read_bytes if self.link is not None else {},
            "borrowed_bytes": self.borrowed_bytes,
            "breaker": self.breaker.state.value,
            "demerits": sum(self._now() - at < DEMERITS_S for at in self._demerits),
            "last_error": self.last_error,
        }

    def _hold_against_it(self) -> None:
        now, demerits = self._now(), self._demerits
        demerits.append(now)
        if len(demerits) == DEMERITS_MAX and now - demerits[0] < DEMERITS_S:
            self._quarantined_until = now + DEMERITS_S

    def failed(self, error: PeerError) -> None:
        """Take note of an error of it."""
        self.last_error = str(error)[:200]
        # What ended the link counts once, whoever waited for it: see `look_at_fault`.
        ended_link = self._link is not None and self._link.fault is not None
        if isinstance(error, PeerCorrupt) and not ended_link:
            self._hold_against_it()
        logger.warning(
            "peer=failed node=%s outcome=%s reason=%r", self.member.node, error.outcome, str(error)
        )

    def look_at_fault(self) -> None:
        """Hold it against the peer, once, if its link has ended by what nobody can read, whether or
        not anybody waited for an answer."""
        link = self._link
        if link is None or link is self._faulty or link.fault is None:
            return
        self._faulty = link
        self.last_error = str(link.fault)[:200]
        self._hold_against_it()
        self._metrics.peer_refused.labels("garbage").inc()

    async def close(self) -> None:
        """End the link. Reads on one that is lost already may still end well."""
        self.look_at_fault()
        link, self._link = self._link, None
        if link is not None and link.open:
            await link.close()


class Peers:
    """Every other member of the fleet. dial: makes a link to one. own: this daemon's id. tenants:
    who asks them."""

    def __init__(
        self,
        dial: Dial,
        own: NodeId,
        metrics: Metrics,
        now: Callable[[], float],
    ) -> None:
        self.tenants: list[TenantPeers] = []
        self._dial = dial
        self.own = own
        self._metrics = metrics
        self._now = now
        self._peers: dict[NodeId, Peer] = {}
        self._by_engine: dict[str, NodeId] = {}
        self._dialling: dict[NodeId, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._peers.values()))

    def __len__(self) -> int:
        return len(self._peers)

    def get(self, node: NodeId) -> Peer | None:
        return self._peers.get(node)

    def followed(self) -> int:
        """Return how many questions for heads are open, of all tenants."""
        return sum(each.heads.following for each in self.tenants)

    def know(self, members: Mapping[NodeId, Member]) -> None:
        """Take note of who is in the fleet now."""
        for node in self._peers.keys() - members.keys():
            gone = self._peers.pop(node)
            self._keep(node, self._let_go(gone))
        for node, member in members.items():
            if node == self.own:
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
        for tenant in list(self.tenants):
            await tenant.forget(peer.member.node)

    async def run(self) -> None:
        """Keep a link to every peer: dial, ping, and dial again. A few are looked at in one turn of
        the loop."""
        left: list[NodeId] = []
        while True:
            if not left:
                self._count()
                left = list(self._peers)
            for node in left[:LOOK_PEERS]:
                if (peer := self._peers.get(node)) is not None:
                    self._look_at(node, peer)
            del left[:LOOK_PEERS]
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S / 4 if left else LOOK_S):
                    await self._changed.wait()

    def _look_at(self, node: NodeId, peer: Peer) -> None:
        peer.look_at_fault()
        if node not in self._dialling and self._is_due(peer):
            self._keep(node, self._tend(peer))
        if (link := peer.link) is not None:
            for tenant in self.tenants:
                tenant.follow(node, link)

    def _count(self) -> None:
        """Tell how many peers are in which state."""
        counts = dict.fromkeys(("up", "down", "draining", "quarantined"), 0)
        for peer in self._peers.values():
            counts[peer.state] += 1
        for state, count in counts.items():
            self._metrics.peers.labels(state).set(count)

    def _is_due(self, peer: Peer) -> bool:
        if peer.link is None:
            return not peer.breaker.retry_after_s
        every_s = max(PING_EVERY_S, len(self._peers) / PINGS_A_SECOND)
        return self._now() - peer.pinged_at >= every_s * peer.patience

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
        peer.note_ping()
        try:
            link = peer.link
            if link is None or link.worn:
                await peer.close()
                link = await self._dial(peer.member, self._now() + DIAL_S)
                peer.link = link
                logger.info("peer=linked node=%s address=%s", peer.member.node, peer.member.address)
            peer.answered(await link.ping(self._now() + PING_S))
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
        learned = replace(told, address=peer.member.address)
        if learned != peer.member and self._peers.get(told.node) is peer:
            peer.member = learned
            self._index_engines()

    def _index_engines(self) -> None:
        self._by_engine = {
            address: node for node, peer in self._peers.items() for address in peer.member.engines
        }

    async def close(self) -> None:
        """End every link."""
        for tenant in list(self.tenants):
            await tenant.close()
        tasks = list(self._dialling.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(peer.close() for peer in self), return_exceptions=True)

    def find(self, origin: Origin) -> tuple[Peer | None, str]:
        """Return the peer that a request names, or None and why it is not asked: "unknown",
        "unreachable", or "" if it is this daemon. A request never makes a daemon connect anywhere.
        """
        node = self._by_engine.get(origin.source, NodeId(origin.source))
        peer = self._peers.get(node)
        if peer is not None and peer.usable:
            return peer, ""
        if node == self.own:
            return None, ""
        return None, "unknown" if peer is None else "unreachable"

    def stats(self) -> list[dict[str, Any]]:
        """Return a status of each, by address. view_age_s: of what is known of its heads, of the
        tenant that knows least; None: one knows nothing."""
        found = []
        for peer in self:
            ages = [each.heads.age_s(peer.member.node) for each in self.tenants]
            known = [age for age in ages if age is not None]
            age_s = max(known) if known and len(known) == len(ages) else None
            found.append({**peer.status(), "view_age_s": age_s})
        return sorted(found, key=lambda each: str(each["address"]))
