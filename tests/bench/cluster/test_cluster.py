"""`kvstore bench cluster` at a small size: two real daemons, and iperf3 if there is one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.cli.run import kvstore

RATIOS_TO_IPERF3 = (
    "peer_get_vs_iperf3",
    "peer_get_sealed_vs_iperf3",
    "peer_get_256k_vs_iperf3",
    "local_get_ratio_beside_iperf3",
)
OTHERS = (
    "peer_files_vs_plain_reads",
    "first_window_ms",
    "local_get_ratio",
    "local_get_ratio_at_a_tenth",
    "staleness_s_p99",
)
VIEW = ("acquire_added_us_p50", "acquire_added_us_p99", "view_bytes_per_head", "view_cpu_share")


@pytest.mark.timeout(240)
def test_every_field_is_measured(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    small = ["--record-mib=1", "--blocks=4", "--rounds=2", "--streams=2", "--seconds=0.05"]
    small += ["--peers=5", "--peer-blocks=20000", "--hosts=5"]
    ran = kvstore("bench", "cluster", *small, "--path", str(tmp_path), "--json")
    assert ran.exit_code == 0, ran.output
    result = json.loads(ran.stdout)
    assert all(result[name] > 0 for name in OTHERS)
    assert all(isinstance(result[name], float) for name in VIEW)
    has_iperf3 = shutil.which("iperf3") is not None
    assert all((result[name] is not None) == has_iperf3 for name in RATIOS_TO_IPERF3)
    assert {"peer_get", "peer_get_sealed", "peer_files"} <= result["bytes_per_s"].keys()
    assert list(tmp_path.iterdir()) == []
