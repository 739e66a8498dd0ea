"""Members by etcd: a key for each daemon, under a lease that it renews.

    /kvstore/v1/<fleet>/nodes/<node id> -> the member as JSON

Measured on a real etcd, and so these rules. A watch that is silent proves nothing: stopped, etcd
keeps its connections open. So the keys are listed every 15 s in any case. And an etcd that comes
back empty is not a fleet that died: while it was away, nobody could renew. So members that vanish
while it is away, or within one TTL of its return, stay for as long as they answer a PING.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from kvstore.membership.base import MEMBERS_MAX, NodeIdTaken, Ping
from kvstore.membership.etcd_access import Access
from kvstore.membership.etcd_calls import EtcdCalls
from kvstore.membership.etcd_deletes import EtcdDeletes
from kvstore.membership.etcd_entries import Entries
from kvstore.membership.held import Held
from kvstore.membership.outage import Outage
from kvstore.membership.registration import Registration
from kvstore.membership.roster import Roster
from kvstore.membership.state_files import LastMembers
from kvstore.model.errors import ConfigError, KVStoreError, Unavailable
from kvstore.model.member import Member, NodeId
from kvstore.model.tenant import TenantId
from kvstore.rpc.etcd import etcd_pb2 as pb
from kvstore.settings import ClusterSettings
from kvstore.system.background import keep_running

logger = logging.getLogger(__name__)

LIST_EVERY_S = 15.0
LIST_S = 1.0  # for a list
RETRY_S = 0.5  # after a call that nobody answered
TRUSTED_S = LIST_EVERY_S + 2.0  # in which who is there has seen that its key is not, and made it
DAY_S = 86400.0
RENEWALS = 3  # in the time after which etcd forgets


class EtcdMembership:
    """The driver. failed: told the name of a background task that met a bug, and goes on.

    now: seconds, of a clock that never jumps.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        *,
        ping: Ping,
        last: LastMembers | None = None,
        failed: Callable[[str], None] = lambda _: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._now = now
        self._outage = Outage("etcd", now)
        self._task_failed = failed
        self._begin, self._end = _keys(settings.fleet)
        self._calls = EtcdCalls(settings.endpoints, Access(settings))
        self._roster = Roster(last)
        self._held = Held(self._roster, ping)
        self._registration = Registration(self._calls, self._begin, settings.etcd_ttl_s, ping)
        days = settings.deletes_kept_days
        self._fleet, self._kept_s = settings.fleet, days * DAY_S
        self._tasks: list[asyncio.Task[None]] = []
        self._refused = ""  # why this daemon is not registered although it is not
        self._renew_now = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None
        self._watched = ""  # the endpoint of the watch
        self._revision = 0  # of the last list
        self._lists = self._listed = 0  # how many have begun, and which of them was taken
        self._entries = Entries(self._begin)

    # ---- the contract ------------------------------------------------------------------------

    async def join(self, member: Member) -> None:
        self._registration.own = member
        self._outage.begin()  # until a list says otherwise
        self._roster.change(put=[m for m in await self._roster.load() if m.node != member.node])
        try:
            await self._registration.claim()
            await self._list()
        except Unavailable as error:
            self._lost(error)
        except BaseException:
            await self._registration.end()
            await self._calls.close()
            raise
        for name, work in (
            ("members.follow", self._follow),
            ("members.renew", self._renew),
            ("members.held", self._held.check),
            ("members.save", self._roster.keep_saved),
        ):
            self._start(name, work)

    async def update(self, member: Member) -> None:
        self._registration.own = member
        self._renew_now.set()

    def on_claim(self, told: Callable[[], None]) -> Callable[[], None]:
        """Call `told` whenever this daemon is registered; returns how to stop that."""
        self._registration.on_claim.append(told)
        return lambda: self._registration.on_claim.remove(told)

    def deletes_of(self, tenant: TenantId) -> EtcdDeletes:
        """Return what etcd keeps of a tenant's deletes."""
        return EtcdDeletes(self._calls, self._fleet, self._kept_s, tenant)

    def members(self) -> Mapping[NodeId, Member]:
        return self._roster.members

    def on_change(self, changed: Callable[[], None]) -> None:
        self._roster.on_change(changed)

    async def leave(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.away_s is None:
            await self._registration.end()
        await self._roster.save()
        await self._calls.close()

    @property
    def claims(self) -> int:
        """How often this daemon was registered: others may know of it since then."""
        return self._registration.claims

    @property
    def claiming(self) -> bool:
        """Whether others may come to know of this daemon before it hears that it is registered."""
        return self._registration.claiming

    async def refresh(self) -> None:
        """Learn now who is there. Raises Unavailable, ConfigError."""
        await self._list()

    @property
    def doubtful(self) -> Collection[NodeId]:
        """The members that stay for their answers alone although etcd has answered for a TTL, or
        for 17 s if that is less: they may not have applied what it keeps, and who deletes need not
        know of them. They stay doubtful until etcd has them again, whatever becomes of it."""
        self._doubt_if_due()
        return self._held.doubted

    def settling(self) -> Callable[[], bool]:
        """Return what tells whether every member, but for doubtful ones, is one that a delete kept
        before now was told to, or that has to apply it before it lends."""
        begun = self._lists
        return lambda: self._listed > begun and (self._doubt_if_due() or not self._held.trusts)

    @property
    def away_s(self) -> float | None:
        return self._outage.away_s

    def stats(self) -> dict[str, Any]:
        return {
            "membership": "etcd",
            "members": len(self._roster.members),
            "endpoint": self._calls.endpoint,
            "registered": self._registration.lease != 0,
            "away_s": self.away_s,
            "error": self._outage.error or self._refused,
            "held": sorted(self._held.nodes),
            "bad_entries": len(self._entries.bad),
            "left_out": self._roster.left_out,
            "failed_calls": self._calls.failed,
        }

    # ---- this daemon's own key ---------------------------------------------------------------

    async def _renew(self) -> None:
        """Renew three times in a TTL, or more often while nobody answers."""
        pause_s = self._registration.ttl_s / RENEWALS
        while True:
            if await _set_within(self._renew_now, pause_s):
                self._renew_now.clear()
            try:
                await self._registration.keep()
            except NodeIdTaken as error:
                if not self._refused:
                    logger.error("member=refused error=%s", error)
                self._refused = str(error)
            except (Unavailable, ConfigError) as error:
                self._lost(error)
                pause_s = RETRY_S
                continue
            else:
                self._refused = ""
                self._reached()
            pause_s = self._registration.ttl_s / RENEWALS

    def _look_at_own_key(self) -> None:
        self._registration.doubt()
        self._renew_now.set()

    # ---- the others --------------------------------------------------------------------------

    async def _follow(self) -> None:
        """List, follow the changes for 15 s, and list again."""
        while True:
            try:
                revision = await self._list()
            except (Unavailable, ConfigError) as error:
                self._lost(error)
                await asyncio.sleep(RETRY_S)
                continue
            began = self._now()
            self._watched = self._calls.endpoint
            self._watch = asyncio.ensure_future(self._changes(revision + 1))
            try:
                await asyncio.wait([self._watch])
                self._watch.cancelled() or self._watch.result()
            except KVStoreError as error:
                self._lost(error)
            finally:
                self._watch.cancel()
                self._watch = None
            if self._now() - began < RETRY_S:  # a watch that ends at once is no reason to hurry
                await asyncio.sleep(RETRY_S)

    async def _list(self) -> int:
        """Take the members from etcd; return the revision that they are of."""
        self._lists = number = self._lists + 1
        known = self._revision
        reply = await self._calls.list(
            self._begin, self._end, limit=MEMBERS_MAX + 1, timeout_s=LIST_S
        )
        self._reached()
        if known <= reply.header.revision < self._revision:  # one that came meanwhile is newer
            self._listed = max(self._listed, number)
            return self._revision
        there = self._entries.parse(reply.kvs, all_there_are=True)
        own = there.pop(self._registration.own.node, None)
        right = self._registration.is_right(own)
        if not right:
            self._look_at_own_key()
        if not right or reply.header.revision < self._revision:  # emptied, and nobody noticed
            self._doubt_if_due()
            self._outage.doubt()
        self._revision = reply.header.revision
        self._take(there, gone=[node for node in self._roster.members if node not in there])
        if not self._listed:  # who was kept from an earlier start, which has deleted meanwhile
            self._held.doubt()
        self._listed = max(self._listed, number)
        return reply.header.revision

    async def _changes(self, revision: int) -> None:
        watch = self._calls.watch(self._begin, self._end, revision=revision, lasts_s=LIST_EVERY_S)
        async with aclosing(watch):
            async for reply in watch:
                if reply.canceled:  # what it would begin with was compacted: a list has it
                    return
                self._apply(reply.events)

    def _apply(self, events: Sequence[pb.Event]) -> None:
        last = {event.kv.key: event for event in events}  # one reply may have several of a key
        there = self._entries.parse(
            [event.kv for event in last.values() if event.type == pb.Event.PUT]
        )
        gone = {
            NodeId(key[len(self._begin) :].decode("ascii", "replace"))
            for key, event in last.items()
            if event.type == pb.Event.DELETE
        }
        own = self._registration.own.node
        if own in gone or not self._registration.is_right(there.pop(own, None), absent=True):
            self._look_at_own_key()
        self._take(there, gone=[node for node in gone if node in self._roster.members])

    def _take(self, there: Mapping[NodeId, Member], *, gone: Sequence[NodeId]) -> None:
        """Note who is there, and who is not any more."""
        self._held.release(there)
        if self._outage.shields(self._registration.ttl_s):  # nobody may have been able to renew
            self._held.hold(gone)
        held = self._held.nodes
        gone = [node for node in gone if node not in held]
        self._roster.change(put=there.values(), drop=gone, why="etcd")

    # ---- etcd comes and goes -----------------------------------------------------------------

    def _lost(self, error: Exception) -> None:
        self._doubt_if_due()
        self._outage.lost(error)

    def _doubt_if_due(self) -> bool:
        """Doubt who is held, if etcd has answered for long enough; return whether it has."""
        due = not self._outage.shields(min(self._registration.ttl_s, TRUSTED_S))
        if due:
            self._held.doubt()
        return due

    def _reached(self) -> None:
        if self._outage.reached():
            self._renew_now.set()
            self._end_watch()  # it may be silent for ever
        elif self._watched != self._calls.endpoint:
            self._end_watch()

    def _end_watch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()

    def _start(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        run = keep_running(name, work, self._task_failed)
        self._tasks.append(asyncio.ensure_future(run))


def _keys(fleet: str) -> tuple[bytes, bytes]:
    """Return the prefix of the keys of a fleet's members, and the first key after them."""
    prefix = f"/kvstore/v1/{fleet}/nodes/".encode()
    return prefix, prefix[:-1] + b"0"


async def _set_within(event: asyncio.Event, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):  # wait_for may lose a cancellation
            await event.wait()
    except TimeoutError:
        return False
    return True
