"""`kvstore bench recovery` on a real daemon: everything is back."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore_bench.tiers.recovery import RecoveryPlan, run


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_killed_daemon_has_every_block_back(tmp_path: Path, encrypted: bool) -> None:
    result = run(RecoveryPlan(5000, 2, encrypted), tmp_path, lambda text: None)
    assert len(result["rounds"]) == 2
    assert 0 < result["first_hit_s"] <= result["complete_s"]
    assert list(tmp_path.iterdir()) == []
