"""`kvstore bench gpu`: the code of the benchmark, tried on the processor; what it says without."""

from __future__ import annotations

import json
import statistics
import sys
import types
import zlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self

import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")

from kvstore import CorruptBlock  # noqa: E402
from kvstore_bench.cli import bench  # noqa: E402
from kvstore_bench.console.ratio_tables import print_gpu  # noqa: E402
from kvstore_bench.gpu import GPU_STAGES  # noqa: E402
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
from kvstore_bench.gpu.nvcomp import measure_nvcomp_ans  # noqa: E402
from kvstore_bench.gpu.records import FIELDS as RECORDS  # noqa: E402
from kvstore_bench.gpu.records import FORMS, measure_records  # noqa: E402
from kvstore_bench.transformers.resumed import ResumePlan  # noqa: E402
from kvstore_kernels import native  # noqa: E402
from kvstore_kernels.codec.device_coder import DeviceCoder  # noqa: E402
from tests.connectors.vllm.device_layers import on_host  # noqa: E402
from tests.connectors.vllm.tiny_models import make_llama  # noqa: E402
from tests.kernels.codec.device import open_on_host  # noqa: E402

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
TTFT = {"ttft_32k_dram_vs_cold", "ttft_32k_hbm_vs_cold"}
SMALL = ResumePlan(prompt_tokens=200, rounds=2, dram_bytes=128 << 20, file_bytes=1 << 30)


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


def test_copies_and_a_whole_prefix_are_measured_and_verified(tmp_path, codec_library) -> None:
    """Coded records by the kernels, compiled for the processor."""
    plan, device = small(GpuPlan()), torch.device("cpu")
    opened = partial(DeviceCoder, open_launcher=open_on_host(codec_library))
    result = {
        **measure_copies(plan, device),
        **measure_prefix(plan, device, opened),
        **measure_files(plan, device, tmp_path),
    }
    assert not list(tmp_path.iterdir())
    assert result["registration_failure"] == ""
    assert result["file_to_hbm_how"] == "host"
    for field in ("l3_save_gb_s", "l3_restore_gb_s"):
        assert result[field] > 0
    for field in FIELDS - set(CODING) - TTFT - {"gather_vs_copy"}:
        assert result[field] > 0


def test_what_came_back_wrong_is_no_measurement(monkeypatch) -> None:
    """The pages that were saved are compared, and not those that the prefix leaves alone."""
    monkeypatch.setattr("kvstore_bench.gpu.prefix.RawPrefix.restore", lambda self: None)
    with pytest.raises(CorruptBlock, match="not what was saved"):
        measure_prefix(small(GpuPlan()), torch.device("cpu"), lambda *_, **__: None)


def test_coding_is_measured_and_verified(codec_library) -> None:
    """By the kernels, compiled for the processor."""
    opened = partial(DeviceCoder, open_launcher=open_on_host(codec_library))
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
    assert result["nvcomp_ans"] is None


class Zipped:
    """An array of the stand-in below."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.buffer_size = len(data)

    def cpu(self) -> bytes:
        return self.data


class StandIn(types.ModuleType):
    """zlib by the names that nvCOMP's Python package has: it takes a GPU even to be imported."""

    def __init__(self, wrong: bool = False) -> None:
        super().__init__("nvidia.nvcomp")
        self.wrong = wrong
        self.kinds: list[str] = []

    def as_array(self, values: torch.Tensor, cuda_stream: int) -> Zipped:
        return Zipped(values.view(torch.uint8).numpy().tobytes())

    def Codec(self, *, algorithm: str, data_type: str, cuda_stream: int) -> Self:  # noqa: N802
        assert algorithm == "ANS"
        self.kinds.append(data_type)
        if data_type == "<f2":
            raise TypeError("no such type in this version")
        return self

    def encode(self, array: Zipped) -> Zipped:
        return Zipped(zlib.compress(array.data, 1))

    def decode(self, array: Zipped) -> Zipped:
        return Zipped(zlib.decompress(array.data)[self.wrong :])


@pytest.mark.parametrize("wrong", [False, True])
def test_a_peer_that_is_installed_is_measured_and_verified(wrong, monkeypatch, caplog) -> None:
    stand_in = StandIn(wrong)
    monkeypatch.setitem(sys.modules, "nvidia", types.ModuleType("nvidia"))
    monkeypatch.setitem(sys.modules, "nvidia.nvcomp", stand_in)
    layers = _layers(small(GpuPlan()), "LBHNC", torch.device("cpu"))
    found = measure_nvcomp_ans(layers, 4, 2)
    assert stand_in.kinds == ["|u1", "<f2"]
    assert "no such type" in caplog.text
    if wrong:
        assert found is None
        assert "what was decoded" in caplog.text
        return
    assert found is not None
    assert found["data_type"] == "|u1"
    assert found["ratio"] > 10  # zeros
    assert found["encode_gb_s"] > 0
    assert found["decode_gb_s"] > 0
    print_gpu({"device": "a GPU", "coding": False, "nvcomp_ans": found})
    ours = {"l3_ratio": 1.4, "l3_encode_tb_s": 0.5, "l3_decode_tb_s": 0.4}
    print_gpu({"device": "a GPU", "coding": True, "nvcomp_ans": found, **ours})


def test_a_peer_that_cannot_be_loaded_is_left_out(monkeypatch, caplog) -> None:
    def load(name: str) -> None:
        raise RuntimeError(f"{name} needs a driver")

    caplog.set_level("INFO")
    monkeypatch.setattr("kvstore_bench.gpu.nvcomp.import_module", load)
    assert measure_nvcomp_ans(_layers(small(GpuPlan()), "LBHNC", torch.device("cpu")), 4, 2) is None
    assert "nvidia.nvcomp needs a driver" in caplog.text


needs_library = pytest.mark.skipif(bool(native.reason()), reason=native.reason())


def test_coded_records_are_measured_beside_raw_ones(tmp_path, codec_library, monkeypatch) -> None:
    """By the kernels, compiled for the processor."""
    prefixes = pytest.importorskip("kvstore_transformers.prefixes")
    from kvstore_transformers.coded_device import DeviceCoding

    coding = partial(DeviceCoding, opened=on_host(codec_library))
    monkeypatch.setattr(prefixes, "open_coding", partial(prefixes.open_coding, opened=coding))
    said: list[str] = []
    result = measure_records(make_llama().eval(), SMALL, tmp_path, said.append)
    assert not list(tmp_path.iterdir())
    assert set(RECORDS) <= set(result)
    for field in RECORDS:
        assert result[field] > 0
    assert {name: len(each) for name, each in result["record_seconds"]["nvme"].items()} == (
        dict.fromkeys(FORMS, 2)
    )
    assert result["record_bounced_nbytes"] == 0
    asked = [text.partition(":")[0] for text in said]
    assert asked == [
        *("raw from DRAM", "l3 from DRAM", "ep from DRAM"),
        *("l3 from DRAM", "ep from DRAM", "raw from DRAM"),
        *("raw from files", "l3 from files", "ep from files"),
        *("l3 from files", "ep from files", "raw from files"),
    ]
    seconds = result["record_seconds"]["dram"]
    median = {form: statistics.median(each) for form, each in seconds.items()}
    assert result["ttft_32k_dram_ep_vs_raw"] == median["ep"] / median["raw"]


def test_records_that_cannot_be_had_are_not_measured(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(native, "_loaded", lambda: (None, "there is no library"))
    said: list[str] = []
    result = measure_records(make_llama().eval(), replace(SMALL, rounds=1), tmp_path, said.append)
    assert [result[field] for field in RECORDS] == [None] * 4
    assert list(result["record_seconds"]["dram"]) == ["raw"]
    assert sum("there is no library" in text for text in said) == 4


@needs_library
def test_prompts_that_come_back_are_measured_on_a_processor(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("kvstore_bench.gpu.gpu._llama_8b", lambda device: make_llama().eval())
    resume = replace(SMALL, rounds=1, hbm_bytes=64 << 20)
    plan = replace(small(GpuPlan()), resume=resume, records=replace(SMALL, rounds=1))
    said: list[str] = []
    stages = ("records", "resumed")
    result = run(plan, tmp_path, torch.device("cpu"), said.append, stages)
    for field in TTFT | set(RECORDS):
        assert result[field] > 0
    assert result["device"] == "cpu"
    assert [text for text in said if text in GPU_STAGES] == ["resumed", "records"]
    print_gpu(result)
    json.dumps(result)


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_everything_is_measured_on_a_gpu(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    result = run(small(GpuPlan()), tmp_path, cuda_device(), print)
    assert result["registration_failure"] == ""
    for field in FIELDS | set(RECORDS) | {"l3_save_gb_s", "l3_restore_gb_s"}:
        assert result[field] > 0
