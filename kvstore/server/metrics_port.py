"""The HTTP port: /metrics for Prometheus, /healthz and /readyz for whoever restarts, /v1/match for
whoever routes; and `/`, the page for people.

It has threads of its own, so it answers also while the event loop does not.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import socketserver
import ssl
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeAlias
from urllib.parse import parse_qs, urlsplit

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from kvstore.model.errors import Unauthorized, Unavailable
from kvstore.server.match_page import BODY_NBYTES_MAX, MATCH_PATH, MatchPage
from kvstore.server.page_relay import (
    FORM_NBYTES_MAX,
    LIVE_PATH,
    PagePort,
    Visitor,
    is_page,
    relay,
    request_head,
)

logger = logging.getLogger(__name__)

CONNECTIONS_MAX = 32
IDLE_S = 5.0  # for a client to go on with its request
STOP_S = 0.5
WAKE_S = 0.05
Check: TypeAlias = "Callable[[str, tuple[str, ...] | None, str, str], None]"
_TEXT = "text/plain; charset=utf-8"


class MetricsPort:
    """Serves from `start` to `close`.

    not_alive, not_ready: why not, "" if it is. tls: what a connection speaks TLS by; None:
    plaintext. registry_of: the metrics of one tenant, for /metrics?tenant=NAME; None for one that
    is not there. check: raises Unauthorized for who may not read /metrics, by the header
    Authorization, the names of the client's certificate (None without one), its address, and the
    tenant that is asked for ("": all); None: everybody may. Any thread may call them.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        registry: CollectorRegistry,
        not_alive: Callable[[], str],
        not_ready: Callable[[], str],
        registry_of: Callable[[str], CollectorRegistry | None] = lambda _: None,
        tls: Callable[[], ssl.SSLContext] | None = None,
        check: Check | None = None,
        match: MatchPage | None = None,
        page: PagePort | None = None,
    ) -> None:
        """match: answers /v1/match. page: answers `/` and what belongs to it. Bind. Raises
        OSError."""
        pages = {
            "/metrics": lambda handler: handler.metrics(
                lambda tenant: registry_of(tenant) if tenant else registry, check
            ),
            "/healthz": lambda handler: handler.probe(not_alive()),
            "/readyz": lambda handler: handler.probe(not_ready()),
        }
        if match is not None:
            pages[MATCH_PATH] = lambda handler: handler.match(match)
        self._page = page
        server = _Server6 if ":" in host else _Server
        handler = type("Handler", (_Handler,), {"pages": pages, "page": page})
        self._server = server((host, port), handler, tls)
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="kvstore-http", daemon=True
        )
        self._host, self.port = host, int(self._server.server_address[1])

    @property
    def page_address(self) -> str:
        """Where a browser finds the page, with the token it wants; "" if there is none."""
        return self._page.address(self.port) if self._page is not None else ""

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop listening. Blocks for a moment."""
        ending = threading.Thread(
            target=self._server.shutdown, name="kvstore-http-end", daemon=True
        )
        ending.start()
        until = time.monotonic() + STOP_S
        while ending.is_alive() and time.monotonic() < until:
            self._wake()
            ending.join(WAKE_S)
        self._server.server_close()
        if self._page is not None:
            self._page.close()
        self._thread.join(STOP_S)

    def _wake(self) -> None:
        """Connect, so that the server looks whether it shall end: else twice a second only."""
        with contextlib.suppress(OSError):
            socket.create_connection((self._host, self.port), WAKE_S).close()


class _Handler(BaseHTTPRequestHandler):
    pages: dict[str, Callable[[_Handler], None]]
    page: PagePort | None
    server: _Server
    timeout = IDLE_S
    server_version, sys_version = "kvstore", ""

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        page = self.pages.get(path)
        if page is not None:
            page(self)
        elif self.page is not None and is_page(path):
            self.relay(self.page)
        else:
            there = ", ".join([*self.pages, *["/"] * (self.page is not None)])
            self.answer(HTTPStatus.NOT_FOUND, f"not found: {there} are\n")

    do_HEAD = do_GET  # noqa: N815

    def refuse(self) -> None:
        self.answer(HTTPStatus.METHOD_NOT_ALLOWED, "GET and HEAD only\n", Allow="GET, HEAD")

    def do_POST(self) -> None:
        path = urlsplit(self.path).path
        if path == MATCH_PATH and MATCH_PATH in self.pages:
            self.do_GET()
        elif self.page is not None and is_page(path):
            self.relay(self.page)
        else:
            self.refuse()

    do_PUT = do_DELETE = do_PATCH = do_OPTIONS = refuse  # noqa: N815

    def metrics(
        self, registry_of: Callable[[str], CollectorRegistry | None], check: Check | None
    ) -> None:
        asked = parse_qs(urlsplit(self.path).query)
        tenant, names = asked.get("tenant", [""])[0], asked.get("name[]")
        try:
            if check is not None:
                authorization = self.headers.get("Authorization", "")
                check(authorization, self._certified_names(), self.client_address[0], tenant)
        except Unauthorized as error:
            headers = {"WWW-Authenticate": "Bearer"}
            self.answer(HTTPStatus.UNAUTHORIZED, f"{error}\n", **headers)
            return
        registry = registry_of(tenant)
        if registry is None:
            self.answer(HTTPStatus.NOT_FOUND, "there is no such tenant\n")
            return
        encode, kind = choose_encoder(self.headers.get("Accept", ""))
        shown: Any = registry.restricted_registry(names) if names else registry
        self.answer(HTTPStatus.OK, encode(shown), kind)

    def match(self, page: MatchPage) -> None:
        body = self._body() if self.command == "POST" else b""
        if body is None:
            return
        status, data = page.answer(
            urlsplit(self.path).query,
            body,
            authorization=self.headers.get("Authorization", ""),
            names=self._certified_names(),
            host=self.client_address[0],
            hosts=self.headers.get_all("Host", []),
        )
        headers = {"WWW-Authenticate": "Bearer"} if status == HTTPStatus.UNAUTHORIZED else {}
        self.answer(status, data, "application/json", **headers)

    def relay(self, page: PagePort) -> None:
        """Let the page's own thread answer; this one passes its bytes on."""
        body = self._body(FORM_NBYTES_MAX) if self.command == "POST" else b""
        if body is None:
            return
        self.close_connection = True
        secure = isinstance(self.connection, ssl.SSLSocket)
        visitor = Visitor(self.client_address[0], self._certified_names(), secure)
        try:
            inner = page.connect(visitor)
        except Unavailable as error:
            self.answer(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}\n")
            return
        if urlsplit(self.path).path == LIVE_PATH:
            self.server.keep(self.connection)  # the page bounds these itself
        head = request_head(self.command, self.path, self.headers, body)
        relay(inner, head, self.connection)

    def _body(self, nbytes_max: int = BODY_NBYTES_MAX) -> bytes | None:
        """Return what was posted; None: it was refused."""
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or len(length) > 10:
            self.answer(HTTPStatus.LENGTH_REQUIRED, "a body needs its Content-Length\n")
            return None
        if int(length) > nbytes_max:
            self.close_connection = True
            words = f"a body has at most {nbytes_max} bytes\n"
            self.answer(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, words)
            return None
        return self.rfile.read(int(length))

    def _certified_names(self) -> tuple[str, ...] | None:
        """Return the names of the client's certificate, None without one."""
        found = (
            self.connection.getpeercert() if isinstance(self.connection, ssl.SSLSocket) else None
        )
        if not found:
            return None
        names: Any = found.get("subjectAltName", ())
        return tuple(str(name) for _, name in names)

    def probe(self, trouble: str) -> None:
        if trouble:
            self.answer(HTTPStatus.SERVICE_UNAVAILABLE, f"{trouble}\n")
        else:
            self.answer(HTTPStatus.OK, "ok\n")

    def answer(
        self, status: HTTPStatus, body: str | bytes, kind: str = _TEXT, **headers: str
    ) -> None:
        data = body.encode() if isinstance(body, str) else body
        self.send_response(status)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Length", str(len(data))),
            ("Cache-Control", "no-store"),
            *headers.items(),
        ):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: probes come every few seconds."""


class _Server(ThreadingHTTPServer):
    """Keeps at most CONNECTIONS_MAX: for one more, the oldest has to go."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(
        self, address: tuple[str, int], handler: Any, tls: Callable[[], ssl.SSLContext] | None
    ) -> None:
        self._tls = tls
        self._connections: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        super().__init__(address, handler)

    def keep(self, connection: socket.socket) -> None:
        """Let a connection not go for others."""
        with self._lock:
            self._connections.pop(connection, None)

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # not HTTPServer's, which asks for a name by DNS

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._connections[request] = None
            oldest = next(iter(self._connections))
            excess = len(self._connections) > CONNECTIONS_MAX
            if excess:
                del self._connections[oldest]
        if excess:
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)  # its thread ends, and closes it
        super().process_request(request, client_address)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Answer on a thread of its own, where a handshake keeps nobody else waiting."""
        if self._tls is None:
            super().finish_request(request, client_address)
            return
        request.settimeout(IDLE_S)
        with self._tls().wrap_socket(
            request, server_side=True, do_handshake_on_connect=False
        ) as secure:
            with self._lock:
                self._connections[secure] = self._connections.pop(request, None)
            try:
                secure.do_handshake()
                super().finish_request(secure, client_address)
            finally:
                with self._lock:
                    self._connections.pop(secure, None)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._connections.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("http=failed", exc_info=True)


class _Server6(_Server):
    address_family = socket.AF_INET6
