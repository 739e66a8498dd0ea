"""gRPC's health service: what a watch hears, and that watchers take no calls away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore.client import AsyncClient
from kvstore.model.errors import InvalidRequest, Unavailable
from kvstore.rpc.status import error_of
from kvstore.server.grpc_health import WATCHES_MAX, GrpcHealth
from kvstore.server.listeners import RPCS_MAX
from kvstore.testing.daemon import Daemon

States = health_pb2.HealthCheckResponse
OPTIONS = (("grpc.enable_http_proxy", 0),)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon("dram.capacity=4MiB", "dram.extent=4MiB", tcp=True) as daemon:
        yield daemon.start()


async def first(call: AsyncIterator[Any]) -> int | grpc.StatusCode:
    try:
        async for reply in call:
            return int(reply.status)
    except grpc.aio.AioRpcError as error:
        return error.code()
    raise AssertionError("a watch ended")


def test_watchers_without_a_credential_take_no_calls_away(daemon: Daemon) -> None:
    async def test() -> None:
        client = AsyncClient(daemon.address)
        async with grpc.aio.insecure_channel(daemon.address, options=OPTIONS) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service="")
            calls = [stub.Watch(request) for _ in range(RPCS_MAX + 64)]
            heard = await asyncio.gather(*map(first, calls))
            assert heard.count(States.SERVING) == WATCHES_MAX
            others = set(heard) - {States.SERVING}
            # The first is what makes gRPC's clients do without; the other, gRPC's own bound.
            assert grpc.StatusCode.UNIMPLEMENTED in others
            assert others <= {grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.RESOURCE_EXHAUSTED}
            await client.admin.ping()
            assert (await stub.Check(request, timeout=5)).status == States.SERVING
            for call in calls:
                call.cancel()
            for _ in range(200):
                watch = stub.Watch(request)
                if await first(watch) == States.SERVING:
                    break
                await asyncio.sleep(0.05)
            else:
                raise AssertionError("watches that ended take the place of others")
            watch.cancel()
        await client.close()

    asyncio.run(test())


def test_a_watch_hears_of_every_change_and_of_services_that_are_not_there() -> None:
    async def test() -> None:
        health = GrpcHealth()
        server = grpc.aio.server()
        health_pb2_grpc.add_HealthServicer_to_server(health, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS) as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                call = stub.Watch(health_pb2.HealthCheckRequest(service="later"), timeout=20)
                heard = [(await call.read()).status]
                for ready in (True, False):
                    health.set("later", ready=ready)
                    heard.append((await call.read()).status)
                assert heard == [States.SERVICE_UNKNOWN, States.SERVING, States.NOT_SERVING]
                with pytest.raises(grpc.aio.AioRpcError) as missing:
                    await stub.Check(health_pb2.HealthCheckRequest(service="none"), timeout=5)
                assert missing.value.code() is grpc.StatusCode.NOT_FOUND
                call.cancel()
        finally:
            await server.stop(0)

    asyncio.run(test())


def refusal(message: str) -> grpc.aio.AioRpcError:
    none = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, none, none, details=message)


def test_too_many_calls_are_no_mistake_of_the_caller() -> None:
    busy = error_of(refusal("Concurrent RPC limit exceeded!"), "unix:/x")
    assert isinstance(busy, Unavailable)
    large = error_of(refusal("Received message larger than max (5 vs. 4)"), "unix:/x")
    assert isinstance(large, InvalidRequest)
