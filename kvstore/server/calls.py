"""The daemon's end of the call socket: the service's own handlers, behind the same boundary."""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NoReturn

import grpc

from kvstore.errors import Incompatible, KVStoreError, Unavailable
from kvstore.rpc.status import status_of
from kvstore.transport.arena_host import check_peer
from kvstore.transport.call_wire import (
    METHODS,
    Frame,
    FrameLink,
    Kind,
    Status,
    encode_status,
)

Handler = Callable[[bytes, Any], Awaitable[Any]]

LINKS_MAX = 4096
CALLS_MAX = 1024  # at once, of all links together


class Aborted(Exception):
    """A handler has refused its call."""

    def __init__(self, status: Status) -> None:
        self.status = status


class CallContext:
    """What a handler may ask of its call; the part of gRPC's context that ours use."""

    def __init__(self, timeout_s: float) -> None:
        self._deadline = time.monotonic() + timeout_s
        self._callbacks: list[Callable[[CallContext], None]] = []
        self._answered = False

    def time_remaining(self) -> float:
        return self._deadline - time.monotonic()

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def add_done_callback(self, callback: Callable[[CallContext], None]) -> None:
        """Call back when the call is over; `done` tells whether it was answered."""
        self._callbacks.append(callback)

    def done(self) -> bool:
        return self._answered

    async def abort(
        self, code: grpc.StatusCode, message: str, metadata: tuple[tuple[str, str], ...]
    ) -> NoReturn:
        raise Aborted(Status(code.value[0], message, metadata))

    def over(self, *, answered: bool) -> None:
        self._answered = answered
        for callback in self._callbacks:
            callback(self)


class CallServer:
    """Serves one listening unix socket until `close`.

    handlers: one for each of METHODS. refused: is told of each call that was one too many.
    """

    def __init__(
        self,
        listener: socket.socket,
        handlers: Sequence[Handler],
        refused: Callable[[str, KVStoreError], None],
    ) -> None:
        self._listener = listener
        self.handlers = handlers
        self.refused = refused
        self.calls = 0
        self.links: set[_Link] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(self._connected, sock=self._listener)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for link in list(self.links):
            link.close()

    def _connected(self) -> _Link:
        return _Link(self)


class _Link(FrameLink):
    """One client."""

    def __init__(self, server: CallServer) -> None:
        super().__init__(self._take, self._end)
        self._server = server
        self._calls: dict[int, asyncio.Task[None]] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server.links.add(self)
        try:
            check_peer(transport.get_extra_info("socket"))
        except (KVStoreError, OSError):
            self.close()
        if len(self._server.links) > LINKS_MAX:
            self.close()

    def pause_writing(self) -> None:
        self.close()  # it asks and does not read

    def _take(self, frame: Frame) -> None:
        if frame.kind is Kind.CANCEL:
            if (call := self._calls.get(frame.id)) is not None:
                call.cancel()
            return
        known = frame.kind is Kind.REQUEST and frame.method < len(METHODS)
        if not known or frame.id in self._calls:
            raise Incompatible("not a call")
        if not (math.isfinite(frame.timeout_s) and frame.timeout_s >= 0):
            raise Incompatible("not a time to wait")
        if METHODS[frame.method].at_once:
            self._answer_at_once(frame)  # a release makes room for those who wait
            return
        if self._server.calls >= CALLS_MAX:
            self._refuse(frame)
            return
        call = asyncio.get_running_loop().create_task(self._answer(frame))
        self._calls[frame.id] = call
        self._server.calls += 1
        call.add_done_callback(lambda _: self._ended(frame.id))

    def _ended(self, call: int) -> None:
        del self._calls[call]
        self._server.calls -= 1

    def _refuse(self, frame: Frame) -> None:
        error = Unavailable(f"{CALLS_MAX} calls are being answered", reason="busy")
        self._server.refused(METHODS[frame.method].name, error)
        code, message, metadata = status_of(error)
        status = Status(code.value[0], message, metadata)
        self.send(Frame(Kind.ERROR, frame.id, encode_status(status)))

    def _answer_at_once(self, frame: Frame) -> None:
        """Answer without a task, which would wait for a turn behind one step of every other."""
        answering = self._answer(frame)
        try:
            answering.send(None)
        except StopIteration:
            return
        answering.close()
        raise RuntimeError(f"{METHODS[frame.method].name} waits for something")

    async def _answer(self, frame: Frame) -> None:
        context = CallContext(frame.timeout_s)
        answered = False
        try:
            reply = await self._server.handlers[frame.method](frame.body, context)
            self.send(Frame(Kind.REPLY, frame.id, reply.SerializeToString()))
            answered = True
        except Aborted as error:
            self.send(Frame(Kind.ERROR, frame.id, encode_status(error.status)))
        finally:
            context.over(answered=answered)

    def _end(self) -> None:
        self._server.links.discard(self)
        for call in self._calls.values():
            call.cancel()
