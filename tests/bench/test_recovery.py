"""`kvstore bench recovery` on a real daemon: everything is back."""

from __future__ import annotations

from pathlib import Path

from kvstore_bench.tiers.recovery import RecoveryPlan, run


def test_a_killed_daemon_has_every_block_back(tmp_path: Path) -> None:
    result = run(RecoveryPlan(blocks=5000, rounds=2), tmp_path, lambda text: None)
    assert len(result["rounds"]) == 2
    assert 0 < result["first_hit_s"] <= result["complete_s"]
    assert list(tmp_path.iterdir()) == []
