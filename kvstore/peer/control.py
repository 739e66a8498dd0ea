"""The control connection: frames over TCP or TLS, many requests at once. On the event loop."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Any

from kvstore.model.errors import Incompatible, InvalidRequest, KVStoreError, UnknownNamespace
from kvstore.peer.base import (
    PeerBusy,
    PeerCorrupt,
    PeerError,
    PeerGone,
    PeerIncompatible,
    PeerSlow,
)
from kvstore.peer.bulk import failed_connection
from kvstore.peer.messages import Refusal, decode_refusal
from kvstore.peer.trust import certificate_error
from kvstore.peer.wire import TIMEOUT_S_MAX, Frame, Frames, Kind

UNREAD_NBYTES_MAX = 2 << 20  # written to a peer that does not read: more than any answer
CALLS_MAX = 1024  # under way on one link, most of them waits
GRACE_S = 0.5  # longer than the other side's own deadline, so that its answer comes first
# Requests that name a namespace.
NAMING = (Kind.MATCH, Kind.ARRIVAL, Kind.CORRUPT, Kind.DELETE, Kind.GRANT)
INCOMPATIBLE = ("protocol", "fleet", "self", "node", "certificate", "tls", "bulk", "tenant")


class FrameLink(asyncio.Protocol):
    """One end of a control connection. The first thing it cannot read ends it.

    error: why it ended, for whoever waits on it.
    """

    def __init__(
        self, on_frame: Callable[[Frame], None], on_lost: Callable[[PeerError], None]
    ) -> None:
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._frames = Frames()
        self._transport: asyncio.Transport | None = None
        self._error: PeerError | None = None

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def info(self, name: str) -> Any:
        """Return what the transport knows, such as its "ssl_object"."""
        return self._transport.get_extra_info(name) if self._transport is not None else None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(UNREAD_NBYTES_MAX)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._error is None and isinstance(error, ssl.SSLError):
            self._error = certificate_error(error, "the peer")
        elif self._error is None and isinstance(error, OSError):
            self._error = failed_connection(error, "the connection to a peer")
        self._on_lost(self._error or PeerGone("the connection to a peer has ended"))

    def pause_writing(self) -> None:
        self.end(PeerSlow("a peer asks and does not read the answers"))

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._frames.feed(data):
                if not self.open:
                    return
                self._on_frame(frame)
        except Incompatible as error:
            self.end(PeerCorrupt(f"a peer sent {error}"))

    def send(self, frame: Frame) -> None:
        """Send, unless the link is gone; then `on_lost` has been, or will be, called."""
        if self.open:
            assert self._transport is not None
            self._transport.write(frame.encode())

    def finish(self) -> None:
        """Send what was written, then end."""
        if self._transport is not None:
            self._transport.close()

    def end(self, error: PeerError) -> None:
        """End at once."""
        if self._error is None:
            self._error = error
        if self._transport is not None:
            self._transport.abort()


class Calls:
    """The asking end: each request waits for its own answer. name: of the peer, for errors."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.link = FrameLink(self._take, self._lost)
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._last = 0
        self._error: PeerError | None = None
        self.on_lost: Callable[[], None] = lambda: None

    @property
    def open(self) -> bool:
        return self._error is None and self.link.open

    @property
    def error(self) -> PeerError | None:
        """Why the link has ended, None while it has not."""
        return self._error

    @property
    def idle(self) -> bool:
        return not self._waiting

    async def call(
        self, kind: Kind, body: bytes, timeout_s: float, *, told_s: float | None = None
    ) -> bytes:
        """Return the body of the answer. Raises PeerError; UnknownNamespace for a request that
        names one.

        told_s: the timeout that the peer is told, if it is a shorter one.
        """
        if not self.open:
            raise self._error or PeerGone(f"{self.name} is not connected")
        if len(self._waiting) >= CALLS_MAX:
            raise PeerBusy(f"{CALLS_MAX} requests to {self.name} are under way")
        if timeout_s <= 0:
            raise PeerSlow(f"no time left to ask {self.name}", reason="deadline")
        self._last = number = self._last + 1
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        timeout_s = min(timeout_s, TIMEOUT_S_MAX)
        self.link.send(Frame(kind, number, body, timeout_s if told_s is None else told_s))
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            message = f"{self.name} did not answer in {timeout_s:.2f} s"
            raise PeerSlow(message, reason="deadline") from None
        except UnknownNamespace as error:
            if kind in NAMING:
                raise
            raise PeerGone(f"{error}, which was not asked", reason="failed") from error
        finally:
            del self._waiting[number]
            if answer.cancelled() or not answer.done():
                self.link.send(Frame(Kind.CANCEL, number))

    def _take(self, frame: Frame) -> None:
        if frame.kind not in (Kind.REPLY, Kind.ERROR) or frame.id > self._last:
            raise Incompatible("an answer to what nobody asked")
        answer = self._waiting.get(frame.id)
        if answer is None or answer.done():
            return  # late: nobody waits for it any more
        if frame.kind == Kind.REPLY:
            answer.set_result(frame.body)
        else:
            answer.set_exception(error_of(decode_refusal(frame.body), self.name))

    def _lost(self, error: PeerError) -> None:
        self._error = error
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(type(error)(str(error), reason=error.reason))
        self.on_lost()


def error_of(refusal: Refusal, name: str) -> KVStoreError:
    """Return what to raise for an ERROR of the peer `name`."""
    reason, message = refusal.reason, f"{name}: {refusal.message or refusal.reason}"
    if reason in ("busy", "draining"):
        return PeerBusy(message, reason=reason, retry_after_s=refusal.retry_after_s)
    if reason == "namespace":
        return UnknownNamespace(message)
    if reason in INCOMPATIBLE:
        return PeerIncompatible(message, reason=reason)
    if reason in ("invalid", "unknown"):
        return PeerIncompatible(message, reason="request")
    return PeerGone(message, reason="failed")


def refusal_of(error: KVStoreError) -> Refusal:
    """Return how an error is told to a peer."""
    if isinstance(error, UnknownNamespace):
        return Refusal(reason="namespace", message="this namespace is not known here")
    if isinstance(error, (InvalidRequest, Incompatible)):
        return Refusal(reason="invalid", message=str(error))
    if isinstance(error, PeerBusy | PeerIncompatible):
        return Refusal(reason=error.reason, message=str(error), retry_after_s=error.retry_after_s)
    return Refusal(reason="failed", message=str(error))
