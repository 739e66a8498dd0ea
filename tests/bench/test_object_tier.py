"""`kvstore bench tier --tier object` on a SeaweedFS that it starts by itself."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from kvstore_bench.cli import bench

ARGUMENTS = ["tier", "--tier", "object", "--record-mib", "1", "--blocks", "32", "--rounds", "2"]


def test_the_json_has_every_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "put back by monkeypatch")
    done = CliRunner().invoke(bench, [*ARGUMENTS, "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    speeds = result["bytes_per_s"]
    for kind in ("read", "write"):
        ratio = speeds[kind]["p50"] / speeds[f"raw_{kind}"]["p50"]
        assert result[f"{kind}_vs_raw"] == pytest.approx(ratio)
    assert result["absent_requests_cold"] <= 1
    assert result["absent_requests_warm"] == 0


def test_encryption_is_measured_beside_the_same_tier_in_clear(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "put back by monkeypatch")
    done = CliRunner().invoke(bench, [*ARGUMENTS, "--encrypted", "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["read_vs_plain"] > 0
    assert result["write_vs_plain"] > 0
    for kind in ("cold", "warm"):
        field = f"absent_requests_{kind}"
        assert result[field] == result[f"plain_{field}"]
