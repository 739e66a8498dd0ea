"""A pool tier on a real Mooncake Store: what it had comes back as it was put, or not at all."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvstore.metrics import Metrics
from kvstore.model.block import BlockKey, NamespaceId, Part
from kvstore.model.checksum import checksum
from kvstore.settings import PoolSettings
from kvstore.testing.mooncake import INSTALL, Mooncake, has_mooncake
from kvstore.tier.pool import PoolFailed, PoolRecord, PoolTier, PoolWrite, namespace_pattern
from kvstore.tier.pool import client as pool_client
from kvstore.tier.pool import process as pool_process
from kvstore.tier.pool import tier as pool_tier
from kvstore.tier.pool.messages import Operation

pytestmark = pytest.mark.skipif(not has_mooncake(), reason=INSTALL)

SPACE = NamespaceId(bytes(range(32)))
PART = Part(1, 2)
NBYTES = 300_001  # not whole pages, on purpose
BUFFER_NBYTES = 4 << 20  # lanes of 1 MiB: three records each
LONG_S = 30.0  # a busy machine; no test waits for it


@pytest.fixture(scope="module")
def mooncake() -> Iterator[Mooncake]:
    with Mooncake() as mooncake:
        yield mooncake.start()


def key(number: int) -> BlockKey:
    return BlockKey(random.Random(number).randbytes(32))


def record(number: int, nbytes: int = NBYTES) -> PoolRecord:
    return PoolRecord(SPACE, PART, key(number), nbytes)


def content(number: int, nbytes: int = NBYTES) -> bytes:
    return random.Random(-number - 1).randbytes(nbytes)


def write(number: int) -> PoolWrite:
    data = content(number)
    return PoolWrite(record(number), memoryview(data), checksum(data), number, None)


@asynccontextmanager
async def opened(mooncake: Mooncake, segment_bytes: int = 0) -> AsyncIterator[PoolTier]:
    settings = PoolSettings(
        url=mooncake.url, buffer_bytes=BUFFER_NBYTES, segment_bytes=segment_bytes
    )
    tier = PoolTier(settings, Metrics(), time.monotonic)
    tier.start()
    try:
        await until(lambda: tier.up)
        yield tier
    finally:
        await tier.close()


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(LONG_S):
        while not true():  # noqa: ASYNC110 - of a process, too
            await asyncio.sleep(0.01)


def soon() -> float:
    return time.monotonic() + LONG_S


async def failure(work: AsyncIterator[object] | object) -> str:
    """Return the reason for which something is not done."""
    with pytest.raises(PoolFailed) as error:
        await work  # type: ignore[misc]
    return error.value.reason


async def put(tier: PoolTier, *numbers: int) -> None:
    for number in numbers:
        assert len((await tier.put([write(number)], soon())).done) == 1


async def get(tier: PoolTier, *numbers: int) -> list[bytes]:
    targets = [memoryview(bytearray(NBYTES)) for _ in numbers]
    wanted = [(record(number), to) for number, to in zip(numbers, targets, strict=True)]
    checksums = await tier.get(wanted, soon())
    assert checksums == [checksum(content(number)) for number in numbers]
    return [bytes(target) for target in targets]


def test_records_come_back_and_leave(mooncake: Mooncake) -> None:
    async def course() -> None:
        async with opened(mooncake, segment_bytes=16 << 20) as tier:
            await until(lambda: tier.stats()["segment_state"] == "up")
            numbers = range(7)  # more than a lane takes at once
            await put(tier, *numbers)
            assert await get(tier, *numbers) == [content(number) for number in numbers]
            names = [record(number).name for number in range(8)]
            assert await tier.exists(names, soon()) == [True] * 7 + [False]
            assert await tier.sizes(names[-2:], soon()) == [NBYTES, 0]
            assert await failure(get(tier, 0, 7)) == "missing"
            wrong = write(7)._replace(checksum=1)  # the arena's copy is not what was put
            result = await tier.put([wrong, write(8)], soon())
            assert (len(result.done), result.corrupt) == (1, 1)
            assert not mooncake.exists(names[7])
            await tier.remove(names[:2], soon())
            await tier.remove(names[:2], soon())  # what is not there is removed
            assert await tier.exists(names[:3], soon()) == [False, False, True]
            await tier.purge(namespace_pattern(NamespaceId(bytes(32))), soon())
            assert await tier.exists(names[2:3], soon()) == [True]
            await tier.purge(namespace_pattern(SPACE), soon())
            assert not any(await tier.exists(names, soon()))

    asyncio.run(course())


def test_wrong_values_are_never_believed_and_leave(mooncake: Mooncake) -> None:
    async def course() -> None:
        async with opened(mooncake) as tier:
            name = record(0).name
            for how in ("flip", "cut", "empty", "long"):
                await put(tier, 0, 1)
                mooncake.change(name, how)
                assert await failure(get(tier, 1, 0)) == "corrupt", how
                await until(lambda: not mooncake.exists(name))
            await put(tier, 0)
            mooncake.copy(record(1).name, name)  # a right one, of another block
            assert await failure(get(tier, 0)) == "corrupt"

    asyncio.run(course())


def test_a_delete_is_confirmed_when_no_put_can_end_any_more(mooncake: Mooncake) -> None:
    async def course() -> None:
        async with opened(mooncake) as tier:
            name = record(9).name
            mooncake.begin(name)
            assert await failure(tier.remove([name], time.monotonic() + 0.5)) == "slow"
            removing = asyncio.create_task(tier.remove([name], soon()))
            await asyncio.sleep(0.3)
            assert not removing.done()
            mooncake.revoke(name)
            await removing
            assert not mooncake.exists(name)

    asyncio.run(course())


@pytest.mark.parametrize("what", ["get", "put"])
def test_who_is_cancelled_returns_when_no_thread_copies_any_more(
    mooncake: Mooncake, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    copies, go_on = threading.Event(), threading.Event()
    name = "_take_in" if what == "get" else "_lay_out"
    work = getattr(pool_tier, name)

    def held(*args: object) -> object:
        copies.set()
        go_on.wait(LONG_S)
        return work(*args)

    async def course() -> None:
        target = memoryview(bytearray(NBYTES))
        async with opened(mooncake) as tier:
            await put(tier, 40)  # no other test has damaged it
            monkeypatch.setattr(pool_tier, name, held)
            asked: Coroutine[Any, Any, object] = (
                tier.get([(record(40), target)], soon())
                if what == "get"
                else tier.put([write(41)], soon())
            )
            call = asyncio.create_task(asked)
            try:
                await until(copies.is_set)
                for _ in range(3):
                    call.cancel()
                    await asyncio.wait([call], timeout=0.05)
                    assert not call.done()
            finally:
                go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert bytes(target) == (content(40) if what == "get" else bytes(NBYTES))

    asyncio.run(course())


def test_a_full_pool_refuses_or_makes_room() -> None:
    async def course(mooncake: Mooncake) -> None:
        async with opened(mooncake) as tier:
            full = 0
            for number in range(200):  # 60 MB into 16 MiB
                full += (await tier.put([write(number)], soon())).full
                if full:
                    break
            assert full
            assert await failure(tier.get([(record(0, 2 << 20), memoryview(b""))], soon()))

    options = {"eviction_high_watermark_ratio": "1.0", "eviction_ratio": "0.0"}
    with Mooncake(segment_bytes=16 << 20, **options) as mooncake:
        asyncio.run(course(mooncake.start()))


@pytest.mark.fault
def test_its_deaths_cost_misses_and_it_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Process, host, master: each killed; the master stopped, so that calls hang."""
    monkeypatch.setattr(pool_client, "HANG_S", 0.8)
    monkeypatch.setattr(pool_client, "PROBE_EVERY_S", 0.2)
    monkeypatch.setattr(pool_client, "BACKOFF_MAX_S", 0.5)

    async def course(mooncake: Mooncake) -> None:
        async with opened(mooncake) as tier:
            client = tier._client
            await put(tier, 0)
            assert client._process is not None
            os.kill(client._process._child.pid, signal.SIGKILL)
            await until(lambda: client.starts == 2 and tier.up)
            assert await get(tier, 0) == [content(0)]  # the pool is others' memory

            mooncake.pause_master()
            assert await failure(tier.exists(["x"] * 3, time.monotonic() + 0.2)) == "slow"
            async with client.lane(soon()) as lane:
                moving = lane.move(Operation.GET, ["x"], [4096], time.monotonic() + 0.2)
                assert await failure(moving) == "slow"
            memory = client._process.memory
            assert memory is not None
            assert sum(not each.puts for each in memory._free) == 2  # of 3: one is in limbo
            await until(lambda: client.hung == 1)
            assert await failure(tier.exists(["x"], soon())) == "gone"  # at once, not hung
            mooncake.resume_master()
            await until(lambda: tier.up)
            assert client._process.memory is not memory

            mooncake.kill_hosts()
            with pytest.raises(PoolFailed):
                await get(tier, 0)
            mooncake.kill_master()
            await until(lambda: not tier.up)
            mooncake.start()  # empty
            await until(lambda: tier.up)
            assert await tier.exists([record(0).name], soon()) == [False]
            await put(tier, 0)
            assert await get(tier, 0) == [content(0)]

    with Mooncake() as mooncake:
        asyncio.run(course(mooncake.start()))


def test_without_a_master_it_stays_down_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_process, "START_S", 1.0)  # Mooncake tries for longer

    async def course() -> None:
        tier = PoolTier(PoolSettings(url="mooncake://127.0.0.1:1"), Metrics(), time.monotonic)
        tier.start()
        await until(lambda: tier.stats()["last_error"])
        assert tier.stats()["state"] == "down"
        assert await failure(tier.exists(["x"], soon())) == "gone"
        await tier.close()

    asyncio.run(course())
