"""The one place where errors become statuses, calls are timed, and a drain waits for them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
)
from typing import Any, NamedTuple, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from kvstore.metrics import Metrics
from kvstore.model.errors import InvalidRequest, KVStoreError, Unauthorized, Unavailable
from kvstore.model.tenant import Principal, Role
from kvstore.rpc.status import status_of
from kvstore.server import rights
from kvstore.server.audit import AuditLog
from kvstore.server.audited import audited, peer_of_call
from kvstore.server.identity import CALLER, Admitted, Fixed, Identity
from kvstore.server.quota import Quota, check_nbytes
from kvstore.server.revocation import Revocation
from kvstore.server.tracing import Tracing, fail

logger = logging.getLogger(__name__)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_Answer: TypeAlias = Callable[[bytes, Any], Awaitable[Any]]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class _Call(NamedTuple):
    """One call being answered; `span` if calls are traced."""

    method: str
    started: float
    span: Any
    context: Any


class _Calls:
    """Counts, times and traces calls, tells their errors as statuses, and waits for their end."""

    def __init__(self, metrics: Metrics, tracing: Tracing | None, audit: AuditLog | None) -> None:
        self._audit = audit
        self._metrics = metrics
        self._tracing = tracing
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self.quota: Quota | None = None  # of the listener's only tenant, among several
        self._nobody: Principal | None = None  # of this listener, where it is one tenant's

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new calls and wait for those that run. Returns whether all ended in time."""
        self._draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def answering(
        self, method: str, work: Callable[[Any, Any], Awaitable[Any]], *, in_turn: bool = False
    ) -> _Answer:
        """Return `work` as one call: counted, timed, its errors told as statuses. in_turn: whoever
        hands it over has waited for its turn."""

        async def answer(data: Any, context: Context) -> Any:
            call = self._begin(method, context)
            try:
                self._admit()
                if (quota := self.quota) is None:
                    return await work(data, context)
                if in_turn:
                    with quota.place(method):
                        return await work(data, context)
                return await quota.answered(method, data, work, context)
            except Exception as error:
                failure = self._translate(call, error)
            finally:
                self._end(call)
            return await _abort(context, failure)

        return answer

    def streaming(self, method: str, work: Callable[[Any, Any], AsyncGenerator[Any, None]]) -> Any:
        """Return the same for a call with several replies."""

        async def answer(data: Any, context: Context) -> AsyncIterator[Any]:
            call = self._begin(method, context)
            try:
                self._admit()
                with _placed(self.quota, method):
                    async with contextlib.aclosing(work(data, context)) as replies:
                        async for reply in replies:
                            yield reply
                return
            except Exception as error:
                failure = self._translate(call, error)
            finally:
                self._end(call)
            await _abort(context, failure)

        return answer

    def _admit(self) -> None:
        if self._draining:
            raise Unavailable("the daemon is shutting down", reason="draining")

    def _begin(self, method: str, context: Context) -> _Call:
        self._running += 1
        self._metrics.rpcs_running.inc()
        self._idle.clear()
        span = None
        if self._tracing is not None:
            span = self._tracing.start(method, context.invocation_metadata())
        return _Call(method, time.perf_counter(), span, context)

    def _end(self, call: _Call) -> None:
        seconds = time.perf_counter() - call.started
        self._metrics.rpc_seconds.labels(call.method).observe(seconds)
        if call.span is not None:
            call.span.end()
        self._metrics.rpcs_running.dec()
        self._running -= 1
        if not self._running:
            self._idle.set()

    def refused(self, method: str, error: Exception, peer: str) -> None:
        """Count a call that is not answered, and note it if it was not allowed. peer: whose."""
        reason = error.reason if isinstance(error, Unavailable | Unauthorized) else ""
        self._metrics.rpc_errors.labels(method, type(error).__name__, reason).inc()
        if self._audit is not None and isinstance(error, Unauthorized):
            principal = CALLER.get(self._nobody)
            self._audit.refused(method, principal, peer, reason, str(error))

    def _translate(self, call: _Call, error: Exception) -> KVStoreError:
        """Return what the client is told. A bug here must not look like the client's mistake."""
        self.refused(call.method, error, peer_of_call(call.context))
        if call.span is not None:
            fail(call.span, error)
        if isinstance(error, KVStoreError):
            return error
        logger.error("rpc=%s error=unexpected", call.method, exc_info=error)
        return Unavailable(f"the daemon failed: {type(error).__name__}; its log says more")


class Boundary(_Calls, grpc.aio.ServerInterceptor):
    """Around every kvstore method of one listener: lets its calls in, or not, and hands them to
    their tenant's service. Health checks pass by it.

    A message is read only when its caller was let in.
    """

    def __init__(
        self,
        metrics: Metrics,
        tracing: Tracing | None = None,
        *,
        identity: Identity,
        service_of: Callable[[Principal], Any] | None = None,
        quota_of: Callable[[Principal], Quota | None] | None = None,
        audit: AuditLog | None = None,
    ) -> None:
        """identity: who calls. service_of: the service that answers a caller; raises Unauthorized
        for one whose tenant is not here. None: the service that the gRPC server has. quota_of: the
        bound of a caller's tenant, where calls of several come to one listener."""
        super().__init__(metrics, tracing, audit)
        self.revocation = Revocation()
        self._identity = identity
        if isinstance(identity, Fixed):
            self._nobody = identity.principal._replace(name="", role=Role.READER)
        self._service_of = service_of
        self._quota_of = quota_of
        self._wrapped: dict[str, Handler] = {}

    def unary(self, method: str, behaviour: Any, deserialize: Callable[[bytes], Any]) -> _Answer:
        """Return what answers a call that comes another way: from its bytes to its reply.

        Only for a listener that is one principal's own: its right is looked up once, here. Refusals
        go to `abort` of the context, which has to raise. The caller waits for the turn of `quota`.
        """
        read = _reader(deserialize)
        try:
            rights.check(method, self._identity.admit(None).principal)
        except Unauthorized as refused:
            return self.answering(method, _refusing(refused), in_turn=True)
        return self.answering(
            method, lambda data, context: behaviour(read(data), context), in_turn=True
        )

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        name = handler_call_details.method
        if not name.startswith("/kvstore."):
            return await continuation(handler_call_details)
        if name not in self._wrapped:
            handler = await continuation(handler_call_details)
            if handler is None:  # gRPC answers UNIMPLEMENTED
                return handler
            self._wrapped[name] = self._wrap(name.rpartition("/")[2], handler)
        return self._wrapped[name]

    def _wrap(self, method: str, handler: Handler) -> Handler:
        assert handler.request_deserializer is not None  # protobuf's, always
        read, write = _reader(handler.request_deserializer), handler.response_serializer
        if handler.response_streaming:
            work = self._streamed(method, handler.unary_stream, read)
            return grpc.unary_stream_rpc_method_handler(self.streaming(method, work), None, write)
        if handler.request_streaming:
            work = self._single(method, handler.stream_unary, _each_reader(read))
            return grpc.stream_unary_rpc_method_handler(self.answering(method, work), None, write)
        work = self._single(method, handler.unary_unary, read)
        return grpc.unary_unary_rpc_method_handler(self.answering(method, work), None, write)

    def _single(self, method: str, behaviour: Any, read: Callable[[Any], Any]) -> Any:
        async def work(data: Any, context: Context) -> Any:
            admitted, request = self._let_in(method, data, context, read)
            answer, still_valid = self._behaviour(method, behaviour, admitted)

            async def answered(_: Any, context: Context) -> Any:
                if still_valid is None:
                    return await answer(request, context)
                with self.revocation.watched(still_valid):
                    return await answer(request, context)

            if (quota := self._quota(admitted)) is None:
                return await answered(data, context)
            return await quota.answered(method, data, answered, context)

        return work

    def _streamed(self, method: str, behaviour: Any, read: Callable[[Any], Any]) -> Any:
        async def work(data: Any, context: Context) -> AsyncGenerator[Any, None]:
            admitted, request = self._let_in(method, data, context, read)
            answer, still_valid = self._behaviour(method, behaviour, admitted)
            with _placed(self._quota(admitted), method):
                async with contextlib.aclosing(answer(request, context)) as replies:
                    if still_valid is None:
                        async for reply in replies:
                            yield reply
                        return
                    with self.revocation.watched(still_valid) as running:
                        async for reply in replies:
                            running.sending = True
                            yield reply
                            running.sending = False
                            running.check()

        return work

    def _quota(self, admitted: Admitted) -> Quota | None:
        """Return the bound of a caller's tenant, where calls of several come to this listener."""
        return self._quota_of(admitted.principal) if self._quota_of is not None else None

    def _let_in(
        self, method: str, data: Any, context: Context, read: Callable[[Any], Any]
    ) -> tuple[Admitted, Any]:
        """Return who calls, and the request. Raises Unauthorized and InvalidRequest."""
        admitted = self._identity.admit(context)
        CALLER.set(admitted.principal)
        rights.check(method, admitted.principal)
        check_nbytes(method, data)
        request = read(data)
        rights.check_request(method, admitted.principal, request)
        return admitted, request

    def _behaviour(
        self, method: str, usual: Any, admitted: Admitted
    ) -> tuple[Any, Callable[[], bool] | None]:
        """Return what answers the call, and for how long it may. Raises Unauthorized."""
        principal, still_valid = admitted
        if (service_of := self._service_of) is not None:
            service = service_of(principal)
            usual = getattr(service, method)
            if still_valid is not None:
                still_valid = _while_served(still_valid, lambda: service_of(principal) is service)
        return (usual if self._audit is None else audited(method, usual, self._audit)), still_valid


def _placed(quota: Quota | None, method: str) -> contextlib.AbstractContextManager[None]:
    """Return a context for a call with several replies: they take turns by themselves."""
    return quota.place(method) if quota is not None else contextlib.nullcontext()


def _while_served(
    still_valid: Callable[[], bool], is_served: Callable[[], bool]
) -> Callable[[], bool]:
    """Return whether a credential is valid, and its tenant still there."""

    def check() -> bool:
        try:
            return still_valid() and is_served()
        except Unauthorized:
            return False

    return check


def _reader(deserialize: Callable[[bytes], Any]) -> Callable[[Any], Any]:
    """Return a deserializer whose errors are ours: gRPC would log them and answer UNKNOWN."""

    def read(data: Any) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            raise InvalidRequest("these bytes are no message of this method") from error

    return read


def _each_reader(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    async def messages(several: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for data in several:
            yield read(data)

    return messages


def _refusing(error: Unauthorized) -> Callable[[Any, Any], Awaitable[Any]]:
    async def refuse(data: Any, context: Any) -> Any:
        raise error

    return refuse


async def _abort(context: Context, error: KVStoreError) -> None:
    code, message, metadata = status_of(error)
    await context.abort(code, message, metadata)
