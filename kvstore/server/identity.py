"""Who makes a call: fixed by the listener it comes to, or told by each call's credentials."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from kvstore.model.tenant import DEFAULT_TENANT, Principal, Role

CALLER: ContextVar[Principal] = ContextVar("kvstore_caller")
"""Who makes the gRPC call that is being answered. Not set for calls of the call socket."""


class Admitted(NamedTuple):
    """A call that is let in. still_valid: asked again while it runs; None: for ever."""

    principal: Principal
    still_valid: Callable[[], bool] | None = None


class Identity(Protocol):
    """How one listener learns who calls."""

    def admit(self, context: Any) -> Admitted:
        """Return who makes a gRPC call. Raises Unauthorized; it then says the same of a credential
        that is unknown, expired or revoked."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """A listener that is one principal's own: whoever reaches it is that one."""

    principal: Principal

    def admit(self, context: Any) -> Admitted:
        return Admitted(self.principal)


UNIX_SOCKET = Principal(DEFAULT_TENANT, "unix socket", Role.ADMIN)
"""The user of the daemon, where it has one tenant."""

OPEN_LOOPBACK = Principal(DEFAULT_TENANT, "any user of this host", Role.OPERATOR)
"""Everybody, where `server.listen_open` lets everybody in."""
