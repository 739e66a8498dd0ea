"""Who is at some addresses: each is asked, and what has answered once is believed for as long as
the address is listed, whether or not it answers now.

An address says nothing of who is there. So those drivers ask whose engine lists addresses alone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from kvstore.membership.base import Hello, NodeIdTaken
from kvstore.model.member import Member, NodeId

logger = logging.getLogger(__name__)

HELLO_S = 2.0
REASON_CHARS_MAX = 200
FIRST_ROUND_S = 3.0  # who has not answered then is asked in the background
ASK_EVERY_S = 15.0  # who answered: it may be another start of it, or draining
ASK_AGAIN_S = 3.0  # who did not
ASKED_AT_ONCE = 64
NEVER = float("-inf")


class Asking:
    """own: this daemon, which is not asked; set it before the first call. settled: called whenever
    `found` may have become another one."""

    def __init__(
        self,
        hello: Hello,
        settled: Callable[[], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.own: Member | None = None
        self.silent: dict[str, str] = {}  # addresses that did not answer the last time, and why
        self.refused: dict[NodeId, str] = {}  # addresses with a node id that is taken
        self._hello = hello
        self._settled = settled
        self._now = now
        self._at: dict[str, Member] = {}  # who is at an address, this daemon included
        self._due: dict[str, float] = {}  # when to ask an address

    def know(self, addresses: Iterable[str], known: Iterable[Member] = ()) -> None:
        """Take these addresses for those that there are. known: believed if their address is one
        that nobody has answered at yet."""
        listed = set(addresses)
        for each in [address for address in self._at if address not in listed]:
            del self._at[each]
        for member in known:
            is_other = member.node != self._ourselves.node and not self._is_own(member.address)
            if is_other and member.address in listed:  # addresses of pods are used again
                self._at.setdefault(member.address, member)
        self.silent = {each: why for each, why in self.silent.items() if each in listed}
        self._due = {each: self._due.get(each, NEVER) for each in listed}
        self._settled()

    @property
    def unknown(self) -> list[str]:
        """The addresses of others at which nobody has answered yet."""
        return sorted(each for each in self._due if each not in self._at and not self._is_own(each))

    def stats(self) -> dict[str, Any]:
        """Return what `status` shows of the addresses. errors: why those did not answer that did
        not the last time."""
        silent = sorted(self.silent.items())
        return {
            "silent": [address for address, _ in silent],
            "unknown": self.unknown,
            "errors": dict(silent),
        }

    def is_listed(self, address: str) -> bool:
        return address in self._due

    async def first_round(self) -> None:
        """Ask everybody, for 3 s at most. Raises NodeIdTaken if this daemon's id is another's."""
        asking = asyncio.ensure_future(self.ask())
        try:
            await asyncio.wait([asking], timeout=FIRST_ROUND_S)
        finally:
            asking.cancel()
        taken = next((member for member in self._at.values() if self._is_double(member)), None)
        if taken is not None:
            raise NodeIdTaken(taken.node, taken.address)

    async def ask(self) -> None:
        """Ask those whose turn it is."""
        now = self._now()
        turns = asyncio.Semaphore(ASKED_AT_ONCE)
        due = [each for each, at in self._due.items() if at <= now and not self._is_own(each)]
        await asyncio.gather(*(self._ask(each, turns) for each in due))

    def found(self) -> dict[NodeId, Member]:
        """Return the others, by who is where; note what is refused."""
        own = self._ourselves
        found: dict[NodeId, Member] = {}
        refused: dict[NodeId, str] = {}
        for address in sorted(self._at, key=self.silent.__contains__):  # one may have moved
            member = self._at[address]
            first = own if member.node == own.node else found.get(member.node)
            if first is None:
                found[member.node] = member
            elif first.instance != member.instance and address not in self.silent:
                self._refuse(refused, address, member, first)
        self.refused = refused
        return found

    @property
    def error(self) -> str:
        """What is wrong with who answers, in words; "" for nothing."""
        if not self.refused:
            return ""
        pairs = (f"{node} at {address}" for node, address in self.refused.items())
        return f"node ids that another daemon has: {', '.join(sorted(pairs))}"

    @property
    def _ourselves(self) -> Member:
        assert self.own is not None
        return self.own

    def _is_own(self, address: str) -> bool:
        return address == self._ourselves.address

    async def _ask(self, address: str, turns: asyncio.Semaphore) -> None:
        async with turns:
            try:
                found = await asyncio.wait_for(self._hello(address), HELLO_S)
            except Exception as error:  # whatever the link raises, it is no answer
                if address not in self._due:
                    return
                why = _reason(error)
                if address not in self.silent:
                    logger.info("member=silent address=%s error=%r", address, why)
                self.silent[address] = why
                self._due[address] = self._now() + ASK_AGAIN_S
                self._settled()
                return
        if address in self._due:
            self.silent.pop(address, None)
            self._due[address] = self._now() + ASK_EVERY_S
            self._at[address] = replace(found, address=address)  # this one is known to be right
            self._settled()

    def _refuse(
        self, refused: dict[NodeId, str], address: str, member: Member, first: Member
    ) -> None:
        refused[member.node] = address
        if self.refused.get(member.node) != address:
            logger.error(
                "member=refused node=%s address=%s taken_by=%s", member.node, address, first.address
            )

    def _is_double(self, member: Member) -> bool:
        own = self._ourselves
        return member.node == own.node and member.instance != own.instance


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {HELLO_S:.0f} s"
    return str(error)[:REASON_CHARS_MAX] or type(error).__name__
