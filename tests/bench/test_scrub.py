"""`kvstore bench scrub` on real daemons: every flipped bit is found."""

from __future__ import annotations

from pathlib import Path

from kvstore_bench.tiers.scrub import ScrubPlan, run
from kvstore_bench.tiers.tier import TierPlan


def test_every_flip_is_found_and_reads_are_compared(tmp_path: Path) -> None:
    said: list[str] = []
    plan = ScrubPlan(TierPlan(record_nbytes=1 << 20, blocks=64, rounds=6), flips=5, passes=2)
    result = run(plan, tmp_path, said.append)
    assert result["flips_found"] == result["flips"] == 5
    speeds = result["bytes_per_s"]
    assert result["read_ratio_while_scrubbing"] == (
        speeds["scrubbing"]["p50"] / speeds["quiet"]["p50"]
    )
    assert list(tmp_path.iterdir()) == []
