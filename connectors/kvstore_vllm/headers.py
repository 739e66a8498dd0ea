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

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from kvstore_vllm.bodies import App, Body, Header, Message, Receive, Send, object_of
from kvstore_vllm.hints import FIELD
from kvstore_vllm.salt import TenantSalt

__all__ = ["HintHeaders", "TenantSalt"]

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


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
        body = Body(scope, receive)
        await body.read()
        changed = _with_hints(body.data, hints) if body.whole else None
        if changed is not None:
            body.replace(changed)
        await body.pass_on(self._app, send)


def _hints(headers: Iterable[Header]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in headers:
        known = _FIELDS.get(name.lower())
        if known is not None:
            field, read = known
            found[field] = read(value.decode("latin-1"))
    return found


def _with_hints(body: bytes, hints: dict[str, Any]) -> bytes | None:
    """Return the body with hints, None if it cannot carry them."""
    request = object_of(body)
    if request is None:
        return None
    params = request.get("kv_transfer_params") or {}
    own = params.get(FIELD, {}) if isinstance(params, dict) else None
    if not isinstance(own, dict):
        return None
    request["kv_transfer_params"] = {**params, FIELD: {**hints, **own}}
    return msgspec.json.encode(request)
