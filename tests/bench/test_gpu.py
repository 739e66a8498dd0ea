"""`kvstore bench gpu`: the code of the benchmark, tried on the processor; what it says without."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")

from kvstore_bench.cli import bench  # noqa: E402
from kvstore_bench.gpu.gpu import (  # noqa: E402
    LAYOUTS,
    GpuPlan,
    cuda_device,
    measure_copies,
    measure_files,
    measure_kernels,
    measure_prefix,
    run,
    small,
)

FIELDS = {
    "gather_vs_copy",
    "d2h_vs_pinned",
    "h2d_bounced_vs_pinned",
    "save_gb_s",
    "restore_gb_s",
    "file_to_hbm_gb_s",
    "ttft_32k_dram_vs_cold",
    "ttft_32k_hbm_vs_cold",
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    result = CliRunner().invoke(bench, ["gpu", "--json", "--path", str(tmp_path)])
    assert result.exit_code == 2
    assert "no CUDA device" in result.output
    assert not result.stdout


def test_kernels_are_measured_for_every_layout() -> None:
    result = measure_kernels(small(GpuPlan()), torch.device("cpu"))
    assert set(result["kernel_seconds"]) == set(LAYOUTS)
    assert result["kernel_nbytes"] == 4 * 2 * 2 * 16 * 64 * 2
    for field in ("gather_vs_copy", "scatter_vs_copy", "sm_ms_per_gb"):
        assert result[field] > 0


def test_copies_and_a_whole_prefix_are_measured_and_verified(tmp_path: Path) -> None:
    plan, device = small(GpuPlan()), torch.device("cpu")
    result = {
        **measure_copies(plan, device),
        **measure_prefix(plan, device),
        **measure_files(plan, device, tmp_path),
    }
    assert result["registration_failure"] == ""
    assert result["file_to_hbm_how"] == "host"
    for field in FIELDS - {"gather_vs_copy", "ttft_32k_dram_vs_cold", "ttft_32k_hbm_vs_cold"}:
        assert result[field] > 0
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_everything_is_measured_on_a_gpu(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    result = run(small(GpuPlan()), tmp_path, cuda_device(), print)
    assert result["registration_failure"] == ""
    for field in FIELDS:
        assert result[field] > 0
