"""`kvstore bench tier` on a real daemon and a real disk, beside fio where it is installed."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvstore.model.errors import Unavailable
from kvstore_bench.cli import bench
from kvstore_bench.console.ratio_tables import print_encrypted, print_tier
from kvstore_bench.tiers import direct, fio
from kvstore_bench.tiers.direct import check_room, opened_direct, takes_direct
from kvstore_bench.tiers.fio import ENGINES, INSTALL
from kvstore_kernels import native

RAM_DISK = Path("/dev/shm")
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


def test_a_way_that_was_fast_by_luck_is_not_fios_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fio, "TRIED_NBYTES", 16 << 20)
    lucky, *_, best = ways = list(fio._ways(16 << 20, 32 << 20))
    moved: list[tuple[str, fio.Way]] = []

    def asked(path: Path, kind: str, way: fio.Way, nbytes: int) -> float:
        if nbytes == 16 << 20:
            return {lucky: 9.0, best: 8.0}.get(way, 1.0)
        moved.append((kind, way))
        if way == lucky and moved.count((kind, way)) == 1:
            return 9.0  # and never again
        return 6.0 if way == best else 5.0

    monkeypatch.setattr(fio, "bandwidth", asked)
    assert fio.best_ways(tmp_path, 32 << 20, lambda text: None) == {"write": best, "read": best}
    for kind in ("write", "read"):
        assert moved.count((kind, best)) == fio.FINAL_ROUNDS
    assert len({way for _, way in moved}) < len(ways)


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


@pytest.mark.skipif(not os.access(RAM_DISK, os.W_OK), reason="no RAM disk")
def test_a_ram_disk_shows_how_long_locks_are_held_and_keeps_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no fio
    arguments = [*ARGUMENTS, "--path", str(RAM_DISK), "--threads", "1,3"]
    done = CliRunner().invoke(bench, arguments)
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert set(result["threads"]) == {"1", "3"}
    for row in (result, *result["threads"].values()):
        held = row["gil_held_s_per_gb"]
        assert set(held) == {"read", "write", "client_read", "client_write"}
        assert 0 < held["read"] < 60
        assert 0 < held["write"] < 60
        assert min(held.values()) >= 0
    for row in result["threads"].values():
        assert min(row["gb_per_s"].values()) > 0
    assert list(RAM_DISK.glob("kvstore-bench-*")) == []
    pytest.importorskip("rich")
    print_tier(result)
    shown = capsys.readouterr().out
    assert "Interpreter lock held for a GB" in shown
    assert f"{result['gil_held_s_per_gb']['read']:.3f}" in shown


@pytest.mark.skipif(shutil.which("fio") is None, reason=INSTALL)
def test_a_disk_without_o_direct_is_measured_without_fio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def refuses(path: str | Path, flags: int, *rest: int, **more: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, *rest, **more)

    monkeypatch.setattr(direct.os, "open", refuses)
    assert not takes_direct(tmp_path)
    done = CliRunner().invoke(bench, [*ARGUMENTS, "--path", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "takes no O_DIRECT" in done.stderr
    result = json.loads(done.stdout)
    assert (result["read_vs_fio"], result["write_vs_fio"]) == (None, None)
    assert result["gil_held_s_per_gb"]["read"] > 0
    assert list(tmp_path.iterdir()) == []


def test_sigterm_stops_the_daemon_and_removes_the_files(tmp_path: Path) -> None:
    """Files on a RAM disk that stay behind take memory until somebody removes them."""
    command = [sys.executable, "-c", "from kvstore_bench.cli import bench; bench()", *ARGUMENTS]
    with subprocess.Popen(
        [*command, "--path", str(tmp_path)],
        env={**os.environ, "PATH": str(tmp_path)},  # no fio
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        assert any("writing" in line for line in process.stderr)
        (scratch,) = tmp_path.iterdir()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) > 0
    assert list(tmp_path.iterdir()) == []
    lines = (path / "cmdline" for path in Path("/proc").glob("[0-9]*"))
    assert not any(scratch.name.encode() in _read(line) for line in lines)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""  # the process has ended


def test_other_refusals_of_a_file_are_raised(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), opened_direct(tmp_path / "missing"):
        pass


@pytest.mark.parametrize("threads", ["0", "x", "65"])
def test_numbers_of_threads_that_make_no_sense_are_refused(threads: str) -> None:
    done = CliRunner().invoke(bench, ["tier", "--threads", threads])
    assert done.exit_code == 2
    assert "numbers from 1 to 64" in done.output


@pytest.mark.parametrize("more", [["--encrypted"], ["--tier", "object"], ["--record", "l3"]])
def test_threads_are_of_raw_records_of_the_file_tier(more: list[str]) -> None:
    done = CliRunner().invoke(bench, ["tier", "--threads", "1", *more])
    assert done.exit_code == 2
    assert "--threads measures raw records of the file tier" in done.output


def test_what_does_not_fit_is_refused_before_the_run(tmp_path: Path) -> None:
    arguments = ["tier", "--path", str(tmp_path), "--record-mib", str(1 << 20), "--blocks", "64"]
    done = CliRunner().invoke(bench, arguments)
    assert done.exit_code == 2
    assert "take fewer --blocks or --rounds" in done.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not os.access(RAM_DISK, os.W_OK), reason="no RAM disk")
def test_files_on_a_ram_disk_share_memory_with_the_arena(tmp_path: Path) -> None:
    check_room(RAM_DISK, 1 << 20, 1 << 20)
    with pytest.raises(Unavailable, match="is memory"):
        check_room(RAM_DISK, 1 << 20, 1 << 50)
    if not direct._in_memory(tmp_path):
        check_room(tmp_path, 1 << 20, 1 << 50)  # the arena is the daemon's concern there
