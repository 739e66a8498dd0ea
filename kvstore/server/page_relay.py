"""Between the HTTP port and the page: the port has the connection, its TLS and its bounds; the page
has a thread with a loop of its own, and answers through a pair of sockets.

So a page that hangs or fails keeps no probe from being answered, and a browser's bytes are read by
the port's parser, and by the page's, before anything looks at them.
"""

from __future__ import annotations

import selectors
import socket
import ssl
from email.message import Message
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import urlsplit

from kvstore.model.errors import Unavailable

LIVE_PATH = "/api/live"
SILENT_S = 20.0  # of the page, after which an answer is given up
CHUNK_NBYTES = 1 << 16
FORM_NBYTES_MAX = 4096
_PATHS: Final = frozenset({"/", "/page.js", "/login", "/logout"})
# What a request of a browser is judged by; nothing else of it is passed on.
_HEADERS: Final = (
    "Host",
    "Authorization",
    "Cookie",
    "Origin",
    "Sec-Fetch-Site",
    "Sec-Fetch-Mode",
    "Content-Type",
    "Accept",
)


class Visitor(NamedTuple):
    """Who is at the other end. names: of its certificate, None without one. secure: by TLS."""

    host: str
    names: tuple[str, ...] | None
    secure: bool


class PagePort(Protocol):
    """What answers `/`. Any thread may call it."""

    def address(self, port: int) -> str:
        """Return where a browser finds the page, with the token it wants; "" if there is none."""

    def connect(self, visitor: Visitor) -> socket.socket:
        """Return one end of a connection to the page, for one HTTP request. Raises Unavailable."""

    def close(self) -> None:
        """End every answer. Blocks for a moment."""


class NoPage:
    """In the place of a page that cannot be had: says why."""

    def address(self, port: int) -> str:
        return ""

    def __init__(self, why: str) -> None:
        self._why = why

    def connect(self, visitor: Visitor) -> socket.socket:
        raise Unavailable(self._why)

    def close(self) -> None:
        return


def is_page(path: str) -> bool:
    """Tell whether a path is the page's."""
    return path in _PATHS or path.startswith("/api/")


def request_head(command: str, target: str, headers: Message[Any, Any], body: bytes) -> bytes:
    """Return a request as the page gets it: one, with what its answer depends on."""
    asked = urlsplit(target)
    path = asked.path + (f"?{asked.query}" if asked.query else "")
    lines = [f"{command} {path} HTTP/1.1"]
    for name in _HEADERS:
        values = headers.get_all(name, [])
        lines += [f"{name}: {value}" for value in values if not {"\r", "\n"} & set(value)]
    lines += [f"Content-Length: {len(body)}", "Connection: close", "", ""]
    return "\r\n".join(lines).encode("latin-1", "replace") + body


def relay(inner: socket.socket, request: bytes, client: socket.socket) -> None:
    """Send a request to the page, and what it answers to the client, until either ends, or the page
    is silent for SILENT_S. Raises OSError if the client does not take it."""
    write_s = client.gettimeout()
    with inner, selectors.DefaultSelector() as waiting:
        inner.settimeout(SILENT_S)
        inner.sendall(request)
        waiting.register(inner, selectors.EVENT_READ)
        waiting.register(client, selectors.EVENT_READ)
        while ready := waiting.select(SILENT_S):
            for key, _ in ready:
                if key.fileobj is inner:
                    if not (data := inner.recv(CHUNK_NBYTES)):
                        return
                    client.settimeout(write_s)
                    client.sendall(data)
                elif not _is_there(client):
                    return
                else:
                    waiting.unregister(client)  # it says more than it was asked for


def _is_there(client: socket.socket) -> bool:
    """Tell whether a client that can be read has not gone."""
    client.settimeout(0)
    try:
        return bool(client.recv(1))
    except (BlockingIOError, ssl.SSLWantReadError):  # a message of TLS itself
        return True
    except OSError:
        return False
