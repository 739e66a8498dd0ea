"""`kvstore bench tier` on a real daemon and a real disk, beside fio where it is installed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvstore_bench.cli import bench
from kvstore_bench.fio import INSTALL

ARGUMENTS = ["tier", "--record-mib", "1", "--blocks", "64", "--rounds", "6", "--json"]


def test_without_fio_it_says_what_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = CliRunner().invoke(bench, [*ARGUMENTS, "--path", str(tmp_path)])
    assert done.exit_code != 0
    assert INSTALL in done.output


@pytest.mark.skipif(shutil.which("fio") is None, reason=INSTALL)
def test_the_json_has_every_ratio_and_nothing_stays_behind(tmp_path: Path) -> None:
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
    assert list(tmp_path.iterdir()) == []
