"""40 seconds of what `make soak` does for ten."""

from __future__ import annotations

import pytest

from tests.connectors.vllm.soak import passed, soak

pytestmark = [pytest.mark.vllm, pytest.mark.fault, pytest.mark.long, pytest.mark.timeout(400)]

GROWTH_BYTES_MAX = 96 << 20
"""Allocators keep some of what they once had: up to 84 MiB where two engines share two cores."""


def test_nothing_is_wrong_or_left_behind_after_40_seconds_of_traffic(models, tmp_path):
    report = soak(40.0, models, tmp_path)
    assert passed(report), report
    assert report["preemptions"] > 0, "the engine had too much memory to show anything"
    assert report["aborted"] > 100
    assert report["loads"] > 100
    assert report["evicted_blocks"]["dram"] > 0
    assert report["evicted_blocks"]["file"] > 0
    for process, growth in report["growth"].items():
        assert growth["rss_anon_bytes"] < GROWTH_BYTES_MAX, (process, report)
        assert growth["descriptors"] <= 0, (process, report)
        assert growth["extents"] <= 0, (process, report)
