"""What the page needs of the daemon, and of the port that hands requests to it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

from kvstore.model.errors import Unauthorized, Unavailable
from kvstore.model.tenant import Principal


class Visitor(Protocol):
    """Who is at the other end of a connection. names: of its certificate, None without one.
    secure: it came by TLS."""

    @property
    def host(self) -> str: ...
    @property
    def names(self) -> tuple[str, ...] | None: ...
    @property
    def secure(self) -> bool: ...


class Calls(Protocol):
    """The daemon, asked from the page's loop. host: of who asks, "" for all who watch: what is
    asked for them is `noted` for each."""

    def caller(
        self, authorization: str, names: tuple[str, ...] | None, host: str
    ) -> Principal | None:
        """Return who visits, None where nobody has credentials. Raises Unauthorized."""

    def refused(self, host: str, error: Unauthorized | Unavailable) -> None:
        """Count a visitor that is not let in."""

    def refused_call(
        self, method: str, principal: Principal, host: str, error: Unauthorized
    ) -> None:
        """Count what somebody may not see, and note it."""

    def noted(self, principal: Principal, host: str, outcome: str, *methods: str) -> None:
        """Note that somebody sees what these methods of the .proto have told the page."""

    async def ask(self, principal: Principal, method: str, request: Any, host: str = "") -> Any:
        """Return the reply to a call of the .proto. Raises Unauthorized, Unavailable."""

    async def stats(self, principal: Principal, host: str = "") -> dict[str, Any]:
        """Return what `Stats` says. Raises Unauthorized, Unavailable."""

    def monitor(self, principal: Principal, request: Any) -> AsyncIterator[Any]:
        """Yield the replies of `Monitor`. Raises Unauthorized, Unavailable."""
