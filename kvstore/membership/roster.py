"""The members that one daemon knows: told to whom it concerns, and kept for its next start."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from kvstore.membership.base import MEMBERS_MAX
from kvstore.membership.state_files import LastMembers
from kvstore.model.member import Member, NodeId

logger = logging.getLogger(__name__)

SAVE_EVERY_S = 1.0  # a fleet that starts has many changes, and one file


class Roster:
    """Members by node id, without this daemon. left_out: how often one too many came."""

    def __init__(self, last: LastMembers | None) -> None:
        self.left_out = 0
        self._members: Mapping[NodeId, Member] = MappingProxyType({})
        self._last = last
        self._changed: list[Callable[[], None]] = []
        self._unsaved = asyncio.Event()

    @property
    def members(self) -> Mapping[NodeId, Member]:
        return self._members

    def on_change(self, changed: Callable[[], None]) -> None:
        self._changed.append(changed)

    async def load(self) -> list[Member]:
        """Return the members that an earlier start has kept."""
        return await asyncio.to_thread(self._last.read) if self._last is not None else []

    def change(
        self, put: Iterable[Member] = (), drop: Iterable[NodeId] = (), why: str = ""
    ) -> None:
        """Note members as they are now, and forget others. why: for the log."""
        members = dict(self._members)
        for node in drop:
            if members.pop(node, None) is not None:
                logger.info("member=left node=%s why=%s", node, why)
        for member in put:
            if member.node not in members and len(members) >= MEMBERS_MAX:
                self.left_out += 1
                continue
            if member.node not in self._members:
                logger.info("member=joined node=%s address=%s", member.node, member.address)
            members[member.node] = member
        if members != self._members:
            self._become(members)

    def _become(self, members: dict[NodeId, Member]) -> None:
        self._members = MappingProxyType(members)
        self._unsaved.set()
        for changed in self._changed:
            try:
                changed()
            except Exception:  # the fleet goes on, whatever its user does with the news
                logger.exception("member=change_not_taken")

    async def keep_saved(self) -> None:
        """Write each change into the file, at most once a second. Ends by being cancelled."""
        while True:
            await self._unsaved.wait()
            await self.save()
            await asyncio.sleep(SAVE_EVERY_S)

    async def save(self) -> None:
        """Write what is not in the file yet."""
        if self._unsaved.is_set():
            self._unsaved.clear()
            if self._last is not None:
                await asyncio.to_thread(self._last.write, list(self._members.values()))
