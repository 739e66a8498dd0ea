"""The one place where errors become statuses, calls are timed, and a drain waits for them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import grpc
import grpc.aio

from kvstore.errors import KVStoreError, Unavailable
from kvstore.obs import Metrics
from kvstore.rpc.status import status_of

logger = logging.getLogger(__name__)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class Boundary(grpc.aio.ServerInterceptor):
    """Wraps every kvstore method; health checks pass through."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
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

    def _wrap(self, method: str, handler: Handler) -> Handler:
        codecs = (handler.request_deserializer, handler.response_serializer)
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                self._streamed(method, handler.unary_stream), *codecs
            )
        if handler.request_streaming:
            return grpc.stream_unary_rpc_method_handler(
                self._single(method, handler.stream_unary), *codecs
            )
        return grpc.unary_unary_rpc_method_handler(
            self._single(method, handler.unary_unary), *codecs
        )

    def _single(self, method: str, behaviour: Any) -> Any:
        async def answer(request: Any, context: Context) -> Any:
            started = self._begin()
            try:
                self._admit()
                return await behaviour(request, context)
            except Exception as error:
                failure = self._translate(method, error)
            finally:
                self._end(method, started)
            return await _abort(context, failure)

        return answer

    def _streamed(self, method: str, behaviour: Any) -> Any:
        async def answer(request: Any, context: Context) -> AsyncIterator[Any]:
            started = self._begin()
            try:
                self._admit()
                async for reply in behaviour(request, context):
                    yield reply
                return
            except Exception as error:
                failure = self._translate(method, error)
            finally:
                self._end(method, started)
            await _abort(context, failure)

        return answer

    def _admit(self) -> None:
        if self._draining:
            raise Unavailable("the daemon is shutting down", retry_after_s=1.0)

    def _begin(self) -> float:
        self._running += 1
        self._metrics.rpcs_running.inc()
        self._idle.clear()
        return time.perf_counter()

    def _end(self, method: str, started: float) -> None:
        self._metrics.rpc_seconds.labels(method).observe(time.perf_counter() - started)
        self._metrics.rpcs_running.dec()
        self._running -= 1
        if not self._running:
            self._idle.set()

    def _translate(self, method: str, error: Exception) -> KVStoreError:
        """Return what the client is told. A bug here must not look like the client's mistake."""
        self._metrics.rpc_errors.labels(method, type(error).__name__).inc()
        if isinstance(error, KVStoreError):
            return error
        logger.error("rpc=%s error=unexpected", method, exc_info=error)
        return Unavailable(f"the daemon failed: {type(error).__name__}; its log says more")


async def _abort(context: Context, error: KVStoreError) -> None:
    code, message, metadata = status_of(error)
    await context.abort(code, message, metadata)
