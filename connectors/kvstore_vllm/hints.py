"""Hints that come with a request, and how they reach the daemon.

A request carries them in `kv_transfer_params`, under a name of their own, because other connectors
read the same dictionary:

    {"kvstore": {"session_id": "chat-17", "expect_s": 30}}

Those about its session are sent when the request has finished, with the keys of all its full
blocks. What its workers save after that counts, too, because the daemon knows whose blocks they
are. vLLM shows connectors no HTTP headers: `headers.py` turns those into the same fields.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Annotated, Any, Literal

import msgspec

from kvstore import AsyncClient, BlockKey, Client, HintReport, InvalidRequest, Namespace, Prefix
from kvstore.client.session import registered
from kvstore.model.member import SOURCE_CHARS_MAX
from kvstore_vllm.counters import Counters
from kvstore_vllm.lookup import KEYS_MAX

logger = logging.getLogger(__name__)

FIELD = "kvstore"
SENT_MAX = 64  # at once; the daemon can do without the others
Seconds = Annotated[float, msgspec.Meta(ge=0, le=7 * 86400)]
Give = Callable[[AsyncClient, str | Prefix], Awaitable[HintReport]]


class RequestHints(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The hints of a request about its session, and what it wants itself.

    session_id: the client's name of the conversation. end_session: this was its last request.
    expect_s: seconds until the next request. pin_s: seconds to keep its blocks in DRAM, up to
    pin_bytes (0: no limit). demote: demote them to the file tier now.
    fidelity: "fine": lossy blocks are loaded with their fine parts, or not at all; "base": with
    those that are there.
    source, blocks: who has the prefix, and how long it will be there: see `handoff.py`.
    """

    session_id: Annotated[str, msgspec.Meta(max_length=256)] = ""
    end_session: bool = False
    expect_s: Seconds | None = None
    pin_s: Seconds | None = None
    pin_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)] = 0
    demote: bool = False
    fidelity: Literal["base", "fine"] = "base"
    source: Annotated[str, msgspec.Meta(max_length=SOURCE_CHARS_MAX)] = ""
    blocks: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)] = 0

    @property
    def refined(self) -> bool:
        """Whether the request insists on fine parts."""
        return self.fidelity == "fine"

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


NO_HINTS = RequestHints()


def read_hints(kv_transfer_params: Any, counters: Counters) -> RequestHints:
    """Return a request's hints. Those that cannot be read are counted, and are none."""
    if not isinstance(kv_transfer_params, dict) or FIELD not in kv_transfer_params:
        return NO_HINTS
    try:
        return msgspec.convert(kv_transfer_params[FIELD], RequestHints)
    except (msgspec.ValidationError, RecursionError) as error:
        logger.debug("hints=ignored reason=%r", str(error))
        counters.add(hints_ignored=1)
        return NO_HINTS


class HintSender:
    """Sends the hints of finished requests. Never blocks; the scheduler's thread owns it."""

    def __init__(self, client: Client, counters: Counters) -> None:
        self._client = client
        self._counters = counters
        self._sent: set[Future[HintReport]] = set()

    def send(self, hints: RequestHints, namespace: Namespace, keys: Sequence[BlockKey]) -> None:
        """Tell the daemon what a request said about its session."""
        if not (keys or hints.session_id):
            return
        for give in hints.gifts():
            self._sent = {sent for sent in self._sent if not sent.done()}
            if len(self._sent) >= SENT_MAX or not self._client.available:
                self._counters.add(hints_failed=1)
                continue
            self._sent.add(self._start(give, hints.session_id, namespace, keys[:KEYS_MAX]))
            self._counters.add(hints=1)

    def _start(
        self, give: Give, session_id: str, namespace: Namespace, keys: Sequence[BlockKey]
    ) -> Future[HintReport]:
        async def tell(remote: AsyncClient) -> HintReport:
            namespace_id = await registered(remote, namespace)
            return await give(remote, Prefix(namespace_id, keys, session_id))

        sent = self._client.submit(tell)
        sent.add_done_callback(self._note)
        return sent

    def _note(self, sent: Future[HintReport]) -> None:
        error = None if sent.cancelled() else sent.exception()
        if error is None:
            return
        self._counters.add(hints_failed=1)
        if isinstance(error, InvalidRequest):
            logger.warning("hint=refused error=%r", error)
