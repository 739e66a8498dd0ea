"""A lean HTTP/1.1 client: one request a connection at a time, every byte stamped as it is read.

A load generator needs little of HTTP but exact times. Here a piece of a body is stamped and handed
over inside `buffer_updated`, before any other task of the event loop can run; with a stream reader
in between it would wait there for its task's turn. Responses are read chunked, by length or to the
end of the connection. There are no redirects, proxies, cookies or compression.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, cast
from urllib.parse import urlsplit

READ_NBYTES = 64 << 10
HEAD_NBYTES_MAX = 64 << 10
LINE_NBYTES_MAX = 1 << 10
CONNECT_TIMEOUT_S = 10.0
# uvicorn, which vLLM runs on, closes idle connections after 5 s. Letting go of them first avoids
# sending a request into a connection that is being closed.
KEEPALIVE_S = 2.0
# How long the end of a response may take after `enough`; past it the connection is not used again.
GRACE_S = 1.0


class ConnectFailed(Exception):
    """No connection could be made."""


class Disconnected(Exception):
    """The connection ended before the response did."""


class MalformedResponse(Exception):
    """What came is no HTTP/1.1 response."""


@dataclass(frozen=True, slots=True)
class Head:
    """Status and headers, names in lower case."""

    status: int
    headers: Mapping[str, str]


OnBody = Callable[[Head, bytes, float], bool]
"""Takes head, bytes of the body, and when they were read; returns True once it has enough."""

State = Literal["idle", "head", "size", "chunk", "length", "close", "trailer"]


class HTTPClient:
    """Requests to one origin over as many kept-alive connections as are in use at once."""

    def __init__(self, url: str) -> None:
        """Prepare requests to the origin of `url`. Raises ValueError for what is no http(s) URL."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no URL of the form http://host:port")
        self._host = parts.hostname
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._netloc = parts.netloc.rpartition("@")[2]
        self._idle: list[_Connection] = []

    async def request(
        self,
        method: Literal["GET", "POST"],
        path: str,
        *,
        headers: Mapping[str, str],
        body: bytes = b"",
        on_body: OnBody,
    ) -> Head:
        """Send a request and return when its response has ended.

        on_body is called as bytes come; what it raises ends the request and is raised here.
        Raises ConnectFailed, Disconnected, MalformedResponse. There is no deadline past connecting.
        """
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self._netloc}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        lines.append(f"Content-Length: {len(body)}\r\n\r\n")
        data = "\r\n".join(lines).encode("latin-1") + body
        connection = self._reuse() or await self._connect()
        try:
            head = await connection.exchange(data, on_body)
        finally:
            if connection.reusable:
                self._idle.append(connection)
            else:
                connection.abort()
        return head

    def close(self) -> None:
        """Close all idle connections."""
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    def _reuse(self) -> _Connection | None:
        oldest = time.perf_counter() - KEEPALIVE_S
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable and connection.released > oldest:
                return connection
            connection.abort()
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(
                    _Connection, self._host, self._port, ssl=self._tls
                )
        except TimeoutError as error:
            raise ConnectFailed(f"no connection within {CONNECT_TIMEOUT_S:g} s") from error
        except OSError as error:
            raise ConnectFailed(error.strerror or str(error)) from error
        return connection


class _Connection(asyncio.BufferedProtocol):
    # A buffer that stays: `data_received` would cost a fresh 256 KiB allocation for each read.
    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(READ_NBYTES))
        self._transport: asyncio.Transport | None = None
        self._state: State = "idle"
        self._rest = b""
        self._left = 0
        self._head = Head(0, {})
        self._on_body: OnBody = lambda head, data, now: False
        self._ended: asyncio.Future[Head] | None = None
        self._grace: asyncio.TimerHandle | None = None
        self._keep = True
        self.released = 0.0

    @property
    def reusable(self) -> bool:
        return self._state == "idle" and self._keep and self._transport is not None

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def exchange(self, data: bytes, on_body: OnBody) -> Head:
        if self._transport is None:
            raise Disconnected("the server closed the connection")
        self._on_body = on_body
        self._state = "head"
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(data)
        try:
            return await self._ended
        finally:
            if self._grace is not None:
                self._grace.cancel()
                self._grace = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._state == "close" and exc is None:
            self._end()
        else:
            self._fail(Disconnected(str(exc) if exc else "the server closed the connection"))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        now = time.perf_counter()
        data = bytes(self._buffer[:nbytes])
        if self._ended is None or self._ended.done():
            self._keep = False  # bytes that nobody asked for
            return
        try:
            body = self._parse(self._rest + data if self._rest else data)
            if body and self._on_body(self._head, body, now) and self._grace is None:
                loop = asyncio.get_running_loop()
                self._grace = loop.call_later(GRACE_S, self._end, False)
        except Exception as error:
            self._fail(error)
            return
        if self._state == "idle":
            self._end(self._keep)

    def _end(self, keep: bool = False) -> None:
        self._keep = keep
        self._state = "idle"
        self.released = time.perf_counter()
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(self._head)

    def _fail(self, error: Exception) -> None:
        self._keep = False
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)

    def _parse(self, data: bytes) -> bytes:
        """Go through what has come, keep what is incomplete, return the bytes of the body."""
        pieces = []
        at = 0
        while at < len(data):
            if self._state in ("chunk", "length", "close"):
                piece = data[at : at + self._left] if self._state != "close" else data[at:]
                pieces.append(piece)
                at += len(piece)
                self._took(len(piece))
                continue
            mark = b"\r\n\r\n" if self._state == "head" else b"\r\n"
            end = data.find(mark, at)
            if self._state == "idle" or end < 0:
                break
            line = data[at:end]
            at = end + len(mark)
            self._line(line)
        self._rest = data[at:]
        if self._state == "idle" and self._rest:
            raise MalformedResponse("bytes after the end of the response")
        if len(self._rest) > (HEAD_NBYTES_MAX if self._state == "head" else LINE_NBYTES_MAX):
            raise MalformedResponse(f"a {self._state} line without end")
        return b"".join(pieces)

    def _took(self, nbytes: int) -> None:
        if self._state == "close":
            return
        self._left -= nbytes
        if not self._left:
            self._state = "size" if self._state == "chunk" else "idle"

    def _line(self, line: bytes) -> None:
        if self._state == "head":
            self._begin(line)
        elif self._state == "trailer":
            self._state = "trailer" if line else "idle"
        elif line:  # the empty line after a chunk comes before the next size
            self._left = _chunk_size(line)
            self._state = "chunk" if self._left else "trailer"

    def _begin(self, data: bytes) -> None:
        head = _head(data)
        if 100 <= head.status < 200:
            return  # an interim response; the final one follows
        self._head = head
        self._keep = head.headers.get("connection", "").lower() != "close"
        length = head.headers.get("content-length")
        if head.headers.get("transfer-encoding", "").lower() == "chunked":
            self._state = "size"
        elif head.status in (204, 304) or length == "0":
            self._state = "idle"
        elif length is None:
            self._state = "close"
        elif length.isascii() and length.isdigit():
            self._left, self._state = int(length), "length"
        else:
            raise MalformedResponse(f"Content-Length is {length[:80]!r}")


def _head(data: bytes) -> Head:
    first, *lines = data.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    status = rest[:3]
    if not version.startswith("HTTP/1.") or not (status.isascii() and status.isdigit()):
        raise MalformedResponse(f"no HTTP/1.1 response: {first[:80]}")
    pairs = (line.partition(":") for line in lines)
    return Head(int(status), {name.lower(): value.strip() for name, _, value in pairs})


def _chunk_size(line: bytes) -> int:
    digits = line.partition(b";")[0].strip()
    try:
        # int() would take a sign and underscores, too.
        return int(digits if digits.isalnum() else b"", 16)
    except ValueError as error:
        raise MalformedResponse(f"no size of a chunk: {line[:80]!r}") from error
