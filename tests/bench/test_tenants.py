"""`kvstore bench tenants`, `store --tenants` and `--arena sealed`: each figure, of real daemons."""

from __future__ import annotations

import json
import multiprocessing
import os

import pytest
from click.testing import CliRunner

from kvstore import Client
from kvstore.model.errors import Unavailable
from kvstore.model.tenant import tenant_id
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import sample_keys, sample_namespace
from kvstore.testing.wait import until
from kvstore_bench.cli import bench
from kvstore_bench.tenants.noise import flooding, rising
from kvstore_bench.tenants.overshoot import Bounds, Overshoot, Site, watched

MIB, GIB = 1 << 20, 1 << 30
SEGMENT_NBYTES = 256 * MIB  # of the file tier, which is cut open now and then


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
    assert result["cap_watched"]["looks"] > 5
    assert result["cap_watched"]["seen_nbytes"] > 32 << 20
    assert result["cap_overshoot_bytes"] <= SEGMENT_NBYTES
    speeds = result["durable_bytes_per_s"]
    assert result["durable_2_vs_1"] == pytest.approx(speeds["all"]["p50"] / speeds["one"]["p50"])
    assert result["idle_cpu_share"] < 1.0


def test_what_a_tenant_takes_beyond_a_cap_is_seen_from_outside() -> None:
    namespace = sample_namespace("caps", MIB)
    names = ("acme", "beta")
    settings = [f"tenants.{name}.dram.guaranteed=32MiB" for name in names]
    settings += [f"tenants.{name}.file.guaranteed=128MiB" for name in names]
    with Daemon("dram.capacity=64MiB", *settings) as daemon:
        daemon.start()

        def bounds(name: str, dram_nbytes: int, file_nbytes: int) -> Bounds:
            directory = daemon.directory / "file" / "tenants" / tenant_id(name).hex()
            target = f"unix:{daemon.socket.parent / name / 'kvstore.sock'}"
            return Bounds(name, target, [directory], dram_nbytes, file_nbytes)

        def over(dram_nbytes: int, file_nbytes: int, of_all_nbytes: int = GIB) -> Overshoot:
            """Return what is seen, if this is what beta may have."""
            tenants = [bounds("acme", GIB, GIB), bounds("beta", dram_nbytes, file_nbytes)]
            with watched(Site(daemon.pid, tenants, of_all_nbytes, GIB)) as found:
                pass
            return found

        with Client(bounds("beta", 0, 0).target) as client:
            client.register(namespace)
            keys = sample_keys("caps", 16)
            done = client.put(namespace.id, keys, [os.urandom(MIB)] * 16, durable=True, wait_s=10)
            assert done.durable
            until(lambda: client.admin.stats()["dram"]["reserved_bytes"] >= 32 * MIB)
        assert over(GIB, GIB).nbytes == 0
        assert over(GIB, GIB).seen_nbytes >= 32 * MIB
        assert over(30 * MIB, GIB).nbytes >= 2 * MIB
        assert over(GIB, 10 * MIB).nbytes >= 6 * MIB
        assert over(GIB, GIB, 31 * MIB).nbytes > 0, "all tenants together"
        daemon.stop()


def test_who_sees_nothing_tells_of_no_caps() -> None:
    with pytest.raises(Unavailable, match="saw 0 bytes"), watched(Site(os.getpid(), [], 0, 0)):
        pass


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
