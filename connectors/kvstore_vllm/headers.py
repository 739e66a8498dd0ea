"""HTTP headers -> the hints of a request, for gateways and clients that cannot change its body.

vLLM hands no headers to connectors, but it does let a server wrap its application:

    vllm serve MODEL --middleware kvstore_vllm.headers.HintHeaders ...

The headers, and the fields of `kv_transfer_params.kvstore` that they become, are those of
`kvstore.client.request_hints.hints_in`. What the body says itself wins. A request without one of
them is passed on untouched, and so is one whose body is no JSON object, or is too long.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvstore.client.request_hints import hints_in
from kvstore_vllm.bodies import App, Body, Message, Receive, Send, object_of
from kvstore_vllm.hints import FIELD
from kvstore_vllm.salt import TenantSalt

__all__ = ["HintHeaders", "TenantSalt"]

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


class HintHeaders:
    """An ASGI application around another."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        asks = scope["type"] == "http" and scope.get("method") == "POST"
        hints = hints_in(scope["headers"]) if asks and scope["path"].endswith(PATHS) else {}
        if not hints:
            await self._app(scope, receive, send)
            return
        body = Body(scope, receive)
        await body.read()
        changed = _with_hints(body.data, hints) if body.whole else None
        if changed is not None:
            body.replace(changed)
        await body.pass_on(self._app, send)


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
