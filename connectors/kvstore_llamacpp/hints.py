"""Hints for the prompts of a model: what a client knows about its conversation.

    with cache.hints(session_id="chat-17", expect_s=30):
        llama.create_completion(...)

llama-cpp-python hands nothing of a request to its cache. So hints belong to the context that a
completion begins in, which its server carries from a request to the thread that answers it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import msgspec

from kvstore import InvalidRequest
from kvstore.client.request_hints import SessionHints, hints_in

logger = logging.getLogger(__name__)

NO_HINTS = SessionHints()
_CURRENT: ContextVar[SessionHints] = ContextVar("kvstore_hints", default=NO_HINTS)
_Call = Callable[..., Awaitable[None]]


def current_hints() -> SessionHints:
    """Return the hints for a completion that begins here."""
    return _CURRENT.get()


@contextmanager
def hints_for(fields: dict[str, Any]) -> Iterator[None]:
    """Give completions that begin inside these hints. Raises InvalidRequest."""
    token = _CURRENT.set(_checked(fields))
    try:
        yield
    finally:
        _CURRENT.reset(token)


class HintHeaders:
    """An ASGI application around llama-cpp-python's own: headers become hints of the completion.

    Hints that cannot be read are ignored.
    """

    def __init__(self, app: _Call) -> None:
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        fields = hints_in(scope["headers"]) if scope["type"] == "http" else {}
        try:
            hints = _checked(fields)
        except InvalidRequest as error:
            logger.info("hints=ignored reason=%r", str(error))
            hints = NO_HINTS
        _CURRENT.set(hints)  # of the task that answers this request, and of no other
        await self._app(scope, receive, send)


def _checked(fields: dict[str, Any]) -> SessionHints:
    if not fields:
        return NO_HINTS
    try:
        return msgspec.convert(fields, SessionHints)
    except msgspec.ValidationError as error:
        known = ", ".join(SessionHints.__struct_fields__)
        raise InvalidRequest(f"hints: {error}; known are {known}") from error
