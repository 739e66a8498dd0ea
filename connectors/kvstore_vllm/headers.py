"""HTTP headers -> the hints of a request, for gateways and clients that cannot change its body.

vLLM hands no headers to connectors, but it does let a server wrap its application:

    vllm serve MODEL --middleware kvstore_vllm.headers.HintHeaders ...

| header | field of kv_transfer_params.kvstore |
| --- | --- |
| X-Session-ID | session_id |
| X-Session-End: true | end_session |
| X-Session-Expect-S: 30 | expect_s |
| X-Session-Pin-S: 600 | pin_s |
| X-Session-Demote: true | demote |

What the body says itself wins. A request without one of them is passed on untouched, and so is one
whose body is no JSON object, or is too long.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, TypeAlias

import msgspec

from kvstore_vllm.hints import FIELD

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Message, Receive, Send], Awaitable[None]]

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
BODY_NBYTES_MAX = 64 << 20


def _yes(text: str) -> bool:
    return text.strip().lower() in ("1", "true", "yes")


def _number(text: str) -> float | str:
    """Return a number; what is none is left to the connector, which ignores it and counts."""
    try:
        return float(text)
    except ValueError:
        return text


_FIELDS: dict[bytes, tuple[str, Callable[[str], Any]]] = {
    b"x-session-id": ("session_id", str),
    b"x-session-end": ("end_session", _yes),
    b"x-session-expect-s": ("expect_s", _number),
    b"x-session-pin-s": ("pin_s", _number),
    b"x-session-demote": ("demote", _yes),
}


class HintHeaders:
    """An ASGI application around another."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        asks = scope["type"] == "http" and scope.get("method") == "POST"
        hints = _hints(scope["headers"]) if asks and scope["path"].endswith(PATHS) else {}
        if not hints:
            await self._app(scope, receive, send)
            return
        received = [message async for message in _body_of(receive)]
        body = b"".join(message.get("body", b"") for message in received)
        changed = _with_hints(body, hints) if _is_whole(received) else None
        if changed is not None:
            headers = [item for item in scope["headers"] if item[0].lower() != b"content-length"]
            headers.append((b"content-length", str(len(changed)).encode()))
            scope = {**scope, "headers": headers}
            received = [{"type": "http.request", "body": changed, "more_body": False}]
        waiting = iter(received)

        async def again() -> Message:
            message = next(waiting, None)
            return message if message is not None else await receive()

        await self._app(scope, again, send)


async def _body_of(receive: Receive) -> Any:
    """Yield the messages of a body, up to its end, or until it is too long."""
    nbytes = 0
    while nbytes <= BODY_NBYTES_MAX:
        message = await receive()
        yield message
        nbytes += len(message.get("body", b""))
        if message["type"] != "http.request" or not message.get("more_body"):
            return


def _is_whole(received: list[Message]) -> bool:
    last = received[-1]
    return last["type"] == "http.request" and not last.get("more_body")


def _hints(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in headers:
        known = _FIELDS.get(name.lower())
        if known is not None:
            field, read = known
            found[field] = read(value.decode("latin-1"))
    return found


def _with_hints(body: bytes, hints: dict[str, Any]) -> bytes | None:
    """Return the body with hints, None if it cannot carry them."""
    try:
        request = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(request, dict):
        return None
    params = request.get("kv_transfer_params") or {}
    own = params.get(FIELD, {}) if isinstance(params, dict) else None
    if not isinstance(own, dict):
        return None
    request["kv_transfer_params"] = {**params, FIELD: {**hints, **own}}
    return msgspec.json.encode(request)
