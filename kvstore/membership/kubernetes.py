"""Members by Kubernetes: the ready pods of a headless Service, by its EndpointSlices.

Readiness is the heartbeat: the kubelet asks a daemon's /readyz, and the API server's slices follow.
A slice tells addresses alone, so who is there is asked by HELLO, as for a list of addresses.

A watch that is silent proves nothing, so the slices are listed every 60 s in any case. And an API
server that comes back empty is not a fleet that died: while it was away, no kubelet could say that
its pods are ready. So members that vanish while it is away, or within 60 s of its return, stay for
as long as they answer a PING.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import Any

from kvstore.membership import asking
from kvstore.membership.base import Hello, Ping
from kvstore.membership.endpoint_slices import Slices
from kvstore.membership.held import Held
from kvstore.membership.kubernetes_account import Account
from kvstore.membership.kubernetes_calls import KubernetesCalls, VersionGone
from kvstore.membership.outage import Outage
from kvstore.membership.roster import Roster
from kvstore.membership.state_files import LastMembers
from kvstore.model.errors import ConfigError, Unavailable
from kvstore.model.member import Member, NodeId, State
from kvstore.system.background import keep_running

logger = logging.getLogger(__name__)

LIST_EVERY_S = 60.0
RETRY_S = 1.0  # after a call that nobody answered, or a watch that was cut off at once
RETRY_S_MAX = 10.0  # a thousand daemons must not keep an API server from getting up
SHIELD_S = 60.0  # after its return: the kubelets report again, and probes pass again


class KubernetesMembership:
    """The driver. failed: told the name of a background task that met a bug, and goes on.

    now: seconds, of a clock that never jumps.
    """

    def __init__(
        self,
        account: Account,
        service: str,
        *,
        hello: Hello,
        ping: Ping,
        last: LastMembers | None = None,
        failed: Callable[[str], None] = lambda _: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._now = now
        self._failed = failed
        self._service = service
        self._calls = KubernetesCalls(account, service)
        self._slices = Slices()
        self._roster = Roster(last)
        self._held = Held(self._roster, ping)
        self._asking = asking.Asking(hello, self._settle, now)
        self._outage = Outage("kubernetes", now)
        self._ask_now = asyncio.Event()
        self._version = ""
        self._fresh = False  # what is known is of now
        self._was_listed = False
        self._tasks: list[asyncio.Task[None]] = []

    # ---- the contract ------------------------------------------------------------------------

    async def join(self, member: Member) -> None:
        self._asking.own = member
        self._outage.begin()  # until a list says otherwise
        known = [each for each in await self._roster.load() if each.node != member.node]
        self._roster.change(put=known)
        self._settle()
        try:
            await self._list()
            self._fresh = True
        except Unavailable as error:
            self._outage.lost(error)
        await self._asking.first_round()
        for name, work in (
            ("members.follow", self._follow),
            ("members.ask", self._ask),
            ("members.held", self._held.check),
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
        return self._outage.away_s

    def stats(self) -> dict[str, Any]:
        return {
            "membership": "kubernetes",
            "members": len(self._roster.members),
            "endpoint": self._calls.endpoint,
            "registered": self._is_listed,
            "away_s": self.away_s,
            "error": self._error(),
            "held": sorted(self._held.nodes),
            "bad_entries": self._slices.bad,
            "left_out": self._roster.left_out + self._slices.left_out,
            "failed_calls": self._calls.failed,
            **self._asking.stats(),
        }

    def _error(self) -> str:
        if self._outage.error or self._asking.error:
            return self._outage.error or self._asking.error
        if self.away_s is None and not len(self._slices):
            return f"cluster.kubernetes_service={self._service}: no such Service has pods"
        if self._slices.bad:
            return f"cluster.kubernetes_service={self._service}: it has no port named peer"
        return ""

    # ---- the slices --------------------------------------------------------------------------

    async def _follow(self) -> None:
        """List, follow the changes for 60 s, and list again."""
        retry_s = RETRY_S
        while True:
            began = self._now()
            try:
                if not self._fresh:
                    await self._list()
                self._fresh = False
                await self._watch()
            except VersionGone:
                pass  # a list has it
            except (Unavailable, ConfigError) as error:
                self._outage.lost(error)
            if self._now() - began > RETRY_S_MAX:
                retry_s = RETRY_S
                continue
            await asyncio.sleep(retry_s * random.uniform(0.5, 1.0))
            retry_s = min(2 * retry_s, RETRY_S_MAX)

    async def _list(self) -> None:
        """Take the addresses from the API server."""
        found = await self._calls.list()
        self._outage.reached()
        if _is_older(found.version, self._version):  # restored from a backup, say
            self._outage.doubt()
        self._version = found.version
        self._slices.replace(found.items)
        self._take()

    async def _watch(self) -> None:
        """Follow the changes. One that is cut off is no outage: the next list tells."""
        changes = self._calls.watch(self._version, LIST_EVERY_S)
        try:
            async with aclosing(changes):
                async for change in changes:
                    if change.type == "DELETED":
                        self._slices.drop(change.slice)
                    else:
                        self._slices.put(change.slice)
                    self._take()
        except VersionGone:
            raise
        except Unavailable as error:
            logger.debug("kubernetes=watch_ended error=%s", error)

    def _take(self) -> None:
        """Note which addresses there are."""
        assert self._asking.own is not None
        addresses = self._slices.addresses()
        is_listed = self._asking.own.address in addresses
        if self._was_listed and not is_listed and self._asking.own.state is State.UP:
            self._outage.doubt()  # this daemon lives, so others may as well
        self._was_listed = is_listed
        # Who moved, or was held, need not be asked again to be a member.
        self._asking.know(addresses, known=self._roster.members.values())
        self._ask_now.set()

    @property
    def _is_listed(self) -> bool:
        own = self._asking.own
        return own is not None and self._asking.is_listed(own.address)

    # ---- who is there ------------------------------------------------------------------------

    async def _ask(self) -> None:
        while True:
            try:
                async with asyncio.timeout(asking.ASK_AGAIN_S):
                    await self._ask_now.wait()
            except TimeoutError:
                pass
            self._ask_now.clear()
            await self._asking.ask()

    def _settle(self) -> None:
        """Make the members from who is where, and who is held."""
        found = self._asking.found()
        gone = [node for node in self._roster.members if node not in found]
        self._held.release(found)
        if self._outage.shields(SHIELD_S):
            self._held.hold(gone)
        held = self._held.nodes
        gone = [node for node in gone if node not in held]
        self._roster.change(put=found.values(), drop=gone, why="not_ready")


def _is_older(version: str, than: str) -> bool:
    """Tell whether a resource version is from before another: numbers, where both are."""
    return version.isdecimal() and than.isdecimal() and int(version) < int(than)
