"""Members whose keys are gone although they may live: they stay for as long as they answer."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable

from kvstore.membership.base import PING_S, Ping
from kvstore.membership.roster import Roster
from kvstore.model.member import Member, NodeId

CHECK_EVERY_S = 2.0
MISSES_MAX = 2  # answers in a row that did not come: a busy daemon may miss one
PINGS_AT_ONCE = 64


class Held:
    """The members that are in the roster because they answer, and for nothing else."""

    def __init__(self, roster: Roster, ping: Ping) -> None:
        self._roster = roster
        self._ping = ping
        self._misses: dict[NodeId, int] = {}
        self._doubted: set[NodeId] = set()
        self._any = asyncio.Event()

    @property
    def nodes(self) -> Collection[NodeId]:
        return self._misses.keys()

    @property
    def doubted(self) -> Collection[NodeId]:
        """Those of them that `doubt` was about."""
        return self._doubted

    @property
    def trusts(self) -> bool:
        """Whether there are some that are not doubted."""
        return not self._doubted.issuperset(self._misses)

    def doubt(self) -> None:
        """Doubt all that are held now, until the engine says again that they are there."""
        self._doubted.update(self._misses)

    def hold(self, nodes: Iterable[NodeId]) -> None:
        for node in nodes:
            self._misses.setdefault(node, 0)
        if self._misses:
            self._any.set()

    def release(self, nodes: Iterable[NodeId]) -> None:
        """Note that these are there again by the engine's word."""
        for node in nodes:
            self._misses.pop(node, None)
            self._doubted.discard(node)

    async def check(self) -> None:
        """Ask them every 2 s while there are any, and drop those that do not answer."""
        while True:
            await self._any.wait()
            members = self._roster.members
            asked = [members[node] for node in self._misses if node in members]
            turns = asyncio.Semaphore(PINGS_AT_ONCE)
            answers = await asyncio.gather(*(self._answers(each, turns) for each in asked))
            for member, there in zip(asked, answers, strict=True):
                if member.node in self._misses:
                    self._misses[member.node] = 0 if there else self._misses[member.node] + 1
            lost = [node for node, misses in self._misses.items() if misses >= MISSES_MAX]
            self.release(lost)
            self._roster.change(drop=lost, why="no_answer")
            if not self._misses:
                self._any.clear()
            await asyncio.sleep(CHECK_EVERY_S)

    async def _answers(self, member: Member, turns: asyncio.Semaphore) -> bool:
        async with turns:
            return await answers(self._ping, member)


async def answers(ping: Ping, member: Member) -> bool:
    """Tell whether a member answers within 2 s."""
    try:
        return await asyncio.wait_for(ping(member), PING_S)
    except Exception:  # whatever the link raises, it is no answer
        return False
