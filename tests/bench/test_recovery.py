"""`kvstore bench recovery` on a real daemon: everything is back."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore_bench.tiers.recovery import RecoveryPlan, run


@pytest.mark.parametrize(
    "plan", [RecoveryPlan(5000, 2), RecoveryPlan(6000, 2, encrypted=True, tenants=3)]
)
def test_a_killed_daemon_has_every_block_back(tmp_path: Path, plan: RecoveryPlan) -> None:
    result = run(plan, tmp_path, lambda text: None)
    assert len(result["rounds"]) == 2
    assert 0 < result["serving_s"] <= result["first_hit_s"] <= result["complete_s"]
    assert list(tmp_path.iterdir()) == []
