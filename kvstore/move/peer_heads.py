"""Follows the heads of every peer, so that nobody has to be asked who may have a prefix.

Each peer is asked for a snapshot, and then for what has changed. A gap in the numbers, or another
start of the peer, is a snapshot again. Where all together would take more than is allowed, only
every second head is asked for, then every fourth; when there are fewer of them again, more.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence

import numpy as np

from kvstore.decide.heads import LEVELS_MAX, head_of, head_step, heads_of
from kvstore.model.block import BlockKey, Namespace
from kvstore.model.member import NodeId
from kvstore.peer.base import (
    HEAD_NBYTES,
    HEADS_WAIT_S_MAX,
    HeadsAsk,
    HeadsReply,
    PeerError,
    PeerLink,
    PeerSlow,
)
from kvstore.peer.view import BYTES_A_HEAD, PENDING_MAX, Numbers, View

logger = logging.getLogger(__name__)

WAIT_S = min(10.0, HEADS_WAIT_S_MAX)  # for the first change
PAUSE_S = 1.0  # between two answers, at least
PEERS_A_SECOND = 24  # whose changes are asked for: each costs the loop a millisecond
AGAIN_S = 30.0  # after a peer that did not tell
PLACES_MAX = 1 << 16
SNAPSHOTS_MAX = 4  # on their way at once: they are in memory before they are in the view
SNAPSHOT_S = 60.0  # for all chunks of one: others wait for their turn meanwhile
FALL_SHARE = 0.75  # of what is allowed: what twice as many heads have to fit into
FALL_S = 60.0  # between two changes of the level: each is a snapshot of every peer


def pause_s(peers: int) -> float:
    """Return how long a host waits between two answers of a peer, with so many peers."""
    return max(PAUSE_S, peers / PEERS_A_SECOND)


class PeerHeads:
    """nbytes_max: of the view, all peers together. asked: how many peers' changes are asked for by
    this daemon, all tenants together; None: there is one."""

    def __init__(
        self,
        nbytes_max: int,
        now: Callable[[], float],
        asked: Callable[[], int] | None = None,
    ) -> None:
        self.view = View()
        self.level = 0
        self.nbytes_max = nbytes_max
        self._asked = asked if asked is not None else lambda: self.following
        self._now = now
        self._places: dict[NodeId, int] = {}
        self._nodes: dict[int, NodeId] = {}
        self._heard: dict[NodeId, float] = {}  # when each told its heads last
        self._told: dict[NodeId, int] = {}  # the level of the snapshot that is known of each
        self._changed_at = -math.inf  # the level
        self._rising = False
        self._room = asyncio.Semaphore(SNAPSHOTS_MAX)
        self._following: dict[NodeId, asyncio.Task[None]] = {}

    @property
    def following(self) -> int:
        """How many peers are asked."""
        return len(self._following)

    def follows(self, node: NodeId) -> bool:
        """Say whether a peer is asked."""
        return node in self._following

    def follow(self, node: NodeId, link: PeerLink) -> None:
        """Follow a peer over a link, until that ends. Harmless if it is followed already."""
        if node in self._following or len(self._places) >= PLACES_MAX:
            return
        if node not in self._places:
            place = next(at for at in range(PLACES_MAX) if at not in self._nodes)
            self._places[node], self._nodes[place] = place, node
        task = asyncio.get_running_loop().create_task(self._follow(node, link))
        self._following[node] = task
        task.add_done_callback(lambda _: self._following.pop(node))

    async def forget(self, node: NodeId) -> None:
        """Drop what is known of a peer that has left the fleet."""
        task = self._following.get(node)
        if task is not None:
            task.cancel()
        self._told.pop(node, None)
        self._heard.pop(node, None)
        place = self._places.pop(node, None)
        if place is not None:
            await self.view.forget(place)
            del self._nodes[place]
            await self._bound()

    async def close(self) -> None:
        """Follow nobody any more."""
        tasks = list(self._following.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def holders(
        self, keys: Sequence[BlockKey], block_tokens: int, hit_blocks: int, most: int
    ) -> list[tuple[NodeId, int]]:
        """Return at most so many peers that seem to have more of a prefix, the longest first, and
        how many heads of it each has."""
        heads, step = heads_of(keys, block_tokens)
        found = self.view.holders(heads, most, hit_blocks // step)
        return [(self._nodes[each.place], each.heads) for each in found]

    def knows(self, keys: Sequence[BlockKey], namespace: Namespace, hit_blocks: int) -> bool:
        """Say whether any peer seems to have more of a prefix than its first `hit_blocks`.

        Whoever has more has its next head: what is behind it is of no use without. Of windows only
        the last is needed, and of fewer heads nobody tells the next one: then all are looked up.
        """
        step = head_step(namespace.block_tokens)
        begin = hit_blocks // step * step
        if self.level or all(group.window_tokens for group in namespace.groups):
            return self.view.knows(heads_of(keys[begin:], namespace.block_tokens)[0])
        at = begin + step - 1
        return at < len(keys) and self.view.knows([head_of(keys[at])])

    def age_s(self, node: NodeId) -> float | None:
        """Return how old what is known of a peer may be; None: nothing is."""
        heard = self._heard.get(node)
        return None if heard is None else self._now() - heard

    def stats(self) -> dict[str, int]:
        """Return how many heads are known, what they take, and which are asked for."""
        return {"heads": len(self.view), "bytes": self.view.nbytes, "level": self.level}

    async def _follow(self, node: NodeId, link: PeerLink) -> None:
        ask: HeadsAsk | None = None  # for changes; None: a snapshot is wanted
        while link.open and node in self._places:
            try:
                if ask is None:
                    async with self._room:
                        ask = await self._snapshot(node, link)
                else:
                    ask = await self._changes(node, link, ask)
            except PeerError as error:
                logger.debug("heads=unknown node=%s reason=%r", node, str(error))
                ask = None
                if not link.open:  # the next link follows at once
                    return
                await asyncio.sleep(AGAIN_S)
                continue
            self._heard[node] = self._now()
            await asyncio.sleep(pause_s(self._asked()))

    async def _snapshot(self, node: NodeId, link: PeerLink) -> HeadsAsk | None:
        """Take all heads of a peer; return what asks for changes. None: of another level now."""
        level, chunks, heads, since = self.level, list[bytes](), 0, 0
        ask, until = HeadsAsk(level=level), self._now() + SNAPSHOT_S
        while True:
            if self._now() >= until:
                raise PeerSlow("its heads do not come to an end", reason="deadline")
            reply = await link.heads(ask, deadline=min(until, self._now() + AGAIN_S))
            if self.level != level:
                return None
            if not ask.cursor or reply.instance != ask.instance:
                chunks.clear()
                heads, since = 0, reply.since
            chunks.append(reply.heads)
            heads += len(reply.heads) // HEAD_NBYTES
            if heads * BYTES_A_HEAD > self.nbytes_max:
                await self._rise()
                return None
            if not reply.cursor:
                break
            ask = HeadsAsk(reply.instance, level, cursor=reply.cursor)
        place = self._places[node]
        await self.view.replace(place, _numbers(b"".join(chunks)))
        if level < self.level:  # it has risen meanwhile
            await self.view.forget(place)
            return None
        self._told[node] = level
        await self._bound()
        return self._changes_of(reply, since)

    async def _changes(self, node: NodeId, link: PeerLink, ask: HeadsAsk) -> HeadsAsk | None:
        """Take what has changed; return what asks for more. None: a snapshot is wanted."""
        reply = await link.heads(ask, deadline=self._now() + ask.wait_s + AGAIN_S)
        if reply.snapshot or reply.level != self.level:  # a gap, or the level has changed
            return None
        self.view.change(self._places[node], _numbers(reply.heads), reply.came)
        if self.view.pending > PENDING_MAX:
            await self.view.settle(PENDING_MAX)
        await self._bound()
        return self._changes_of(reply, reply.since)

    def _changes_of(self, reply: HeadsReply, since: int) -> HeadsAsk | None:
        if reply.level != self.level:
            return None
        return HeadsAsk(reply.instance, reply.level, since, wait_s=WAIT_S)

    async def _bound(self) -> None:
        """Know fewer heads if they take too much, or more if twice as many would fit."""
        if self.view.nbytes > self.nbytes_max:
            await self._rise()
        elif (
            self.level
            and all(self._told.get(node) == self.level for node in self._following)
            and 2 * self.view.nbytes <= FALL_SHARE * self.nbytes_max
            and self._now() - self._changed_at >= FALL_S
        ):
            self._change_level(-1)

    async def _rise(self) -> None:
        """Know half as many heads from now on, and none until they were told: else the view would
        grow on, or the level, while peers are still asked by the old one."""
        if self._rising:
            return
        self._rising = True
        try:
            self._change_level(1)
            places = [self._places[node] for node in self._told]
            self._told.clear()
            await self.view.forget(*places)
        finally:
            self._rising = False

    def _change_level(self, by: int) -> None:
        """Let every peer be asked for a snapshot of another level."""
        if 0 <= self.level + by <= LEVELS_MAX:
            self.level += by
            self._changed_at = self._now()
            logger.info("heads=level level=%d nbytes=%d", self.level, self.view.nbytes)


def _numbers(heads: bytes) -> Numbers:
    return np.frombuffer(heads, "<u8").astype(np.uint64)
