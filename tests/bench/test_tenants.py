"""`kvstore bench tenants`, `store --tenants` and `--arena sealed`: each figure, of real daemons."""

from __future__ import annotations

import json
import multiprocessing

import pytest
from click.testing import CliRunner

from kvstore.model.errors import Unavailable
from kvstore_bench.cli import bench
from kvstore_bench.tenants.noise import flooding, rising


def test_a_sealed_arena_is_compared_with_a_direct_one() -> None:
    arguments = ["store", "--records", "2", "--record-mib", "1", "--rounds", "5"]
    done = CliRunner().invoke(bench, [*arguments, "--arena", "sealed", "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    seconds = result["seconds"]
    for what in ("get", "put"):
        ratio = seconds[f"{what}_direct"]["p50"] / seconds[f"{what}_sealed"]["p50"]
        assert result[f"sealed_{what}_vs_direct"] == pytest.approx(ratio)


def test_a_tenant_among_others_is_compared_with_one_alone() -> None:
    arguments = ["store", "--records", "2", "--record-mib", "1", "--rounds", "5"]
    done = CliRunner().invoke(bench, [*arguments, "--tenants", "3", "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["tenants"] == 3
    for what in ("match", "get", "put"):
        among, alone = (result["seconds"][f"{what}_{side}"]["p50"] for side in ("among", "alone"))
        assert result[f"{what}_vs_alone"] == pytest.approx(among / alone)


def test_a_quiet_tenant_is_measured_alone_and_beside_noisy_ones() -> None:
    arguments = ["tenants", "--tenants", "2", "--dram-mib", "256", "--seconds", "1", "--idle", "2"]
    arguments += ["--durable", "2"]
    done = CliRunner().invoke(bench, [*arguments, "--json", "--path", "/tmp"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["alone"]["hit_ratio"] == 1.0
    assert 0.5 < result["borrowed_share"] <= 1.0
    assert result["acquire_p99_vs_alone"] == pytest.approx(
        result["flooded"]["acquire_p99_s"] / result["alone"]["acquire_p99_s"]
    )
    assert result["acquire_p99_copies_vs_alone"] == pytest.approx(
        result["beside_copies"]["acquire_p99_s"] / result["alone"]["acquire_p99_s"]
    )
    assert result["cap_overshoot_bytes"] >= 0
    speeds = result["durable_bytes_per_s"]
    assert result["durable_2_vs_1"] == pytest.approx(speeds["all"]["p50"] / speeds["one"]["p50"])
    assert result["idle_cpu_share"] < 1.0


@pytest.mark.parametrize(("stored", "read"), [(0, 0), (16, 0), (0, 16)])
def test_a_flood_that_stores_or_reads_nothing_is_an_error(stored: int, read: int) -> None:
    done = multiprocessing.Array("Q", [100, 100])  # of before
    with pytest.raises(Unavailable, match=f"stored {stored} and read {read} records"), rising(done):
        done[:] = [100 + stored, 100 + read]
    with rising(done):
        done[:] = [150, 150]


def test_a_process_that_ends_before_it_is_at_work_is_an_error() -> None:
    with (
        pytest.raises(Unavailable, match="did not start"),
        flooding(["unix:/nowhere"], 1 << 20),
    ):
        pass
