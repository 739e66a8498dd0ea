"""What the page may ask the daemon: the calls of the .proto, by the same table of rights.

The page runs on a thread of its own. Calls are answered on the daemon's event loop, which does no
more for the page than for any client: it answers; what is drawn of it is drawn elsewhere.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from typing import Any, NamedTuple, TypeVar

from kvstore.model.errors import Unauthorized, Unavailable
from kvstore.model.tenant import Principal
from kvstore.server import rights
from kvstore.server.audit import AuditLog
from kvstore.server.audited import audited, peer_of_call
from kvstore.server.http_rights import HttpRights
from kvstore.server.identity import CALLER

ASK_S = 3.0  # for the daemon to answer
BATCHES_MAX = 64  # of requests as they come, that the page has not taken yet
T = TypeVar("T")


class _From(NamedTuple):
    """Where a call came from, as gRPC would say it."""

    host: str

    def peer(self) -> str:
        return f"ipv6:[{self.host}]:0" if ":" in self.host else f"ipv4:{self.host}:0"


class PageCalls:
    """The daemon, as the page sees it. Coroutines run on the page's loop.

    What is asked is noted in the audit log as over gRPC. host: the address of who asks; "" where
    the page asks for all who watch, which is `noted` for each of them.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        service_of: Callable[[Principal], Any],
        allowed: HttpRights,
        audit: AuditLog | None,
    ) -> None:
        """loop: that answers engines. service_of: of a tenant; raises Unauthorized."""
        self._audit = audit
        self._loop = loop
        self._service_of = service_of
        self._allowed = allowed

    def caller(
        self, authorization: str, names: tuple[str, ...] | None, host: str
    ) -> Principal | None:
        """Return who visits, by the header Authorization or the names of a certificate; None where
        nobody has credentials. Raises Unauthorized."""
        return self._allowed.visitor(authorization, names, host)

    def refused(self, host: str, error: Unauthorized | Unavailable) -> None:
        """Count a visitor that is not let in, and note it if it was not allowed."""
        self._allowed.refused_visitor(host, error)

    def refused_call(
        self, method: str, principal: Principal, host: str, error: Unauthorized
    ) -> None:
        """Count what somebody may not see, and note it."""
        self._allowed.refused_call(method, principal, host, error)

    def noted(self, principal: Principal, host: str, outcome: str, *methods: str) -> None:
        """Note that somebody sees what these methods have told the page."""
        if self._audit is not None:
            peer = peer_of_call(_From(host))
            for method in methods:
                self._audit.call(method, principal, peer, outcome)

    async def ask(self, principal: Principal, method: str, request: Any, host: str = "") -> Any:
        """Return the reply to one call. Raises Unauthorized, Unavailable after ASK_S, and what the
        call raises."""
        service = self._served(principal, method, host)

        async def behaviour(asked: Any, _: Any) -> Any:
            return await getattr(service, method)(asked, None)

        async def answer() -> Any:
            CALLER.set(principal)
            if self._audit is None or not host:
                return await behaviour(request, None)
            return await audited(method, behaviour, self._audit)(request, _From(host))

        return await self._on_loop(answer())

    def _served(self, principal: Principal, method: str, host: str) -> Any:
        """Return what answers a call. Raises Unauthorized."""
        try:
            rights.check(method, principal)
            return self._service_of(principal)
        except Unauthorized as error:
            if host:
                self.refused_call(method, principal, host, error)
            raise

    async def stats(self, principal: Principal, host: str = "") -> dict[str, Any]:
        """Return what `Stats` says. Only what the daemon's loop owns is looked at there."""
        service = self._served(principal, "Stats", host)

        async def look() -> dict[str, Any]:
            CALLER.set(principal)
            found: dict[str, Any] = await service.look()
            return found

        found = await self._on_loop(look())
        counted: dict[str, Any] = service.counted()
        return found | counted

    async def monitor(self, principal: Principal, request: Any) -> AsyncIterator[Any]:
        """Yield the replies of `Monitor`. A page that does not take them misses some, and is told
        how many by the replies that follow."""
        rights.check("Monitor", principal)
        here = asyncio.get_running_loop()
        batches: asyncio.Queue[Any] = asyncio.Queue(BATCHES_MAX)

        def offer(reply: Any) -> None:
            if batches.full():
                batches.get_nowait()  # the oldest
            batches.put_nowait(reply)

        async def watch() -> None:
            CALLER.set(principal)
            replies: AsyncGenerator[Any, None] = self._service_of(principal).Monitor(request, None)
            try:
                async with contextlib.aclosing(replies):
                    async for reply in replies:
                        here.call_soon_threadsafe(offer, reply)
            finally:
                with contextlib.suppress(RuntimeError):  # the page's loop has ended before
                    here.call_soon_threadsafe(offer, None)

        watching = asyncio.run_coroutine_threadsafe(watch(), self._loop)
        try:
            while (reply := await batches.get()) is not None:
                yield reply
        finally:
            watching.cancel()

    async def _on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        future: concurrent.futures.Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            async with asyncio.timeout(ASK_S):
                return await asyncio.wrap_future(future)
        except TimeoutError as error:
            raise Unavailable(f"the daemon's event loop did not answer for {ASK_S:g} s") from error
