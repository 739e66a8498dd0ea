"""The daemon's end of the call socket: the service's own handlers, behind the same boundary.

The kernel says which process a link is of, so a call may name only a session which that process has
joined by the arena socket.
"""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, NoReturn

import grpc

from kvstore.model.errors import Incompatible, KVStoreError, Unauthorized, Unavailable
from kvstore.rpc.status import status_of
from kvstore.server.quota import Quota
from kvstore.system.descriptors import LinkCount, LinkPool
from kvstore.transport.arena_host import CheckPeer, check_own_user
from kvstore.transport.call_wire import (
    METHODS,
    Frame,
    FrameLink,
    Kind,
    Status,
    encode_status,
)
from kvstore.transport.unix_sockets import UNIX, peer_name

Handler = Callable[[bytes, Any], Awaitable[Any]]

LINKS_MAX = 4096
LINK = "CallLink"  # where refusals are counted
BUFFERED_NBYTES_ALL = 64 << 20  # of frames half sent, and answers not read, of all links together
BUFFERED_NBYTES_FREE = 16 << 10  # of one link, which is not looked at
CALLS_MAX = 1024  # at once, of all links together


class Aborted(Exception):
    """A handler has refused its call."""

    def __init__(self, status: Status) -> None:
        self.status = status


class CallContext:
    """What a handler may ask of its call; the part of gRPC's context that ours use.

    check_session: raises Unauthorized for a session that its link may not name.
    """

    def __init__(
        self, timeout_s: float, check_session: Callable[[int], None], peer: str = UNIX
    ) -> None:
        self.check_session = check_session
        self._peer = peer
        self._deadline = time.monotonic() + timeout_s
        self._callbacks: list[Callable[[CallContext], None]] = []
        self._answered = False

    def time_remaining(self) -> float:
        return self._deadline - time.monotonic()

    def peer(self) -> str:
        return self._peer

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


def own_session_only(answer: Callable[[Any, Any], Awaitable[Any]]) -> Any:
    """Return the same handler, which refuses a session that the call's link may not name."""

    async def checked(request: Any, context: CallContext) -> Any:
        context.check_session(request.session)
        return await answer(request, context)

    return checked


class CallServer:
    """Serves one listening unix socket until `close`.

    handlers: one for each of METHODS. processes: tells the ids of a session's processes.
    refused: is told of each call that was one too many, and whose it was.
    """

    def __init__(
        self,
        listener: socket.socket,
        handlers: Sequence[Handler],
        processes: Callable[[Any], Collection[int]],
        refused: Callable[[str, KVStoreError, str], None],
        *,
        check_peer: CheckPeer | None = None,
        quota: Callable[[], Quota | None] = lambda: None,
        count: LinkCount | None = None,
    ) -> None:
        """check_peer: who is let in, if not this user alone. quota: whose turns calls wait for
        here, before they are handed over; None: for nobody's. count: of its links, where there
        are other listeners."""
        self.count = count or LinkPool(LINKS_MAX).listener()
        self.quota = quota
        self.check_peer = check_peer or check_own_user
        self._listener = listener
        self.handlers = handlers
        self.processes = processes
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
        self.count.close()

    def check_buffers(self) -> None:
        """End the links that hold most, until all together hold no more than they may."""
        held = {link: link.buffered_nbytes for link in self.links}
        total = sum(held.values())
        while total > BUFFERED_NBYTES_ALL:
            greedy = max(held, key=lambda link: held[link])
            total -= held.pop(greedy)
            error = Unavailable("the links hold too many bytes", reason="links")
            self.refused(LINK, error, greedy.peer)
            greedy.close()

    def _connected(self) -> _Link:
        return _Link(self)


class _Link(FrameLink):
    """One client."""

    def __init__(self, server: CallServer) -> None:
        super().__init__(self._take, self._end)
        self._server = server
        self.peer = UNIX
        self._pid = 0
        self._is_counted = False
        self._session: int | None = None  # the first one named, where the kernel names no process
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._turn: asyncio.Task[None] | None = None  # of a call that holds those behind it

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server.links.add(self)
        connection = transport.get_extra_info("socket")
        self.peer = peer_name(connection)
        try:
            self._pid = self._server.check_peer(connection)
            self._is_counted = self._server.count.take()
            if not self._is_counted:
                raise Unavailable("too many links", reason="links")
        except KVStoreError as error:
            self._server.refused(LINK, error, self.peer)
            self.close()
        except OSError:  # it is gone
            self.close()

    def pause_writing(self) -> None:
        self.close()  # it asks and does not read

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._check_buffers()

    def send(self, frame: Frame) -> None:
        super().send(frame)
        self._check_buffers()

    def _check_buffers(self) -> None:
        if self.buffered_nbytes > BUFFERED_NBYTES_FREE:
            self._server.check_buffers()

    def _check_session(self, session: int) -> None:
        """Raise Unauthorized for a session that this link's process has not joined.

        A process that no number names here (of another PID namespace) keeps to the first session
        that its link names.
        """
        processes = self._server.processes(session)
        if not processes:  # it is over, or nobody's: the handler says so
            return
        if self._pid not in processes or (not self._pid and self._session not in (None, session)):
            raise Unauthorized("this process has not joined the session it names: open its own")
        self._session = session

    def _take(self, frame: Frame) -> None:
        if frame.kind is not Kind.CANCEL:
            known = frame.kind is Kind.REQUEST and frame.method < len(METHODS)
            if not known or frame.id in self._calls:
                raise Incompatible("not a call")
            if not (math.isfinite(frame.timeout_s) and frame.timeout_s >= 0):
                raise Incompatible("not a time to wait")
        context = CallContext(frame.timeout_s, self._check_session, self.peer)
        quota = self._server.quota()
        if quota is None or quota.begins(_what(frame), len(frame.body)):
            self._begin(frame, context)
            return
        self.hold()
        in_turn = self._in_turn(quota, frame, context)
        self._turn = asyncio.get_running_loop().create_task(in_turn)

    async def _in_turn(self, quota: Quota, frame: Frame, context: CallContext) -> None:
        """Begin what a frame asks for when its turn has come, and go on with those behind it."""
        await quota.turn(_what(frame), len(frame.body))
        self._turn = None
        try:
            self._begin(frame, context)
            self.go_on()
        except BaseException:
            self.close()
            raise

    def _begin(self, frame: Frame, context: CallContext) -> None:
        if frame.kind is Kind.CANCEL:
            if (call := self._calls.get(frame.id)) is not None:
                call.cancel()
            return
        if METHODS[frame.method].at_once:
            self._answer_at_once(frame, context)  # a release makes room for those who wait
            return
        if self._server.calls >= CALLS_MAX:
            self._refuse(frame)
            return
        call = asyncio.get_running_loop().create_task(self._answer(frame, context))
        self._calls[frame.id] = call
        self._server.calls += 1
        call.add_done_callback(lambda _: self._ended(frame.id))

    def _ended(self, call: int) -> None:
        del self._calls[call]
        self._server.calls -= 1

    def _refuse(self, frame: Frame) -> None:
        error = Unavailable(f"{CALLS_MAX} calls are being answered", reason="busy")
        self._server.refused(METHODS[frame.method].name, error, self.peer)
        code, message, metadata = status_of(error)
        status = Status(code.value[0], message, metadata)
        self.send(Frame(Kind.ERROR, frame.id, encode_status(status)))

    def _answer_at_once(self, frame: Frame, context: CallContext) -> None:
        """Answer without a task, which would wait for a turn behind one step of every other."""
        answering = self._answer(frame, context)
        try:
            answering.send(None)
        except StopIteration:
            return
        answering.close()
        raise RuntimeError(f"{METHODS[frame.method].name} waits for something")

    async def _answer(self, frame: Frame, context: CallContext) -> None:
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
        if self._is_counted:
            self._is_counted = False
            self._server.count.give_back()
        if self._turn is not None:
            self._turn.cancel()
        for call in self._calls.values():
            call.cancel()


def _what(frame: Frame) -> str:
    """Return what a frame asks for, by which it is charged."""
    return METHODS[frame.method].name if frame.kind is Kind.REQUEST else frame.kind.name
