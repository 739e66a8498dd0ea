"""The one place where errors become statuses, calls are timed, and a drain waits for them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from kvstore.metrics import Metrics
from kvstore.model.errors import InvalidRequest, KVStoreError, Unavailable
from kvstore.rpc.status import status_of
from kvstore.server.tracing import Tracing, fail

logger = logging.getLogger(__name__)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_UNREADABLE = object()


class _Call(NamedTuple):
    """One call being answered; `span` if calls are traced."""

    method: str
    started: float
    span: Any


class Boundary(grpc.aio.ServerInterceptor):
    """Wraps every kvstore method; health checks pass through."""

    def __init__(self, metrics: Metrics, tracing: Tracing | None = None) -> None:
        self._metrics = metrics
        self._tracing = tracing
        self._wrapped: dict[str, Handler] = {}
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new calls and wait for those that run. Returns whether all ended in time."""
        self._draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

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

    def unary(
        self, method: str, behaviour: Any, deserialize: Callable[[bytes], Any]
    ) -> Callable[[bytes, Any], Awaitable[Any]]:
        """Return the same for a call that comes another way: from its bytes to its reply.

        Refusals go to `abort` of the context, which has to raise.
        """
        answer, read = self._single(method, behaviour), _reader(deserialize)
        return lambda data, context: answer(read(data), context)

    def _wrap(self, method: str, handler: Handler) -> Handler:
        assert handler.request_deserializer is not None  # protobuf's, always
        codecs = (_reader(handler.request_deserializer), handler.response_serializer)
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                self._streamed(method, handler.unary_stream), *codecs
            )
        if handler.request_streaming:
            return grpc.stream_unary_rpc_method_handler(
                self._single(method, _each_readable(handler.stream_unary)), *codecs
            )
        return grpc.unary_unary_rpc_method_handler(
            self._single(method, handler.unary_unary), *codecs
        )

    def _single(self, method: str, behaviour: Any) -> Any:
        async def answer(request: Any, context: Context) -> Any:
            call = self._begin(method, context)
            try:
                self._admit()
                return await behaviour(_readable(request), context)
            except Exception as error:
                failure = self._translate(call, error)
            finally:
                self._end(call)
            return await _abort(context, failure)

        return answer

    def _streamed(self, method: str, behaviour: Any) -> Any:
        async def answer(request: Any, context: Context) -> AsyncIterator[Any]:
            call = self._begin(method, context)
            try:
                self._admit()
                async for reply in behaviour(_readable(request), context):
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
        return _Call(method, time.perf_counter(), span)

    def _end(self, call: _Call) -> None:
        seconds = time.perf_counter() - call.started
        self._metrics.rpc_seconds.labels(call.method).observe(seconds)
        if call.span is not None:
            call.span.end()
        self._metrics.rpcs_running.dec()
        self._running -= 1
        if not self._running:
            self._idle.set()

    def refused(self, method: str, error: Exception) -> None:
        """Count a call that is not answered."""
        reason = error.reason if isinstance(error, Unavailable) else ""
        self._metrics.rpc_errors.labels(method, type(error).__name__, reason).inc()

    def _translate(self, call: _Call, error: Exception) -> KVStoreError:
        """Return what the client is told. A bug here must not look like the client's mistake."""
        self.refused(call.method, error)
        if call.span is not None:
            fail(call.span, error)
        if isinstance(error, KVStoreError):
            return error
        logger.error("rpc=%s error=unexpected", call.method, exc_info=error)
        return Unavailable(f"the daemon failed: {type(error).__name__}; its log says more")


def _reader(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Return a deserializer that does not raise: gRPC would log it and answer UNKNOWN."""

    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return _UNREADABLE

    return read


def _readable(request: Any) -> Any:
    if request is _UNREADABLE:
        raise InvalidRequest("these bytes are no message of this method")
    return request


def _each_readable(behaviour: Any) -> Any:
    async def readable(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for request in requests:
            yield _readable(request)

    return lambda requests, context: behaviour(readable(requests), context)


async def _abort(context: Context, error: KVStoreError) -> None:
    code, message, metadata = status_of(error)
    await context.abort(code, message, metadata)
