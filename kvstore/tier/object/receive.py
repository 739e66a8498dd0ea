"""Ranged GETs whose bodies the kernel writes directly into the target memory.

The library returns a body in its own memory: every byte is copied once more, and a thread is woken
for each 30 KiB. On two cores shared with the server that took a fifth of the time. So the library
only signs a URL, and the standard library's HTTP client receives the answer. Its `readinto` is the
socket's `recv_into`, outside the interpreter lock.

This accepts one kind of answer, HTTP/1.1 206 with its length, and knows 404 and "slow down". Every
other answer is `Unfit`: then the library asks again, and handles redirects, proxies and other
schemes.
"""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from urllib.parse import SplitResult, urlsplit

from kvstore.tier.object.failure import ObjectFailed, ObjectGone
from kvstore.tier.object.requests import Filled

CONNECT_TIMEOUT_S = 1.0  # if connecting takes longer, this is not the fast way
IDLE_S = 20.0  # stores close idle connections after a similar time


class Unfit(Exception):
    """Nothing was received, and the store is not at fault: ask through the library. The message
    says why, without the signed URL."""


class Connections:
    """The idle connections to one host, the last used first. For any number of threads."""

    def __init__(self, timeout_s: float) -> None:
        """timeout_s: of each wait for bytes."""
        self._timeout_s = timeout_s
        self._idle: deque[tuple[float, HTTPConnection]] = deque()
        self._context: ssl.SSLContext | None = None

    def take(self, url: SplitResult) -> HTTPConnection:
        """Return a connection to a URL's host. Raises Unfit if it cannot connect."""
        while self._idle:
            try:
                since, connection = self._idle.pop()
            except IndexError:  # another thread was faster
                break
            if time.monotonic() - since < IDLE_S and _is_silent(connection):
                return connection
            connection.close()
        try:
            return self._connected(url)
        except OSError as error:
            raise Unfit(f"no connection: {type(error).__name__}") from None

    def give(self, connection: HTTPConnection) -> None:
        """Take back a connection without a request in flight."""
        self._idle.append((time.monotonic(), connection))

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop()[1].close()

    def _connected(self, url: SplitResult) -> HTTPConnection:
        if url.scheme == "https":
            self._context = self._context or ssl.create_default_context()
            connection: HTTPConnection = HTTPSConnection(
                url.netloc, timeout=CONNECT_TIMEOUT_S, context=self._context
            )
        else:
            connection = HTTPConnection(url.netloc, timeout=CONNECT_TIMEOUT_S)
        try:
            connection.connect()
            connection.sock.settimeout(self._timeout_s)
        except BaseException:
            connection.close()
            raise
        return connection


class Receipt:
    """One GET of the bytes from `start` on that fill `buffers`: run by a thread, once."""

    def __init__(
        self,
        connections: Connections,
        sign: Callable[[], str],
        start: int,
        buffers: Sequence[memoryview],
        filled: Filled,
    ) -> None:
        """sign: returns the URL to get. May wait, and raise Unfit. filled: not called any more
        after `stop` has returned."""
        self._connections = connections
        self._sign = sign
        self._start = start
        self._buffers = buffers
        self._filled = filled
        self._filling = threading.Lock()  # held while the buffers are used
        self._state = threading.Lock()  # of both below
        self._socket: socket.socket | None = None  # while this receipt holds it
        self._stopped = False

    def run(self) -> None:
        """Fill the buffers. Raises Unfit, ObjectGone, ObjectFailed."""
        url = urlsplit(self._sign())
        connection = self._connections.take(url)
        reusable = False
        try:
            self._own(connection.sock)
            with self._ask(connection, url) as response:
                self._check(response)
                for index, buffer in enumerate(self._buffers):
                    self._fill(response, buffer)
                    with self._filling:
                        self._check_going()
                        self._filled(index)
            self._own(None)
            reusable = not response.will_close
        except TimeoutError:
            raise ObjectFailed("get: timed out", reason="timeout") from None
        except (OSError, HTTPException):
            raise ObjectFailed("get: the connection failed", reason="connection") from None
        finally:
            if reusable:
                self._connections.give(connection)
            else:
                connection.close()

    def stop(self) -> None:
        """After this returns, no buffer is used. The thread ends soon."""
        with self._state:
            self._stopped = True
            if self._socket is not None:
                with suppress(OSError):  # not the TLS socket's own: its reader still needs it whole
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
        with self._filling:
            pass

    def _own(self, connected: socket.socket | None) -> None:
        with self._state:
            self._check_going()
            self._socket = connected

    def _check_going(self) -> None:
        if self._stopped:
            raise ObjectFailed("get: stopped", reason="connection")

    @property
    def _last(self) -> int:
        return self._start + sum(map(len, self._buffers)) - 1

    def _ask(self, connection: HTTPConnection, url: SplitResult) -> HTTPResponse:
        headers = {"Range": f"bytes={self._start}-{self._last}"}
        connection.request("GET", f"{url.path}?{url.query}", headers=headers)
        return connection.getresponse()

    def _check(self, response: HTTPResponse) -> None:
        """Return if the body is the bytes that were asked for."""
        _check_status(response.status)
        place = response.getheader("Content-Range", "")
        nbytes = self._last + 1 - self._start
        if not place.startswith(f"bytes {self._start}-{self._last}/") or response.length != nbytes:
            raise ObjectFailed("get: not the bytes asked for", reason="short")

    def _fill(self, response: HTTPResponse, buffer: memoryview) -> None:
        filled = 0
        while filled < len(buffer):
            with self._filling:
                self._check_going()
                count = response.readinto(buffer[filled:])
            if not count:
                raise ObjectFailed(f"get: {filled} of {len(buffer)} bytes", reason="short")
            filled += count


def _check_status(status: int) -> None:
    """Return for the one answer that has the bytes."""
    if status == 206:
        return
    if status == 404:
        raise ObjectGone("get: no such object", reason="gone")
    if status in (429, 503):
        raise ObjectFailed(f"get: slow down, HTTP {status}", reason="throttled")
    if status == 408 or status >= 500:
        raise ObjectFailed(f"get: HTTP {status}", reason="server")
    raise Unfit(f"HTTP {status}")


def _is_silent(connection: HTTPConnection) -> bool:
    """Say whether an idle connection may be used. One that the store has closed is readable."""
    poll = select.poll()
    poll.register(connection.sock, select.POLLIN)
    return not poll.poll(0)
