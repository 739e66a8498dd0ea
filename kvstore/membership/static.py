"""Members by a list of addresses, or by names that stand for them.

An address says nothing of who is there: it is asked. What has answered once is a member for as long
as its address is listed, whether or not it answers now: a host that is down is still one of the
fleet.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvstore.membership.addresses import Addresses, Resolve, system_resolve
from kvstore.membership.base import Hello, NodeIdTaken
from kvstore.membership.roster import Roster
from kvstore.membership.state_files import LastMembers
from kvstore.model.member import Member, NodeId
from kvstore.system.background import keep_running

logger = logging.getLogger(__name__)

HELLO_S = 2.0
FIRST_ROUND_S = 3.0  # of `join`: who has not answered then is asked in the background
RESOLVE_EVERY_S = 15.0
ASK_EVERY_S = 15.0  # who answered: it may be another start of it, or draining
ASK_AGAIN_S = 3.0  # who did not
ASKED_AT_ONCE = 64
NEVER = float("-inf")


class StaticMembership:
    """The driver. failed: told the name of a background task that met a bug, and goes on."""

    def __init__(
        self,
        listed: Sequence[str],
        *,
        hello: Hello,
        last: LastMembers | None = None,
        failed: Callable[[str], None] = lambda _: None,
        resolve: Resolve = system_resolve,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._now = now
        self._hello = hello
        self._failed = failed
        self._addresses = Addresses(listed, resolve)
        self._roster = Roster(last)
        self._own: Member | None = None
        self._at: dict[str, Member] = {}  # who is at an address, this daemon included
        self._silent: set[str] = set()  # addresses that did not answer the last time
        self._due: dict[str, float] = {}  # when to ask an address
        self._refused: dict[NodeId, str] = {}  # addresses with a node id that is taken
        self._away_since: float | None = None
        self._tasks: list[asyncio.Task[None]] = []

    # ---- the face ----------------------------------------------------------------------------

    async def join(self, member: Member) -> None:
        self._own = member
        await self._look_up()
        listed = set(self._addresses.now)
        for known in await self._roster.load():
            if known.address in listed and known.node != member.node:
                self._at[known.address] = known
        asking = asyncio.ensure_future(self._ask_due())
        await asyncio.wait([asking], timeout=FIRST_ROUND_S)
        asking.cancel()
        taken = next((a for a in self._at.values() if self._is_double(a)), None)
        if taken is not None:
            raise NodeIdTaken(taken.node, taken.address)
        for name, work in (
            ("members.ask", self._follow),
            ("members.save", self._roster.keep_saved),
        ):
            self._tasks.append(asyncio.ensure_future(keep_running(name, work, self._failed)))

    async def update(self, member: Member) -> None:
        self._own = member  # the others are told by the HELLO that they ask for

    def members(self) -> Mapping[NodeId, Member]:
        return self._roster.members

    def on_change(self, changed: Callable[[], None]) -> None:
        self._roster.on_change(changed)

    async def leave(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._roster.save()

    @property
    def away_s(self) -> float | None:
        return None if self._away_since is None else self._now() - self._away_since

    def stats(self) -> dict[str, Any]:
        return {
            "membership": "static",
            "members": len(self._roster.members),
            "registered": True,
            "away_s": self.away_s,
            "error": self._error(),
            "held": [],
            "bad_entries": 0,
            "left_out": self._roster.left_out + self._addresses.left_out,
            "silent": sorted(self._silent),
            "unknown": sorted(
                each
                for each in self._addresses.now
                if each not in self._at and (self._own is None or each != self._own.address)
            ),
        }

    def _error(self) -> str:
        if self._addresses.unresolved:
            return f"cannot be resolved: {', '.join(sorted(self._addresses.unresolved))}"
        if self._refused:
            pairs = (f"{node} at {address}" for node, address in self._refused.items())
            return f"node ids that another daemon has: {', '.join(sorted(pairs))}"
        return ""

    # ---- asking ------------------------------------------------------------------------------

    async def _follow(self) -> None:
        resolved_at = self._now()
        while True:
            await asyncio.sleep(ASK_AGAIN_S)
            if self._now() - resolved_at >= RESOLVE_EVERY_S:
                resolved_at = self._now()
                await self._look_up()
            await self._ask_due()

    async def _look_up(self) -> None:
        await self._addresses.refresh()
        if not self._addresses.unresolved:
            self._away_since = None
        elif self._away_since is None:
            self._away_since = self._now()
        listed = set(self._addresses.now)
        for each in [address for address in self._at if address not in listed]:
            del self._at[each]
        self._silent &= listed
        self._due = {each: self._due.get(each, NEVER) for each in listed}
        self._settle()

    async def _ask_due(self) -> None:
        now = self._now()
        turns = asyncio.Semaphore(ASKED_AT_ONCE)
        due = [each for each, at in self._due.items() if at <= now and not self._is_own(each)]
        await asyncio.gather(*(self._ask(each, turns) for each in due))

    def _is_own(self, address: str) -> bool:
        assert self._own is not None
        return address == self._own.address

    async def _ask(self, address: str, turns: asyncio.Semaphore) -> None:
        async with turns:
            try:
                found = await asyncio.wait_for(self._hello(address), HELLO_S)
            except Exception as error:  # whatever the link raises, it is no answer
                if address not in self._silent:
                    logger.info("member=silent address=%s error=%r", address, str(error)[:200])
                self._silent.add(address)
                self._due[address] = self._now() + ASK_AGAIN_S
                self._settle()
                return
        self._silent.discard(address)
        self._due[address] = self._now() + ASK_EVERY_S
        if address in self._addresses.now:
            self._at[address] = replace(found, address=address)  # this one is known to be right
            self._settle()

    def _settle(self) -> None:
        """Make the members from who is where."""
        assert self._own is not None
        found: dict[NodeId, Member] = {}
        refused: dict[NodeId, str] = {}
        for address in sorted(self._at, key=self._silent.__contains__):  # one may have moved
            member = self._at[address]
            first = self._own if member.node == self._own.node else found.get(member.node)
            if first is None:
                found[member.node] = member
            elif first.instance != member.instance and address not in self._silent:
                self._refuse(refused, address, member, first)
        self._refused = refused
        gone = [node for node in self._roster.members if node not in found]
        self._roster.change(put=found.values(), drop=gone, why="not_listed")

    def _refuse(
        self, refused: dict[NodeId, str], address: str, member: Member, first: Member
    ) -> None:
        refused[member.node] = address
        if self._refused.get(member.node) != address:
            logger.error(
                "member=refused node=%s address=%s taken_by=%s", member.node, address, first.address
            )

    def _is_double(self, member: Member) -> bool:
        own = self._own
        return own is not None and member.node == own.node and member.instance != own.instance
