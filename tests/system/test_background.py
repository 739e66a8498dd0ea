"""Beats: what many tasks wait for at once."""

from __future__ import annotations

import asyncio

from kvstore.system.background import next_beat

PERIOD_S = 0.5


async def _woken() -> list[int]:
    """Return the turns of the loop in which tasks were woken that began to wait at different times
    within a beat."""
    loop = asyncio.get_running_loop()
    turns, turn = list[int](), 0

    def count() -> None:
        nonlocal turn, counting
        turn += 1
        counting = loop.call_soon(count)

    async def wait() -> None:
        await asyncio.sleep(next_beat(PERIOD_S) - loop.time())
        turns.append(turn)

    counting = loop.call_soon(count)
    await wait()
    tasks = []
    for _ in range(4):
        await asyncio.sleep(PERIOD_S / 20)
        tasks.append(asyncio.create_task(wait()))
    await asyncio.gather(*tasks)
    counting.cancel()
    return turns[1:]


def test_tasks_that_wait_for_a_beat_are_woken_in_one_turn_of_the_loop():
    turns = asyncio.run(_woken())
    assert len(turns) == 4
    assert max(turns) - min(turns) <= 1


def test_the_next_beat_is_later_than_now_and_no_later_than_a_period():
    async def look() -> None:
        loop = asyncio.get_running_loop()
        for period_s in (0.01, 0.25, 1.0, 5.0):
            now = loop.time()
            at = next_beat(period_s)
            assert now < at <= loop.time() + period_s
            assert abs(at / period_s - round(at / period_s)) < 1e-6

    asyncio.run(look())
