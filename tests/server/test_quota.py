"""Calls at once are bounded for each tenant, whichever way they come."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import grpc
import pytest

from kvstore import Client
from kvstore.model.errors import InvalidRequest, Unavailable
from kvstore.model.tenant import Role
from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.server.quota import (
    CALL_NBYTES,
    CALLS_MIN,
    RELEASE_NBYTES_MAX,
    RELEASES_WAITING_MAX,
    ROUND_NBYTES,
    Quota,
)
from kvstore.system.rounds import Rounds
from kvstore.system.token_file import changing, make_token
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import sample_keys, sample_namespace
from kvstore.testing.wait import until
from kvstore.transport.call_wire import METHODS, Frame, Kind
from tests.server.every_method import OPTIONS, ask, bearer

FLOODING = 20  # links
SETTINGS = (
    "server.listen=127.0.0.1:0",
    "tenants.acme.dram.guaranteed=16MiB",
    "tenants.beta.dram.guaranteed=16MiB",
)


def test_a_place_is_free_again_when_its_call_has_ended_however() -> None:
    quota = Quota(Rounds())
    quota.calls_max = 1
    with pytest.raises(Unavailable) as refused, quota.place("Match"), quota.place("Match"):
        pass
    assert refused.value.reason == "quota"
    assert quota.running == 0
    with quota.place("Match"):
        assert quota.running == 1


def test_a_release_is_taken_from_a_tenant_that_is_over_its_part() -> None:
    quota = Quota(Rounds())
    quota.calls_max = 1
    with quota.place("Acquire"), quota.place("Release"):
        assert quota.running == 2


def test_a_release_is_charged_for_each_lease_that_it_may_name() -> None:
    async def rounds_of(method: str) -> int:
        quota = Quota(Rounds())
        assert quota.begins(method, 8192)
        rounds = 0
        while not quota.begins("Match", 0):
            await asyncio.sleep(0)
            rounds += 1
        return rounds

    assert asyncio.run(rounds_of("Match")) == 0
    assert 16 <= asyncio.run(rounds_of("Release")) <= 20


def test_so_many_releases_of_a_tenant_wait_and_no_more() -> None:
    async def work(data: bytes, context: object) -> str:
        return "answered"

    async def flood() -> list[object]:
        quota = Quota(Rounds())
        data = bytes(ROUND_NBYTES)
        calls = [quota.answered("Release", data, work, None) for _ in range(100)]
        told = await asyncio.gather(*calls, return_exceptions=True)
        assert quota.running == 0
        assert await quota.answered("Release", data, work, None) == "answered"
        return list(told)

    told = asyncio.run(flood())
    refused = [each for each in told if isinstance(each, Unavailable)]
    assert told.count("answered") == 1 + RELEASES_WAITING_MAX
    assert len(refused) == 99 - RELEASES_WAITING_MAX
    assert {each.reason for each in refused} == {"quota"}


def test_a_release_that_is_too_large_waits_for_no_turn() -> None:
    async def work(data: bytes, context: object) -> int:
        return len(data)

    async def main() -> None:
        quota = Quota(Rounds())
        with pytest.raises(InvalidRequest, match="split it"):
            await quota.answered("Release", bytes(RELEASE_NBYTES_MAX + 1), work, None)
        assert quota.begins("Release", 0)  # nothing is owed for it
        assert await quota.answered("Release", bytes(RELEASE_NBYTES_MAX), work, None)

    asyncio.run(main())


def test_a_release_that_is_too_large_is_refused_before_it_is_read(daemon: Daemon) -> None:
    garbage = b"\xff" * (RELEASE_NBYTES_MAX + 1)
    with grpc.insecure_channel(daemon.target, options=OPTIONS) as channel:
        release = channel.unary_unary("/kvstore.rpc.v1.KVStore/Release")
        with pytest.raises(grpc.RpcError, match="split it"):
            release(garbage, timeout=10)
        with pytest.raises(grpc.RpcError, match="no message of this method"):
            release(garbage[:100], timeout=10)


def test_a_call_of_a_quiet_tenant_waits_for_a_round_of_a_flood_not_for_all_of_it() -> None:
    begun: list[str] = []

    async def call(quota: Quota, name: str) -> None:
        if not quota.begins("Match", 0):
            await quota.turn("Match", 0)
        begun.append(name)

    async def flood() -> None:
        turns = Rounds()
        noisy, quiet = Quota(turns), Quota(turns)
        calls = [asyncio.create_task(call(noisy, "noisy")) for _ in range(1000)]
        await asyncio.sleep(0)
        calls.append(asyncio.create_task(call(quiet, "quiet")))
        await asyncio.gather(*calls)

    asyncio.run(flood())
    assert len(begun) == 1001
    assert begun.index("quiet") <= 3 * ROUND_NBYTES // CALL_NBYTES


def test_what_a_large_request_takes_is_owed_in_the_next_rounds() -> None:
    async def flood() -> tuple[int, int]:
        quota = Quota(Rounds())
        assert quota.begins("Match", 10 * ROUND_NBYTES)
        assert not quota.begins("Match", 0)
        assert not quota.begins("Release", 0)
        waiting = asyncio.create_task(quota.turn("Match", 0))
        gone = asyncio.create_task(quota.turn("Match", 0))
        rounds = 0
        while not waiting.done():
            await asyncio.sleep(0)
            gone.cancel()
            rounds += 1
        for _ in range(3):  # then nothing is owed, and no round is left
            await asyncio.sleep(0)
        return rounds, quota.begins("Match", 0)

    rounds, begins = asyncio.run(flood())
    assert 10 <= rounds <= 15
    assert begins


@contextmanager
def streams_open(channel: grpc.Channel, count: int, token: str) -> Iterator[None]:
    """Have `count` Put streams under way that say nothing yet."""
    over = threading.Event()

    def silent() -> Iterator[pb.PutRequest]:
        over.wait(30)
        yield from ()

    put = channel.stream_unary(
        "/kvstore.rpc.v1.KVStore/Put",
        request_serializer=pb.PutRequest.SerializeToString,
        response_deserializer=pb.CommitReply.FromString,
    )
    calls = [put.future(silent(), timeout=30, metadata=bearer(token)) for _ in range(count)]
    try:
        yield
    finally:
        over.set()
        for call in calls:
            call.cancel()


def test_calls_over_tcp_and_on_the_socket_count_against_one_bound(tmp_path: Path) -> None:
    tokens = {}
    with changing(tmp_path / "tokens") as entries:
        for tenant in ("acme", "beta"):
            tokens[tenant], entry = make_token(tenant, Role.WRITER)
            entries.append(entry)
    with Daemon(*SETTINGS, f"security.tokens={tmp_path / 'tokens'}", file=False) as daemon:
        daemon.start()
        own = f"unix:{daemon.socket.parent / 'acme' / 'kvstore.sock'}"
        with (
            grpc.insecure_channel(daemon.address, options=OPTIONS) as channel,
            Client(own) as client,
        ):
            acme, beta = bearer(tokens["acme"]), bearer(tokens["beta"])
            with Client(daemon.target, arena=False) as operator:  # 512 of them until now
                operator.admin.configure(["tenants.acme.weight=0.01"])
            with streams_open(channel, CALLS_MIN, tokens["acme"]):
                until(lambda: ask(channel, "WhoAmI", acme) == "Unavailable", 10)
                assert ask(channel, "WhoAmI", beta) == "answered"
                with pytest.raises(Unavailable, match="of this tenant are being answered"):
                    client.admin.stats()
            until(lambda: ask(channel, "WhoAmI", acme) == "answered", 10)
        with Client(daemon.target, arena=False) as operator:
            told = operator.admin.stats()["tenants"]["acme"]["totals"]["rpc_errors"]
            assert any(name.endswith("Unavailable/quota") for name in told)
        daemon.stop()


def release(number: int, leases: int) -> bytes:
    request = pb.ReleaseRequest(session=1, leases=[1] * leases).SerializeToString()
    method = [method.name for method in METHODS].index("Release")
    return Frame(Kind.REQUEST, number, request, method, 60.0).encode()


# What nobody holds, and what nobody has called.
RELEASES = b"".join(release(number, 8192) for number in range(32))
CANCELS = release(0, 1) + Frame(Kind.CANCEL, 7).encode() * 12_000


@contextmanager
def flooded(path: Path, frames: bytes) -> Iterator[list[int]]:
    """Send frames on many links, without an end. Yields how many bytes of answers each link has
    read."""
    read, over = [0] * FLOODING, threading.Event()

    def send(link: socket.socket) -> None:
        at = 0
        while not over.is_set():
            with suppress(TimeoutError):
                at = (at + link.send(frames[at:])) % len(frames)

    def receive(number: int, link: socket.socket) -> None:
        while not over.is_set():
            with suppress(TimeoutError):
                read[number] += len(link.recv(1 << 20))

    with ExitStack() as stack:
        threads = []
        for number in range(FLOODING):
            link = stack.enter_context(socket.socket(socket.AF_UNIX))
            link.connect(str(path))
            link.settimeout(1.0)
            threads.append(threading.Thread(target=send, args=(link,)))
            threads.append(threading.Thread(target=receive, args=(number, link)))
        for thread in threads:
            thread.start()
        try:
            yield read
        finally:
            over.set()
            for thread in threads:
                thread.join(10)


@pytest.mark.parametrize("frames", [RELEASES, CANCELS], ids=["releases", "cancels"])
def test_a_flood_of_what_is_never_refused_holds_up_nobody_elses_calls(frames: bytes) -> None:
    with Daemon(*SETTINGS[1:], file=False) as daemon:
        daemon.start()
        calls = daemon.socket.parent / "acme" / "kvstore.sock.calls"
        with Client(f"unix:{daemon.socket.parent / 'beta' / 'kvstore.sock'}") as beta:
            namespace_id, keys = beta.register(sample_namespace()), sample_keys("quiet", 3)
            with flooded(calls, frames) as read:
                until(lambda: sum(read) > 0)
                took = []
                for _ in range(15):
                    began = time.monotonic()
                    assert beta.match(namespace_id, keys) is not None
                    took.append(time.monotonic() - began)
                before = sum(read)
                until(lambda: sum(read) > before)  # none of them is refused
        assert sorted(took)[len(took) // 2] < 0.1
        daemon.stop()
