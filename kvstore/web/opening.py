"""The page's thread: a loop of its own, on which Starlette answers what the port hands over."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import TimeoutError as Late
from typing import TYPE_CHECKING, Any

from kvstore.model.errors import Unavailable
from kvstore.settings import Settings, has_credentials, metrics_address
from kvstore.system.page_token import make_page_token, page_token_path
from kvstore.web.daemon import Calls, Visitor

if TYPE_CHECKING:
    from uvicorn import Config

logger = logging.getLogger(__name__)

CONNECT_S = 2.0
STOP_S = 2.0
_EVERYWHERE = ("0.0.0.0", "[::]")
NEEDS = "the page needs Starlette and uvicorn: pip install 'kvstore-tiers[web]'"


def has_extra() -> bool:
    """Tell whether what the page needs is installed."""
    return all(importlib.util.find_spec(name) for name in ("starlette", "uvicorn"))


def open_page(settings: Settings, calls: Calls) -> Page:
    """Return the page of a daemon. Raises ConfigError."""
    address = metrics_address(settings)
    host = address[0] if address is not None else "127.0.0.1"
    own = f"[{host}]" if ":" in host else host
    token = ""
    if has_extra() and not has_credentials(settings):
        token = make_page_token(page_token_path(settings.server.socket_path))
    names = settings.server.page_names
    called = names[0] if names else socket.gethostname() if own in _EVERYWHERE else own
    origin = f"{'https' if settings.tls.cert else 'http'}://{called}"
    return Page(calls, token=token, hosts=(own, *names), origin=origin)


class Page:
    """Answers from the first visitor on; a daemon that nobody looks at has no thread for it."""

    def __init__(self, calls: Calls, *, token: str, hosts: Sequence[str], origin: str) -> None:
        """token: that a visitor has to have; "" where there are credentials. hosts: names of this
        daemon. origin: by which a browser reaches it, without the port."""
        self._origin = origin
        self._calls = calls
        self._token = token
        self._hosts = hosts
        self._lock = threading.Lock()
        self._running: _Running | None = None
        self._closed = False

    def address(self, port: int) -> str:
        """Return where a browser finds it, with the token; "" without what it needs."""
        token = f"?token={self._token}" if self._token else ""
        return f"{self._origin}:{port}/{token}" if has_extra() else ""

    def connect(self, visitor: Visitor) -> socket.socket:
        """Return one end of a connection to the page, for one request. Raises Unavailable."""
        if not has_extra():
            raise Unavailable(NEEDS, reason="extra")
        with self._lock:
            if self._closed:
                raise Unavailable("the daemon is shutting down", reason="draining")
            if self._running is None:
                self._running = _Running(self._calls, self._token, self._hosts)
            running = self._running
        return running.connect(visitor)

    def close(self) -> None:
        """End every answer. Blocks for a moment."""
        with self._lock:
            self._closed = True
            running, self._running = self._running, None
        if running is not None:
            running.close()


class _Running:
    """The loop and its thread."""

    def __init__(self, calls: Calls, token: str, hosts: Sequence[str]) -> None:
        import uvicorn
        from uvicorn.server import ServerState

        from kvstore.web.app import make_app

        self._config: Config = uvicorn.Config(
            make_app(calls, token, hosts),
            http="h11",
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,  # addresses may have a token in them
            proxy_headers=False,
            server_header=False,
            date_header=False,
        )
        self._config.load()
        self._state = ServerState()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="kvstore-page", daemon=True)
        self._thread.start()

    def connect(self, visitor: Visitor) -> socket.socket:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)

        def protocol() -> Any:
            return self._config.http_protocol_class(  # type: ignore[call-arg]
                config=self._config,
                server_state=self._state,
                app_state={"visitor": visitor},
                _loop=self._loop,
            )

        async def take() -> None:
            await self._loop.connect_accepted_socket(protocol, theirs)

        future = asyncio.run_coroutine_threadsafe(take(), self._loop)
        try:
            future.result(CONNECT_S)
        except (Late, OSError, RuntimeError) as error:
            future.cancel()
            ours.close()
            theirs.close()
            raise Unavailable("the page's thread does not answer", reason="busy") from error
        return ours

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.close()
