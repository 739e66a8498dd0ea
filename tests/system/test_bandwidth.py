"""Rates with a bounded burst, and turns by bytes of what users move over one channel."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from kvstore.model.errors import Unavailable
from kvstore.system.bandwidth import BURST_S, Channel, ChannelLane, Lane, TokenBucket
from kvstore.system.rounds import Rounds, RoundUser

MIB = 1 << 20


def test_a_bucket_lets_its_rate_through_and_no_more_than_a_burst_at_once() -> None:
    bucket = TokenBucket(10 * MIB)
    now, moved = 1000.0, 0
    while now < 1010.0:
        now += bucket.wait_s(now)
        bucket.take(MIB)
        moved += MIB
    assert 100 * MIB <= moved <= (100 + 10 * BURST_S + 2) * MIB
    now += 3600
    burst = 0
    while not bucket.wait_s(now):
        bucket.take(MIB)
        burst += 1
    assert burst <= 10 * BURST_S + 1


def test_without_a_rate_nothing_waits() -> None:
    bucket = TokenBucket(0)
    bucket.take(1 << 60)
    assert bucket.wait_s(1.0) == 0.0


def test_who_would_wait_too_long_is_refused_and_takes_nothing() -> None:
    async def flood() -> None:
        lane = Lane(MIB)
        await lane.take(100 * MIB)
        with pytest.raises(Unavailable) as refused:
            await lane.take(1)
        assert refused.value.reason == "quota"
        lane.set_rate(0)
        await lane.take(MIB)

    asyncio.run(flood())


def test_streams_of_a_quiet_user_do_not_wait_for_all_streams_of_another() -> None:
    sent: list[str] = []

    async def stream(lane: Lane, name: str, messages: int) -> None:
        for _ in range(messages):
            await lane.take(64 << 10)
            sent.append(name)
            await asyncio.sleep(0)

    async def flood() -> None:
        rounds = Rounds()
        noisy, quiet = (Lane(rounds=RoundUser(rounds, 256 << 10)) for _ in range(2))
        many = [stream(noisy, "noisy", 20) for _ in range(48)]
        await asyncio.gather(*many, stream(quiet, "quiet", 20))

    asyncio.run(flood())
    last = len(sent) - sent[::-1].index("quiet")
    assert Counter(sent[:last])["noisy"] <= 20 * 10  # of 960


def test_uploads_take_turns_by_bytes_and_by_weight() -> None:
    order: list[str] = []

    async def upload(lane: ChannelLane, name: str, nbytes: int) -> None:
        async with lane.moving(nbytes, 30.0):
            order.append(name)
            await asyncio.sleep(0)

    async def flood() -> None:
        channel = Channel(4 * MIB)
        noisy, quiet = ChannelLane(channel, 1.0), ChannelLane(channel, 2.0)
        await asyncio.gather(
            *(upload(noisy, "noisy", 4 * MIB) for _ in range(100)),
            *(upload(quiet, "quiet", 4 * MIB) for _ in range(20)),
        )

    asyncio.run(flood())
    last = len(order) - order[::-1].index("quiet")
    assert 5 <= Counter(order[:last])["noisy"] <= 14


def test_an_upload_that_does_not_get_its_turn_holds_nothing() -> None:
    async def wait() -> None:
        channel = Channel(MIB)
        one, other = ChannelLane(channel, 1.0), ChannelLane(channel, 1.0)
        async with one.moving(MIB, 1.0):
            with pytest.raises(TimeoutError):
                async with other.moving(MIB, 0.01):
                    pytest.fail("it has no turn")
        async with other.moving(MIB, 1.0):
            pass

    asyncio.run(wait())
