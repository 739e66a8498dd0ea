"""The client's end of the call socket: has the interface of gRPC's stub, and falls back to it.

Errors are gRPC's, so that callers need not know which way a call went.
"""

from __future__ import annotations

import asyncio
import itertools
from functools import partial
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from kvstore.client.trust import check_daemon
from kvstore.model.errors import Incompatible, Unavailable
from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.transport.call_wire import METHODS, Frame, FrameLink, Kind, decode_status

_CODES = {code.value[0]: code for code in grpc.StatusCode}
_RELEASE = next(i for i, method in enumerate(METHODS) if method.name == "Release")
RELEASE_TIMEOUT_S = 10.0
ABANDONED_MAX = 1024


class CallStub:
    """The calls of METHODS over a socket; every other one is the gRPC stub's."""

    def __init__(self, fallback: Any) -> None:
        self._fallback = fallback
        self._link = FrameLink(self._take, self._lost)
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Frame]] = {}
        self._early: dict[int, Frame] = {}  # answers to callers that are cancelled in this turn
        self._abandoned: dict[int, Any] = {}  # calls that no caller waits for, and their requests
        for number, method in enumerate(METHODS):
            setattr(self, method.name, partial(self._call, number))

    @classmethod
    async def connect(cls, path: str, fallback: Any, daemon_uid: int | None = None) -> CallStub:
        """Connect to the daemon's call socket. Raises OSError, Unauthorized if it is another
        user's."""
        stub = cls(fallback)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_unix_connection(lambda: stub._link, path)
        try:
            check_daemon(transport.get_extra_info("socket"), path, daemon_uid)
        except BaseException:
            transport.abort()
            raise
        return stub

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fallback, name)

    def close(self) -> None:
        self._link.close()

    async def _call(
        self,
        number: int,
        request: Any,
        *,
        timeout: float,  # noqa: ASYNC109 - as gRPC's stubs have it
    ) -> Any:
        """Make one call. Raises AioRpcError; Unavailable if the daemon does not read; Incompatible
        for an invalid answer.

        If cancelled or late, it tells the daemon, and releases a lease that was granted.
        """
        if not self._link.open:
            raise _error(grpc.StatusCode.UNAVAILABLE, "the daemon closed the call socket")
        if self._link.clogged:
            raise Unavailable("the daemon does not take calls as fast as they are made")
        call = next(self._ids)
        answer = self._waiting[call] = asyncio.get_running_loop().create_future()
        self._link.send(Frame(Kind.REQUEST, call, request.SerializeToString(), number, timeout))
        taken = False
        try:
            async with asyncio.timeout(timeout):
                frame = await answer
                taken = True
        except TimeoutError:
            raise _error(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer in time") from None
        finally:
            del self._waiting[call]
            if (early := self._early.pop(call, None)) is not None:
                self._give_back(request, early)
            elif answer.cancelled():
                self._abandon(call, request)
            elif not taken and answer.exception() is None:
                self._give_back(request, answer.result())  # cancelled after it had come
        if frame.kind is Kind.ERROR:
            status = decode_status(frame.body)
            code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
            raise _error(code, status.message, status.metadata)
        try:
            return METHODS[number].reply.FromString(frame.body)
        except DecodeError as error:
            raise Incompatible("the daemon answered with something else") from error

    def _take(self, frame: Frame) -> None:
        if frame.kind not in (Kind.REPLY, Kind.ERROR):
            raise Incompatible("a daemon only answers")
        answer = self._waiting.get(frame.id)
        if answer is not None and answer.cancelled():
            self._early[frame.id] = frame  # the task that waited has yet to run
        elif answer is not None and not answer.done():
            answer.set_result(frame)
        elif (request := self._abandoned.pop(frame.id, None)) is not None:
            self._give_back(request, frame)

    def _abandon(self, call: int, request: Any) -> None:
        self._link.send(Frame(Kind.CANCEL, call))
        if _is_for_lease(request):
            self._abandoned[call] = request
            if len(self._abandoned) > ABANDONED_MAX:
                del self._abandoned[next(iter(self._abandoned))]

    def _give_back(self, request: Any, frame: Frame) -> None:
        """Release a lease that was granted just before the daemon received the cancellation."""
        if not _is_for_lease(request) or frame.kind is not Kind.REPLY:
            return
        try:
            lease = pb.GrantReply.FromString(frame.body).lease
        except DecodeError as error:
            raise Incompatible("the daemon answered with something else") from error
        leases = [lease] * max(1, getattr(request, "readers", 1))
        body = pb.ReleaseRequest(session=request.session, leases=leases).SerializeToString()
        self._link.send(Frame(Kind.REQUEST, next(self._ids), body, _RELEASE, RELEASE_TIMEOUT_S))

    def _lost(self) -> None:
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(_error(grpc.StatusCode.UNAVAILABLE, "the daemon is gone"))


def _is_for_lease(request: Any) -> bool:
    return isinstance(request, (pb.AcquireRequest, pb.ReserveRequest))


def _error(
    code: grpc.StatusCode, details: str, metadata: tuple[tuple[str, str], ...] = ()
) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*metadata), details)
