"""`kvstore bench tier` on a real daemon and a real disk, beside fio where it is installed."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvstore.model.errors import Unavailable
from kvstore_bench.cli import bench
from kvstore_bench.console.ratio_tables import print_encrypted, print_tier
from kvstore_bench.tiers import fio
from kvstore_bench.tiers.fio import ENGINES, INSTALL
from kvstore_kernels import native

ARGUMENTS = ["tier", "--record-mib", "1", "--blocks", "64", "--rounds", "6", "--json"]


def test_without_fio_it_says_what_to_type_and_measures_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = CliRunner().invoke(bench, [*ARGUMENTS, "--path", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert INSTALL in done.stderr
    result = json.loads(done.stdout)
    assert (result["read_vs_fio"], result["write_vs_fio"]) == (None, None)
    assert sorted(result["bytes_per_s"]) == ["read", "write"]
    assert result["bytes_per_s"]["read"]["p50"] > 0
    assert result["seconds"]["direct_read"]["p50"] > 0
    assert 1 <= result["written_vs_raw"] < 1.1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(bool(native.reason()), reason=native.reason())
def test_coded_records_are_written_smaller_and_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = CliRunner().invoke(
        bench, [*ARGUMENTS, "--rounds", "10", "--record", "l3", "--path", str(tmp_path)]
    )
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["record"] == "l3"
    assert result["plan"]["record_nbytes"] == 1 << 20
    assert result["raw_gb_s_vs_fio"] is None
    assert 0.6 < result["written_vs_raw"] < 0.8
    assert result["bytes_per_s"]["read"]["p50"] > 0
    refused = CliRunner().invoke(bench, ["tier", "--tier", "object", "--record", "l3"])
    assert refused.exit_code == 2
    assert "--record l3 measures the file tier alone" in refused.output


def test_a_table_without_fio_has_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    speeds = {"min": 1e6, "p50": 2e6, "max": 3e6}
    print_tier(
        {
            "read_vs_fio": None,
            "write_vs_fio": None,
            "first_block_extra_ms": 1.5,
            "bytes_per_s": {"read": speeds, "write": speeds},
        }
    )
    assert re.search(r"read_vs_fio +- ", capsys.readouterr().out)


@pytest.mark.skipif(shutil.which("fio") is None, reason=INSTALL)
def test_the_json_has_every_ratio_and_nothing_stays_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fio, "BLOCKS_NBYTES", fio.BLOCKS_NBYTES[1:2])
    monkeypatch.setattr(fio, "JOBS_DEPTH", fio.JOBS_DEPTH[::3])
    done = CliRunner().invoke(bench, [*ARGUMENTS, "--path", str(tmp_path)])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    speeds = result["bytes_per_s"]
    for kind in ("read", "write"):
        ratio = speeds[kind]["p50"] / speeds[f"fio_{kind}"]["p50"]
        assert result[f"{kind}_vs_fio"] == pytest.approx(ratio)
    seconds = result["seconds"]
    assert result["first_block_extra_ms"] == pytest.approx(
        1e3 * (seconds["first_block"]["p50"] - seconds["direct_read"]["p50"])
    )
    for way in result["fio"].values():
        assert way["engine"] in ENGINES
        assert result["plan"]["blocks"] * result["plan"]["record_nbytes"] % way["block_nbytes"] == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(shutil.which("fio") is None, reason=INSTALL)
def test_fios_best_is_the_fastest_of_the_ways_that_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One engine is missing here; of the others, each speed is what a fake of fio says."""
    speeds = {way: number for number, way in enumerate(fio._ways(8 << 20))}

    def asked(path: Path, kind: str, way: fio.Way, nbytes: int) -> float:
        if way.engine == "io_uring":
            raise Unavailable("no such engine")
        return float(speeds[way] if kind == "read" else -speeds[way])

    real = fio.Way("libaio", 1 << 20, 4, 4)
    assert fio.bandwidth(tmp_path / "real", "write", real, 8 << 20) > 0
    assert fio.bandwidth(tmp_path / "real", "read", real, 8 << 20) > 0
    monkeypatch.setattr(fio, "bandwidth", asked)
    said: list[str] = []
    found = fio.best_ways(tmp_path, 8 << 20, said.append)
    working = [way for way in speeds if way.engine == "libaio"]
    assert found == {"write": working[0], "read": working[-1]}
    assert any("no such engine" in each for each in said)


def test_sizes_that_fio_cannot_move_whole_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="no multiple"):
        fio.best_ways(tmp_path, 12345, lambda text: None)


def test_encryption_is_measured_beside_the_same_tier_in_clear(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = CliRunner().invoke(bench, [*ARGUMENTS, "--encrypted", "--path", str(tmp_path)])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["read_vs_plain"] > 0
    assert result["write_vs_plain"] > 0
    assert sorted(result["bytes_per_s"]) == [
        *("encrypted_read", "encrypted_write", "plain_read", "plain_write"),
    ]
    cpu = result["cpu_s_per_gib"]
    assert result["cpu_s_per_gib_more"] == pytest.approx(
        max(cpu[f"encrypted_{kind}"] - cpu[f"plain_{kind}"] for kind in ("read", "write"))
    )
    assert list(tmp_path.iterdir()) == []
    pytest.importorskip("rich")
    print_encrypted(result)
    assert "read_vs_plain" in capsys.readouterr().out
