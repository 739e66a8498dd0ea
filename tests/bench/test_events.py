"""What events cost a put is measured on real daemons, each of them started first once."""

from __future__ import annotations

import math

import pytest

from kvstore_bench.events import speed
from kvstore_bench.events.stage import EventsPlan


def test_each_daemon_is_started_first_for_half_of_the_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(speed, "PAIR_ROUNDS", 1)
    monkeypatch.setattr(speed, "WARM_ROUNDS", 1)
    said: list[str] = []
    result = speed.put_ratio(
        EventsPlan(rounds=1, round_blocks=512, record_nbytes=4096), said.append
    )
    first, last = result["put_ratio_each"]
    assert (result["put_ratio_started_first"], result["put_ratio_started_last"]) == (
        pytest.approx(first),
        pytest.approx(last),
    )
    assert result["put_ratio_with_events"] == pytest.approx(math.sqrt(first * last))
    assert result["blocks_announced"] == 2 * 512
    assert len(said) == 2
