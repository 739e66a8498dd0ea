"""`kvstore bench gpu`: the code of the benchmark, tried on the processor; what it says without."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")

from kvstore import CorruptBlock  # noqa: E402
from kvstore_bench.cli import bench  # noqa: E402
from kvstore_bench.gpu.coding import FIELDS as CODING  # noqa: E402
from kvstore_bench.gpu.coding import measure_coding  # noqa: E402
from kvstore_bench.gpu.gpu import (  # noqa: E402
    LAYOUTS,
    GpuPlan,
    _layers,
    cuda_device,
    measure_copies,
    measure_files,
    measure_kernels,
    measure_prefix,
    run,
    small,
)
from kvstore_kernels.codec.device_coder import DeviceCoder  # noqa: E402
from tests.kernels.codec.device import compile_codec, open_on_host  # noqa: E402

FIELDS = {
    "gather_vs_copy",
    "l3_encode_tb_s",
    "l3_decode_tb_s",
    "ep_encode_tb_s",
    "ep_decode_tb_s",
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
    """Coded records by the kernels, compiled for the processor."""
    plan, device, disk = small(GpuPlan()), torch.device("cpu"), tmp_path / "disk"
    disk.mkdir()
    opened = partial(DeviceCoder, open_launcher=open_on_host(compile_codec(tmp_path)))
    result = {
        **measure_copies(plan, device),
        **measure_prefix(plan, device, opened),
        **measure_files(plan, device, disk),
    }
    assert not list(disk.iterdir())
    assert result["registration_failure"] == ""
    assert result["file_to_hbm_how"] == "host"
    for field in ("l3_save_gb_s", "l3_restore_gb_s"):
        assert result[field] > 0
    for field in (
        FIELDS - set(CODING) - {"gather_vs_copy", "ttft_32k_dram_vs_cold", "ttft_32k_hbm_vs_cold"}
    ):
        assert result[field] > 0


def test_what_came_back_wrong_is_no_measurement(monkeypatch) -> None:
    """The pages that were saved are compared, and not those that the prefix leaves alone."""
    monkeypatch.setattr("kvstore_bench.gpu.prefix.RawPrefix.restore", lambda self: None)
    with pytest.raises(CorruptBlock, match="not what was saved"):
        measure_prefix(small(GpuPlan()), torch.device("cpu"), lambda *_, **__: None)


def test_coding_is_measured_and_verified(tmp_path: Path) -> None:
    """By the kernels, compiled for the processor."""
    opened = partial(DeviceCoder, open_launcher=open_on_host(compile_codec(tmp_path)))
    plan = small(GpuPlan())
    result = measure_coding(plan, _layers(plan, "LBHNC", torch.device("cpu")), opened)
    assert result["coding"] is True
    assert result["ep_ratio"] == pytest.approx(1.6, abs=0.2)
    assert 1.2 < result["l3_ratio"] < 1.5
    for field in CODING:
        assert result[field] > 0


def test_coding_that_cannot_be_had_is_not_measured() -> None:
    plan = small(GpuPlan())
    result = measure_coding(plan, _layers(plan, "LBHNC", torch.device("cpu")))
    assert result["coding"] is False
    assert [result[field] for field in CODING] == [None] * 4


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_everything_is_measured_on_a_gpu(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    result = run(small(GpuPlan()), tmp_path, cuda_device(), print)
    assert result["registration_failure"] == ""
    for field in FIELDS | {"l3_save_gb_s", "l3_restore_gb_s"}:
        assert result[field] > 0
