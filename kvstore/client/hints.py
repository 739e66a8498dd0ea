"""Hints about conversations and prefixes. A wrong hint costs hits; it never changes an answer."""

from __future__ import annotations

from typing import Any

from kvstore.client.caller import Caller
from kvstore.model.block import NamespaceId
from kvstore.model.hint import HintKind, HintReport, Prefix
from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.transport.hint_messages import report_of


class Hints:
    """Tells the daemon what a client knows about its next requests.

    target: the session id that requests were sent with, or a `Prefix`. Each method returns what the
    daemon did, and how long it took. Raises InvalidRequest for a time that is not a valid number.
    """

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def end_session(self, target: str | Prefix) -> HintReport:
        """Report that a conversation is over: blocks that only it used are evicted first."""
        return await self._hint(HintKind.END, target, end_session=pb.EndSession())

    async def expect(self, target: str | Prefix, in_s: float) -> HintReport:
        """Report that a conversation asks again in `in_s`: its blocks are kept, and are resident
        by then. An earlier request, or another hint, replaces this one."""
        return await self._hint(HintKind.EXPECT, target, expect=pb.Expect(in_s=in_s))

    async def prefetch(self, target: str | Prefix, *, deadline_s: float = 5.0) -> HintReport:
        """Promote blocks; answers when they are resident, or `deadline_s` is over."""
        return await self._hint(
            HintKind.PREFETCH, target, wait_s=deadline_s, prefetch=pb.Prefetch()
        )

    async def pin(
        self, target: str | Prefix, ttl_s: float, *, bytes_max: int = 0, deadline_s: float = 5.0
    ) -> HintReport:
        """Promote blocks within `deadline_s`, and keep them resident for `ttl_s`.

        Pins from the first block on, up to `bytes_max` (0: no limit) and the daemon's own limits.
        The target's next pin replaces this one; a `ttl_s` of 0 ends it.
        """
        pin = pb.Pin(ttl_s=ttl_s, bytes_max=bytes_max)
        return await self._hint(HintKind.PIN, target, wait_s=deadline_s, pin=pin)

    async def demote(self, target: str | Prefix, *, deadline_s: float = 5.0) -> HintReport:
        """Demote blocks that only this conversation used to the file tier.

        What is not written there yet is written within `deadline_s`.
        """
        return await self._hint(HintKind.DEMOTE, target, wait_s=deadline_s, demote=pb.Demote())

    async def _hint(
        self, kind: HintKind, target: str | Prefix, *, wait_s: float = 0.0, **hint: Any
    ) -> HintReport:
        prefix = Prefix(NamespaceId(b""), ()) if isinstance(target, str) else target
        request = pb.HintRequest(
            session_id=target if isinstance(target, str) else target.session_id,
            namespace_id=prefix.namespace_id,
            keys=self._caller.joined(prefix.keys),
            wait_s=wait_s,
            **hint,
        )
        reply = await self._caller.call(
            lambda stub, _, t: stub.Hint(request, timeout=t),
            wait_s=max(0.0, wait_s),
            namespace_id=prefix.namespace_id,
        )
        return report_of(kind, reply)
