"""Requests to the bucket of one tenant among several: at its rate, and within their deadline."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from kvstore.metrics import Metrics
from kvstore.settings import ObjectSettings
from kvstore.system.bandwidth import Channel, ChannelLane
from kvstore.tier.object import ObjectFailed
from kvstore.tier.object.connect import connect
from kvstore.tier.object.requests import Requests

MIB = 1 << 20


def requests_of(path: Path, lane: ChannelLane) -> Requests:
    return Requests(
        connect(ObjectSettings(url=f"file://{path}")),
        metrics=Metrics(),
        now=time.monotonic,
        timeout_s=10.0,
        requests_max=8,
        lane=lane,
    )


def test_puts_and_gets_keep_to_the_bandwidth(tmp_path: Path) -> None:
    async def move() -> float:
        requests = requests_of(tmp_path, ChannelLane(Channel(MIB), 1.0, 8 * MIB))
        data = bytes(MIB)
        began = time.monotonic()
        deadline = began + 30
        await asyncio.gather(
            *(requests.put(f"o{number}", [data], MIB, deadline) for number in range(4))
        )
        for number in range(4):
            assert bytes(await requests.fetch(f"o{number}", 0, MIB, deadline)) == data
        requests.close()
        return time.monotonic() - began

    took_s = asyncio.run(move())
    assert took_s > 4 / 8  # all but the burst and the last


def test_who_does_not_get_a_turn_in_time_is_told_that_it_was_busy(tmp_path: Path) -> None:
    async def move() -> None:
        lane = ChannelLane(Channel(MIB), 1.0, MIB)
        requests = requests_of(tmp_path, lane)
        await requests.put("first", [bytes(8 * MIB)], 8 * MIB, time.monotonic() + 30)
        with pytest.raises(ObjectFailed) as refused:
            await requests.put("second", [b"x"], 1, time.monotonic() + 0.2)
        assert refused.value.reason == "busy"
        with pytest.raises(ObjectFailed):
            await requests.fetch("first", 0, 1, time.monotonic() + 0.2)
        requests.close()

    asyncio.run(move())
