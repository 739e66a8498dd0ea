"""Calls to etcd, each with a deadline. A channel per endpoint: where one does not answer, the next.

One channel over all endpoints is no way: when the leader of three stops without closing its
connections, gRPC's `pick_first` never answers again, and `round_robin` fails every third call.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import grpc
import grpc.aio

from kvstore.membership.etcd_access import Access, refusal_of
from kvstore.model.errors import ConfigError, KVStoreError, Unavailable
from kvstore.rpc.etcd import etcd_pb2 as pb

ATTEMPT_S = 0.5  # for one endpoint of several; an election among three takes 1 to 2 s
RECONNECT_S = 1.0  # for calls under way, when certificates change
ROUND_PAUSE_S = 0.1  # once all endpoints have refused at once
RECEIVED_NBYTES_MAX = 16 << 20  # of MEMBERS_MAX members: 500 bytes each are usual
OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 10000),  # etcd allows one in 5 s, and none without a call
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.max_receive_message_length", RECEIVED_NBYTES_MAX),
)

Reply = TypeVar("Reply")
Metadata: TypeAlias = "tuple[tuple[str, str], ...]"
Attempt: TypeAlias = "Callable[[grpc.aio.Channel, float, Metadata], Awaitable[Reply]]"


class Grant(NamedTuple):
    """A lease, and the seconds that etcd gives it."""

    lease: int
    ttl_s: float


class EtcdCalls:
    """The calls that membership makes. endpoints: http:// or https:// URLs.

    Every call raises Unavailable if no endpoint answers in time, and ConfigError, which names the
    setting, if etcd refuses what the settings say. failed: calls ever that nobody answered.
    """

    def __init__(self, endpoints: Sequence[str], access: Access) -> None:
        self.failed = 0
        self._endpoints = tuple(endpoints)
        self._access = access
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._at = 0
        self._token = ""  # of a user, once etcd has given one

    @property
    def endpoint(self) -> str:
        """The endpoint that is asked first."""
        return self._endpoints[self._at]

    async def close(self) -> None:
        """Close the connections. The next call makes new ones."""
        channels, self._channels = list(self._channels.values()), {}
        await asyncio.gather(*(channel.close() for channel in channels))

    async def list(
        self, begin: bytes, end: bytes, *, limit: int, timeout_s: float
    ) -> pb.RangeResponse:
        """Return the keys from `begin` to before `end`, at most `limit`."""
        request = pb.RangeRequest(key=begin, range_end=end, limit=limit)
        return await self.range(request, timeout_s=timeout_s)

    async def range(self, request: pb.RangeRequest, *, timeout_s: float) -> pb.RangeResponse:
        return await self._unary("KV/Range", request, pb.RangeResponse, timeout_s)

    async def txn(self, request: pb.TxnRequest, *, timeout_s: float) -> pb.TxnResponse:
        return await self._unary("KV/Txn", request, pb.TxnResponse, timeout_s)

    async def grant(self, ttl_s: int, *, timeout_s: float) -> Grant:
        request = pb.LeaseGrantRequest(TTL=ttl_s)
        reply = await self._unary("Lease/LeaseGrant", request, pb.LeaseGrantResponse, timeout_s)
        return Grant(reply.ID, float(max(1, reply.TTL)))

    async def revoke(self, lease: int, *, timeout_s: float) -> None:
        request = pb.LeaseRevokeRequest(ID=lease)
        await self._unary("Lease/LeaseRevoke", request, pb.LeaseRevokeResponse, timeout_s)

    async def renew(self, lease: int, *, timeout_s: float) -> bool:
        """Renew a lease. False: etcd does not know it (any more)."""
        request = pb.LeaseKeepAliveRequest(ID=lease)

        async def attempt(channel: grpc.aio.Channel, left_s: float, metadata: Metadata) -> bool:
            call = _stream(channel, "Lease/LeaseKeepAlive", pb.LeaseKeepAliveResponse)(
                timeout=left_s, metadata=metadata
            )
            try:
                await _send(call, request)
                reply = await call.read()
                if reply is grpc.aio.EOF:
                    raise Unavailable("etcd ended a renewal without an answer")
                return bool(reply.TTL > 0)
            finally:
                call.cancel()

        return await self._anywhere(attempt, timeout_s)

    async def watch(
        self, begin: bytes, end: bytes, *, revision: int, lasts_s: float
    ) -> AsyncGenerator[pb.WatchResponse, None]:
        """Yield what changes from `revision` on, for `lasts_s` at the endpoint that is asked first.

        That it is silent proves nothing. It raises Unavailable if the connection is lost.
        """
        create = pb.WatchCreateRequest(key=begin, range_end=end, start_revision=revision)
        call = _stream(self._channel(self.endpoint), "Watch/Watch", pb.WatchResponse)(
            timeout=lasts_s, metadata=self._metadata()
        )
        try:
            await _send(call, pb.WatchRequest(create_request=create))
            while (reply := await call.read()) is not grpc.aio.EOF:
                yield reply
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise self._translated(error, self.endpoint) from error
        finally:
            call.cancel()

    # ---- endpoints ---------------------------------------------------------------------------

    async def _unary(self, path: str, request: Any, reply: type[Reply], timeout_s: float) -> Reply:
        async def attempt(channel: grpc.aio.Channel, left_s: float, metadata: Metadata) -> Reply:
            call = channel.unary_unary(
                f"/etcdserverpb.{path}",
                request_serializer=type(request).SerializeToString,
                response_deserializer=reply.FromString,  # type: ignore[attr-defined]
            )
            answer: Reply = await call(request, timeout=left_s, metadata=metadata)
            return answer

        return await self._anywhere(attempt, timeout_s)

    async def _anywhere(self, attempt: Attempt[Reply], timeout_s: float) -> Reply:
        """Try one endpoint after the other until one answers, or the time is over."""
        deadline = time.monotonic() + timeout_s
        failed: KVStoreError = Unavailable("no endpoint of cluster.etcd answers")
        refused: set[str] = set()  # endpoints that want other settings
        while (left_s := deadline - time.monotonic()) > 0:
            one_s = min(left_s, ATTEMPT_S) if len(self._endpoints) > 1 else left_s
            endpoint = self.endpoint
            try:
                return await self._attempt(attempt, endpoint, time.monotonic() + one_s)
            except grpc.aio.AioRpcError as error:
                found = self._translated(error, endpoint)
            except KVStoreError as error:
                found = error
            if isinstance(found, ConfigError):
                refused.add(endpoint)
            failed = found if not isinstance(failed, ConfigError) else failed
            self._at = (self._at + 1) % len(self._endpoints)
            if len(refused) == len(self._endpoints):
                break
            if self._at == 0:
                await asyncio.sleep(min(ROUND_PAUSE_S, max(0.0, deadline - time.monotonic())))
        self.failed += 1
        raise failed

    async def _attempt(self, attempt: Attempt[Reply], endpoint: str, until: float) -> Reply:
        """Call one endpoint; with a user, log in before, and once more if the token has expired."""
        channel = self._channel(endpoint)
        for last in (False, True):
            if self._access.user and not self._token:
                await self._log_in(channel, until - time.monotonic())
            try:
                return await attempt(channel, until - time.monotonic(), self._metadata())
            except grpc.aio.AioRpcError as error:
                if last or not self._token or not _is_stale(error):
                    raise
                self._token = ""
        raise AssertionError("the last attempt returns or raises")

    async def _log_in(self, channel: grpc.aio.Channel, left_s: float) -> None:
        request = pb.AuthenticateRequest(
            name=self._access.user, password=await asyncio.to_thread(self._access.password)
        )
        call = channel.unary_unary(
            "/etcdserverpb.Auth/Authenticate",
            request_serializer=pb.AuthenticateRequest.SerializeToString,
            response_deserializer=pb.AuthenticateResponse.FromString,
        )
        self._token = (await call(request, timeout=left_s)).token

    def _metadata(self) -> Metadata:
        return (("token", self._token),) if self._token else ()

    def _translated(self, error: grpc.aio.AioRpcError, endpoint: str) -> KVStoreError:
        return refusal_of(error, endpoint, self._access)

    def _channel(self, endpoint: str) -> grpc.aio.Channel:
        if self._access.files_changed():
            stale, self._channels = self._channels, {}
            for channel in stale.values():  # calls under way end by themselves
                asyncio.ensure_future(channel.close(grace=RECONNECT_S))
        if endpoint not in self._channels:
            self._channels[endpoint] = self._access.channel(endpoint, OPTIONS)
        return self._channels[endpoint]


async def _send(call: Any, request: Any) -> None:
    """Write to a stream. Raises AioRpcError with its status, even if it has ended already."""
    try:
        await call.write(request)
    except asyncio.InvalidStateError:
        await call.read()
        raise


def _stream(channel: grpc.aio.Channel, path: str, reply: Any) -> Any:
    return channel.stream_stream(
        f"/etcdserverpb.{path}",
        request_serializer=lambda request: request.SerializeToString(),
        response_deserializer=reply.FromString,
    )


def _is_stale(error: grpc.aio.AioRpcError) -> bool:
    """Tell whether a token is refused that was good once: it expired, or etcd was restarted."""
    words = error.details() or ""
    return "invalid auth token" in words or "revision of auth store is old" in words
