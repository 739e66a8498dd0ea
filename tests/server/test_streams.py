"""Byte streams hold little of the daemon, however many there are and however long they stand."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from kvstore import Client
from kvstore.model.block import BlockKey
from kvstore.model.checksum import checksum
from kvstore.model.errors import Unavailable
from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.rpc.v1 import kvstore_pb2_grpc as rpc
from kvstore.server.stream_bounds import STALL_S, STREAMS_MAX, Room
from kvstore.testing.daemon import Daemon
from kvstore.testing.damage import damage_resident
from kvstore.testing.samples import sample_keys, sample_namespace, sample_records
from kvstore.testing.wait import until

MIB = 1 << 20
SPACE = sample_namespace("streams", MIB)
KEYS = sample_keys("streams", 40)
RECORDS = sample_records(KEYS, MIB)
CHANNELS = 20
ATTACKERS = 1000


@pytest.fixture
def own() -> Iterator[Daemon]:
    with Daemon(file=False) as daemon:
        with Client(daemon.start().target) as client:
            client.register(SPACE)
            client.put(SPACE.id, KEYS, RECORDS)
        until(lambda: "arena=complete" in daemon.output())
        yield daemon


def anonymous_nbytes(daemon: Daemon) -> int:
    status = Path(f"/proc/{daemon.pid}/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) << 10


def header(keys: Sequence[BlockKey], **fields: Any) -> pb.PutRequest:
    fields.setdefault("checksums", [1] * len(keys))
    about = pb.PutHeader(namespace_id=SPACE.id, keys=b"".join(keys), **fields)
    return pb.PutRequest(header=about)


class Attack:
    """Streams that stand still, from their first message on."""

    def __init__(self, daemon: Daemon) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        channels = [
            grpc.aio.insecure_channel(daemon.target, options=options) for _ in range(CHANNELS)
        ]
        self._channels = channels
        self._stubs = [rpc.KVStoreStub(channel) for channel in channels]
        self.calls: list[Any] = []

    async def get(self, number: int, timeout_s: float = 60.0) -> None:
        request = pb.GetRequest(namespace_id=SPACE.id, keys=b"".join(KEYS))
        self.calls.append(self._stubs[number % CHANNELS].Get(request, timeout=timeout_s))
        await self.calls[-1].initial_metadata()

    async def put(self, number: int, timeout_s: float = 60.0) -> None:
        self.calls.append(call := self._stubs[number % CHANNELS].Put(timeout=timeout_s))
        await call.write(header(sample_keys(f"silent {number}", 8)))

    async def close(self) -> None:
        for call in self.calls:
            call.cancel()
        for channel in self._channels:
            await channel.close()


def lookup_p99_ms(client: Client, seconds: float) -> float:
    """Return the time that 99 % of lookups of a local client stay under."""
    times = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.perf_counter()
        assert client.match(SPACE.id, KEYS).resident_blocks == len(KEYS)
        assert client.get(SPACE.id, KEYS[:1]) == RECORDS[:1]
        times.append(time.perf_counter() - began)
        time.sleep(0.002)
    return sorted(times)[int(0.99 * len(times))] * 1e3


def attacked(daemon: Daemon, attack: Callable[[Attack], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        attacker = Attack(daemon)
        try:
            await attack(attacker)
        finally:
            await attacker.close()

    asyncio.run(run())


def test_thousands_of_streams_that_stand_still_cost_little_and_displace_nothing(
    own: Daemon,
) -> None:
    """1,000 gets that nobody reads, and as many puts of which nothing but the header comes."""
    with Client(own.target) as client:
        client.register(SPACE)
        quiet_ms = lookup_p99_ms(client, 2)
        before = anonymous_nbytes(own)
        highest = 0

        async def attack(attack: Attack) -> None:
            nonlocal highest
            gets = [attack.get(i) for i in range(ATTACKERS)]
            puts = [attack.put(i) for i in range(ATTACKERS)]
            streams = asyncio.gather(*gets, *puts, return_exceptions=True)
            await asyncio.sleep(1)
            attacked_ms = await asyncio.to_thread(lookup_p99_ms, client, 4)
            # For information: the attackers share this process with the client.
            print(f"lookup p99 {quiet_ms:.2f} ms, attacked {attacked_ms:.2f} ms")
            for _ in range(int(STALL_S) + 3):  # those that stood still are gone by then
                highest = max(highest, anonymous_nbytes(own))
                await asyncio.sleep(1)
            streams.cancel()

        attacked(own, attack)
        print(f"anonymous memory +{(highest - before) / MIB:.1f} MiB")
        assert highest - before <= 64 * MIB
        dram = client.admin.stats()["dram"]
        assert (dram["blocks"], dram["evicted_blocks"]) == (len(KEYS), 0)
        assert refused(client, "Get/Unavailable/streams") > 100
        assert refused(client, "Put/Unavailable/streams") > 100
        until(lambda: refused(client, "Put/Unavailable/slow_stream") > 0)


def refused(client: Client, how: str) -> float:
    return float(client.admin.stats()["totals"]["rpc_errors"].get(how, 0))


def test_readers_that_stand_still_are_gone_at_their_deadline(own: Daemon) -> None:
    """gRPC's own buffers hold their last bytes until then; others get in as soon as it has come."""

    async def attack(attack: Attack) -> None:
        await asyncio.gather(*(attack.get(i, timeout_s=12.0) for i in range(STREAMS_MAX)))
        stub = attack._stubs[0]
        request = pb.GetRequest(namespace_id=SPACE.id, keys=KEYS[0])
        answers: list[object] = []
        while answers[-1:] != [RECORDS[0]]:
            try:
                got = [reply.chunk async for reply in stub.Get(request, timeout=30)]
                answers.append(b"".join(got))
            except grpc.aio.AioRpcError as error:
                answers.append(error.code())
        assert set(answers[:-1]) <= {grpc.StatusCode.UNAVAILABLE}
        assert len(answers) < 6

    attacked(own, attack)


def test_a_put_reserves_what_has_come_and_no_more(own: Daemon) -> None:
    keys = sample_keys("begun", 8)
    records = sample_records(keys, MIB)

    async def attack(attack: Attack) -> None:
        with Client(own.target) as client:
            call = attack._stubs[0].Put(timeout=30)
            await call.write(header(keys, checksums=[checksum(r) for r in records]))
            await asyncio.sleep(0.3)
            assert client.admin.stats()["dram"]["leased_bytes"] == 0
            await call.write(pb.PutRequest(chunk=records[0][:1000]))
            await asyncio.to_thread(
                until, lambda: client.admin.stats()["dram"]["leased_bytes"] == MIB
            )
            await call.write(pb.PutRequest(chunk=records[0][1000:]))
            for record in records[1:]:
                await call.write(pb.PutRequest(chunk=record))
            await call.done_writing()
            assert (await call).committed == len(keys)
            client.register(SPACE)
            assert client.get(SPACE.id, keys) == records

    attacked(own, attack)


def test_a_put_that_trickles_ends_with_a_lease_even_if_all_of_it_is_refused() -> None:
    """It would keep one of few turns for as long as it likes."""
    with Daemon("limits.lease_s=1", "dram.capacity=1MiB", "dram.extent=1MiB", file=False) as daemon:
        client = Client(daemon.start().target)
        client.register(SPACE)

        def trickle() -> Iterator[pb.PutRequest]:
            yield header(sample_keys("trickled", 2))
            for _ in range(100):
                yield pb.PutRequest(chunk=b"x")
                time.sleep(0.1)

        began = time.monotonic()
        with grpc.insecure_channel(daemon.target) as channel, pytest.raises(grpc.RpcError) as ended:
            rpc.KVStoreStub(channel).Put(trickle(), timeout=60)
        assert ended.value.code() == grpc.StatusCode.UNAVAILABLE
        assert time.monotonic() - began < 5
        assert refused(client, "Put/Unavailable/slow_stream") == 1
        client.close()


def test_nothing_is_published_if_the_last_record_is_wrong(own: Daemon) -> None:
    keys = sample_keys("last is wrong", 4)
    records = sample_records(keys, MIB)

    async def attack(attack: Attack) -> None:
        call = attack._stubs[0].Put(timeout=30)
        sums = [checksum(record) for record in records]
        await call.write(header(keys, checksums=[*sums[:3], 7]))
        for record in records:
            await call.write(pb.PutRequest(chunk=record))
        await call.done_writing()
        with pytest.raises(grpc.aio.AioRpcError, match="record 3"):
            await call

    attacked(own, attack)
    with Client(own.target) as client:
        client.register(SPACE)
        assert client.match(SPACE.id, keys).hit_blocks == 0
        assert client.admin.stats()["dram"]["leased_bytes"] == 0


def test_what_streams_hold_uncommitted_is_bounded_and_the_start_is_stored(own: Daemon) -> None:
    """Half of the arena: the end of a larger put is refused, as where there is no room."""
    keys = sample_keys("too large", 48)
    records = sample_records(keys, MIB)

    async def attack(attack: Attack) -> None:
        call = attack._stubs[0].Put(timeout=60)
        await call.write(header(keys, checksums=[checksum(record) for record in records]))
        for record in records:
            await call.write(pb.PutRequest(chunk=record))
        await call.done_writing()
        done = await call
        assert (done.committed, done.refused) == (32, 16)

    attacked(own, attack)
    with Client(own.target) as client:
        client.register(SPACE)
        assert client.get(SPACE.id, keys) == [*records[:32], *[None] * 16]


def test_a_record_that_is_wrong_in_the_arena_is_a_miss_for_streams_too(own: Daemon) -> None:
    """Whoever has only the .proto may not verify: the daemon sends nothing that is wrong."""
    with Client(own.target) as client:
        client.register(SPACE)
        damage_resident(client, SPACE.id, KEYS[2:3])

    async def attack(attack: Attack) -> None:
        request = pb.GetRequest(namespace_id=SPACE.id, keys=b"".join(KEYS[:4]))
        replies = [reply async for reply in attack._stubs[0].Get(request, timeout=30)]
        found = [each for reply in replies for each in reply.header.found]
        assert found == [True, True, False, True]
        sent = b"".join(reply.chunk for reply in replies)
        assert sent == b"".join([*RECORDS[:2], RECORDS[3]])

    attacked(own, attack)


def test_a_get_without_a_deadline_is_refused(own: Daemon) -> None:
    with grpc.insecure_channel(own.target) as channel:
        request = pb.GetRequest(namespace_id=SPACE.id, keys=KEYS[0])
        with pytest.raises(grpc.RpcError, match="deadline"):
            list(rpc.KVStoreStub(channel).Get(request))


def test_who_waits_for_more_room_than_is_left_has_it_alone() -> None:
    async def run() -> None:
        room = Room(10)
        first = await room.take(8, 1)
        large, small = (asyncio.create_task(room.take(nbytes, 5)) for nbytes in (9, 1))
        await asyncio.sleep(0)
        room.bound(4)
        assert room.taken_nbytes == 8
        first.give_back()
        large_held = await large
        assert room.taken_nbytes == 9
        assert not small.done()
        large_held.give_back()
        (await small).give_back()
        room.bound(10)
        (await room.take(10, 1)).give_back()
        assert room.taken_nbytes == 0

    asyncio.run(run())


def test_room_is_given_in_order_and_never_twice() -> None:
    async def run() -> None:
        room = Room(10)
        first, second = await room.take(6, 1), await room.take(4, 1)
        large = asyncio.create_task(room.take(100, 5))
        small = asyncio.create_task(room.take(1, 5))
        gone = asyncio.create_task(room.take(3, 5))
        await asyncio.sleep(0)
        gone.cancel()
        second.give_back()
        second.give_back()
        await asyncio.sleep(0)
        assert not small.done(), "the one before it has waited for longer"
        first.give_back()
        all_of_it = await large
        assert room.taken_nbytes == 10
        with pytest.raises(Unavailable):
            await room.take(1, 0.01)
        all_of_it.give_back()
        (await small).give_back()
        assert room.taken_nbytes == 0

    asyncio.run(run())
