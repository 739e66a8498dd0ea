"""Hints that come with a request to an engine, and how they reach the daemon.

Those about a session are sent when its request has finished, with the keys of all its full blocks.
What is saved after that counts, too, because the daemon knows whose blocks they are.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Annotated, Any, Literal

import msgspec

from kvstore.client.async_client import AsyncClient
from kvstore.client.blocking import Client
from kvstore.model.block import BlockKey, Namespace
from kvstore.model.errors import InvalidRequest
from kvstore.model.hint import HintReport, Prefix

logger = logging.getLogger(__name__)

SENT_MAX = 64  # at once; the daemon can do without the others
Seconds = Annotated[float, msgspec.Meta(ge=0, le=7 * 86400)]
Give = Callable[[AsyncClient, str | Prefix], Awaitable[HintReport]]
Note = Callable[[Literal["sent", "failed"]], None]


class SessionHints(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a request says about its conversation.

    session_id: the client's name of the conversation. end_session: this was its last request.
    expect_s: seconds until the next request. pin_s: seconds to keep its blocks in DRAM, up to
    pin_bytes (0: no limit). demote: demote them to the file tier now.
    """

    session_id: Annotated[str, msgspec.Meta(max_length=256)] = ""
    end_session: bool = False
    expect_s: Seconds | None = None
    pin_s: Seconds | None = None
    pin_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)] = 0
    demote: bool = False

    def gifts(self) -> Iterator[Give]:
        """Yield what to tell the daemon."""
        if self.end_session:
            yield lambda client, target: client.hints.end_session(target)
        if self.expect_s is not None:
            in_s = self.expect_s
            yield lambda client, target: client.hints.expect(target, in_s)
        if self.pin_s is not None:
            ttl_s, nbytes = self.pin_s, self.pin_bytes
            yield lambda client, target: client.hints.pin(target, ttl_s, bytes_max=nbytes)
        if self.demote:
            yield lambda client, target: client.hints.demote(target)


class HintSender:
    """Sends the hints of finished requests. Never blocks; one thread owns it."""

    def __init__(self, client: Client, note: Note) -> None:
        """note: is told of each hint that is sent, and of each that did not reach the daemon or was
        refused; from any thread."""
        self._client = client
        self._note = note
        self._sent: set[Future[HintReport]] = set()

    def send(self, hints: SessionHints, namespace: Namespace, keys: Sequence[BlockKey]) -> None:
        """Tell the daemon what a request said about its session."""
        if not (keys or hints.session_id):
            return
        for give in hints.gifts():
            self._sent = {sent for sent in self._sent if not sent.done()}
            if len(self._sent) >= SENT_MAX or not self._client.available:
                self._note("failed")
                continue
            self._sent.add(self._start(give, hints.session_id, namespace, keys))
            self._note("sent")

    def _start(
        self, give: Give, session_id: str, namespace: Namespace, keys: Sequence[BlockKey]
    ) -> Future[HintReport]:
        async def tell(remote: AsyncClient) -> HintReport:
            namespace_id = await remote.register(namespace, now=False)
            await remote.connect()
            most = remote.batch_keys_max  # of one hint
            return await give(remote, Prefix(namespace_id, keys[:most], session_id))

        sent = self._client.submit(tell)
        sent.add_done_callback(self._look)
        return sent

    def _look(self, sent: Future[HintReport]) -> None:
        error = None if sent.cancelled() else sent.exception()
        if error is None:
            return
        self._note("failed")
        if isinstance(error, InvalidRequest):
            logger.warning("hint=refused error=%r", error)


def _yes(text: str) -> bool:
    return text.strip().lower() in ("1", "true", "yes")


def _number(text: str) -> float | str:
    """Return a number; what is none is left to whoever checks the fields."""
    try:
        return float(text)
    except ValueError:
        return text


HEADERS: dict[bytes, tuple[str, Callable[[str], Any]]] = {
    b"x-session-id": ("session_id", str),
    b"x-session-end": ("end_session", _yes),
    b"x-session-expect-s": ("expect_s", _number),
    b"x-session-pin-s": ("pin_s", _number),
    b"x-session-demote": ("demote", _yes),
}


def hints_in(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, Any]:
    """Return the fields of hints that HTTP headers carry, unchecked.

    | header | field |
    | --- | --- |
    | X-Session-ID | session_id |
    | X-Session-End: true | end_session |
    | X-Session-Expect-S: 30 | expect_s |
    | X-Session-Pin-S: 600 | pin_s |
    | X-Session-Demote: true | demote |
    """
    found: dict[str, Any] = {}
    for name, value in headers:
        known = HEADERS.get(name.lower())
        if known is not None:
            field, read = known
            found[field] = read(value.decode("latin-1"))
    return found
