"""A minute of what `make soak` does for ten."""

from __future__ import annotations

import pytest

from tests.connectors.vllm.soak import soak

pytestmark = [pytest.mark.vllm, pytest.mark.fault, pytest.mark.long, pytest.mark.timeout(400)]


def test_nothing_is_wrong_lost_or_left_behind_after_a_minute_of_traffic(models, tmp_path):
    said: list[str] = []
    report = soak(60.0, models, tmp_path, said.append)
    assert not report["failures"], report
    assert report["preemptions"] > 0, "the engine had too much memory to show anything"
    assert report["aborted"] > 100
    assert report["loads"] > 100
    assert report["evicted_blocks"]["dram"] > 0
    assert report["evicted_blocks"]["file"] > 0
    assert min(report["kills"].values()) > 0
    assert len(said) == len(report["reports"]) == 4
