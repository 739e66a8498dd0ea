"""The lanes of the pool's buffer: whoever waits for one gets it, or gives up and leaves nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import pytest

from kvstore.tier.pool.failure import PoolFailed
from kvstore.tier.pool.memory import LANES, PUT_LANES, WAITING_MAX, Lane, Memory

LONG_S = 30.0  # a busy machine; no test waits for it


@contextmanager
def made() -> Iterator[Memory]:
    memory = Memory(1 << 20)
    memory.sent()
    try:
        yield memory
    finally:
        memory.retire()


async def taken(memory: Memory) -> list[Lane]:
    """Take every lane that gets may have."""
    return [await memory.take(LONG_S, puts=False) for _ in range(LANES - PUT_LANES)]


async def run_out(memory: Memory) -> None:
    with pytest.raises(PoolFailed, match="in time"):
        await memory.take(0.01, puts=False)


async def be_cancelled(memory: Memory) -> None:
    waiting = asyncio.create_task(memory.take(LONG_S, puts=False))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


@pytest.mark.parametrize("give_up", [run_out, be_cancelled])
def test_who_has_given_up_is_not_counted_among_those_who_wait(
    give_up: Callable[[Memory], Awaitable[None]],
) -> None:
    async def course() -> None:
        with made() as memory:
            lanes = await taken(memory)
            for _ in range(2):
                await asyncio.gather(*(give_up(memory) for _ in range(WAITING_MAX)))
            waiting = asyncio.create_task(memory.take(LONG_S, puts=False))
            await asyncio.sleep(0)
            memory.give(lanes[0])
            assert await waiting is lanes[0]

    asyncio.run(course())


def test_no_more_wait_than_the_bound_says() -> None:
    async def course() -> None:
        with made() as memory:
            await taken(memory)
            waiting = [
                asyncio.create_task(memory.take(LONG_S, puts=False)) for _ in range(WAITING_MAX)
            ]
            await asyncio.sleep(0)
            with pytest.raises(PoolFailed, match="too many"):
                await memory.take(LONG_S, puts=False)
            memory.retire()
            outcomes = await asyncio.gather(*waiting, return_exceptions=True)
            assert {type(outcome) for outcome in outcomes} == {PoolFailed}

    asyncio.run(course())


def test_a_lane_that_comes_as_its_caller_is_cancelled_goes_to_the_next() -> None:
    async def course() -> None:
        with made() as memory:
            lanes = await taken(memory)
            first, second = (asyncio.create_task(memory.take(LONG_S, puts=False)) for _ in range(2))
            await asyncio.sleep(0)
            memory.give(lanes[0])
            first.cancel()
            assert await second is lanes[0]
            assert first.cancelled()

    asyncio.run(course())
