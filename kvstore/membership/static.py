"""Members by a list of addresses, or by names that stand for them.

What has answered once is a member for as long as its address is listed: a host that is down is
still one of the fleet.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvstore.membership import asking
from kvstore.membership.addresses import Addresses, Resolve, system_resolve
from kvstore.membership.base import Hello
from kvstore.membership.roster import Roster
from kvstore.membership.state_files import LastMembers
from kvstore.model.member import Member, NodeId
from kvstore.system.background import keep_running

RESOLVE_EVERY_S = 15.0


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
        self._failed = failed
        self._addresses = Addresses(listed, resolve)
        self._roster = Roster(last)
        self._asking = asking.Asking(hello, self._settle, now)
        self._away_since: float | None = None
        self._tasks: list[asyncio.Task[None]] = []

    # ---- the contract ------------------------------------------------------------------------

    async def join(self, member: Member) -> None:
        self._asking.own = member
        await self._look_up(known=await self._roster.load())
        await self._asking.first_round()
        for name, work in (
            ("members.ask", self._follow),
            ("members.save", self._roster.keep_saved),
        ):
            self._tasks.append(asyncio.ensure_future(keep_running(name, work, self._failed)))

    async def update(self, member: Member) -> None:
        self._asking.own = member  # the others are told by the HELLO that they ask for

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
            **self._asking.stats(),
        }

    def _error(self) -> str:
        if self._addresses.unresolved:
            return f"cannot be resolved: {', '.join(sorted(self._addresses.unresolved))}"
        return self._asking.error

    # ---- asking ------------------------------------------------------------------------------

    async def _follow(self) -> None:
        resolved_at = self._now()
        while True:
            await asyncio.sleep(asking.ASK_AGAIN_S)
            if self._now() - resolved_at >= RESOLVE_EVERY_S:
                resolved_at = self._now()
                await self._look_up()
            await self._asking.ask()

    async def _look_up(self, known: Sequence[Member] = ()) -> None:
        await self._addresses.refresh()
        if not self._addresses.unresolved:
            self._away_since = None
        elif self._away_since is None:
            self._away_since = self._now()
        self._asking.know(self._addresses.now, known)

    def _settle(self) -> None:
        """Make the members from who is where."""
        found = self._asking.found()
        gone = [node for node in self._roster.members if node not in found]
        self._roster.change(put=found.values(), drop=gone, why="not_listed")
