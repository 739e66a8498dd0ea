"""Which methods go into the audit log, and what it counts of each: what changes or reveals."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from kvstore.model.block import KEY_NBYTES
from kvstore.server.audit import AuditLog
from kvstore.server.credentials import host_of
from kvstore.server.identity import CALLER

Counts = Callable[[Any, Any], dict[str, Any] | None]  # of (request, reply); None: not worth a line

AUDITED: Mapping[str, Counts] = {
    # Without a session it is a ping.
    "OpenSession": lambda asked, told: {"client": asked.client[:80]} if told.session else None,
    "RegisterNamespace": lambda asked, told: {"namespace": told.namespace_id.hex()[:12]},
    "Delete": lambda asked, told: {
        "keys": len(asked.keys) // KEY_NBYTES,
        "deleted": told.deleted,
        "corrupt": asked.corrupt,
    },
    "Clear": lambda asked, told: {
        "deleted": told.deleted,
        "namespace": asked.namespace_id.hex()[:12] or "all",
    },
    "Scan": lambda asked, told: {"items": len(told.items)},
    "AddTenant": lambda asked, told: {"added": asked.name[:80]},
    "DeleteTenant": lambda asked, told: {
        "removed": asked.name[:80],
        "blocks": told.blocks,
        "erased": told.erased,
        "complete": not told.left,
    },
    "ListNamespaces": lambda asked, told: {"items": len(told.items)},
    "Tree": lambda asked, told: {"runs": len(told.runs)},
    "Conversations": lambda asked, told: {"items": len(told.items)},
    "Outcomes": lambda asked, told: {"items": len(told.outcomes)},
    "Slow": lambda asked, told: {"items": len(told.items), "reset": asked.reset},
    "GetConfig": lambda asked, told: {"settings": len(told.settings)},
    "LogLines": lambda asked, told: {"lines": len(told.lines)},
    "SetConfig": lambda asked, told: {"changed": [each.key for each in told.changed]},
}
AUDITED_STREAMS: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "Record": lambda asked: {"share": asked.share},
    "Monitor": lambda asked: {"namespace": asked.namespace_id.hex()[:12] or "all"},
}
# Who asks has the keys already, tells of itself, or learns counts. Engines ask most of them always.
QUIET = frozenset(
    {
        *("Match", "Acquire", "Await", "Release", "Get", "Explain"),
        *("Reserve", "Commit", "Put", "Flush", "Hint"),
        *("WhoAmI", "Stats", "History"),
    }
)


def audited(method: str, behaviour: Any, audit: AuditLog) -> Any:
    """Return the behaviour of a method that notes each call, if the method is audited."""
    if method in AUDITED_STREAMS:
        return _stream(method, behaviour, audit, AUDITED_STREAMS[method])
    return _single(method, behaviour, audit, AUDITED[method]) if method in AUDITED else behaviour


def _single(method: str, behaviour: Any, audit: AuditLog, counts: Counts) -> Any:
    async def answer(request: Any, context: Any) -> Any:
        outcome, fields = "ended", {}
        try:
            reply = await behaviour(request, context)
            outcome, told = "ok", counts(request, reply)
            if told is None:
                outcome = ""
            fields = told or {}
            return reply
        except Exception as error:
            outcome = type(error).__name__
            raise
        finally:
            if outcome:
                audit.call(method, CALLER.get(), peer_of_call(context), outcome, **fields)

    return answer


def _stream(
    method: str, behaviour: Any, audit: AuditLog, counts: Callable[[Any], dict[str, Any]]
) -> Any:
    async def answer(request: Any, context: Any) -> AsyncGenerator[Any, None]:
        audit.call(method, CALLER.get(), peer_of_call(context), "begun", **counts(request))
        async for reply in behaviour(request, context):
            yield reply

    return answer


def peer_of_call(context: Any) -> str:
    """Return the address at the other end, without its port; of a unix socket, whose it is, but for
    gRPC's, which does not tell: "unix"."""

    peer = getattr(context, "peer", None)
    return host_of(peer()).rstrip(":") if peer is not None else "unix"
