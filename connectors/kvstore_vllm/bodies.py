"""Bodies of HTTP requests, which a middleware reads and may change before the server sees them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, TypeAlias

import msgspec

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Message, Receive, Send], Awaitable[None]]
Header: TypeAlias = tuple[bytes, bytes]

BODY_NBYTES_MAX = 64 << 20


class Body:
    """The body of one request: read it, then pass the request on.

    data: the bytes. whole: False if the body is longer than BODY_NBYTES_MAX, or the client left.
    """

    def __init__(self, scope: Message, receive: Receive) -> None:
        self._scope = scope
        self._receive = receive
        self._received: list[Message] = []
        self._nbytes = 0

    async def read(self) -> None:
        """Read to the end of the body, or until it is too long."""
        while self._nbytes <= BODY_NBYTES_MAX:
            message = await self._receive()
            self._received.append(message)
            self._nbytes += len(message.get("body", b""))
            if message["type"] != "http.request" or not message.get("more_body"):
                return

    @property
    def data(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self._received)

    @property
    def whole(self) -> bool:
        ended = not self.gone and not self._received[-1].get("more_body")
        return ended and self._nbytes <= BODY_NBYTES_MAX

    @property
    def gone(self) -> bool:
        """Whether the client has left before its body ended."""
        return bool(self._received[-1]["type"] != "http.request")

    def replace(self, data: bytes) -> None:
        """Let the server see other bytes."""
        length = str(len(data)).encode()
        headers = [(n, v) for n, v in self._scope["headers"] if n.lower() != b"content-length"]
        self._scope = {**self._scope, "headers": [*headers, (b"content-length", length)]}
        self._received = [{"type": "http.request", "body": data, "more_body": False}]

    async def pass_on(self, app: App, send: Send) -> None:
        """Let the server answer the request, as it is now."""
        waiting = iter(self._received)

        async def again() -> Message:
            message = next(waiting, None)
            return message if message is not None else await self._receive()

        await app(self._scope, again, send)


def values_of(headers: Iterable[Header], name: bytes) -> list[bytes]:
    """Return the values of all headers of a name, which is in lower case."""
    return [value for each, value in headers if each.lower() == name]


def object_of(data: bytes) -> dict[str, Any] | None:
    """Return the JSON object that a body is, or None."""
    try:
        found = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
