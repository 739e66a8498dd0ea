"""`kvstore bench gpu`: the way between HBM and the daemon's memory, beside what the links can do.

Kernels: gather and scatter of an 8B-shaped KV cache, beside a device copy of the same bytes. While
they run they hold the SMs, so their time per GB is what saving and loading takes from the model.
Coding: records encoded and decoded on the device, exact (L3) and lossy (EP).
Copies: records between pages and the daemon's arena, registered with the GPU, and through a pinned
buffer, beside one plain pinned copy of as many bytes.
Prefix: 32k tokens of it saved to the daemon and restored, calls and checksums included; as they
are, and coded on the device (L3).
Files: read into GPU memory by the way the machine has, beside host memory.
Resume: time to first token of a 32k-token prompt with the transformers connector.
Records: the same from DRAM and from files, of prompts stored coded, beside prompts stored raw.

Both sides of a ratio alternate in one run; medians.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from kvstore import CorruptBlock, Unavailable
from kvstore_bench.gpu import GPU_STAGES
from kvstore_bench.gpu.arena import Slots, arena, registered
from kvstore_bench.gpu.clock import alternated, device_seconds, host_seconds
from kvstore_bench.gpu.coding import Open, coder_of, fill, measure_coding
from kvstore_bench.gpu.prefix import CodedPrefix, Prefix, RawPrefix
from kvstore_bench.gpu.records import measure_records
from kvstore_bench.transformers.resumed import ResumePlan
from kvstore_bench.transformers.resumed import run as run_resumed
from kvstore_kernels.codec.device_trial import open_coder
from kvstore_kernels.device import open_device
from kvstore_kernels.lane import Lane, Transfer
from kvstore_kernels.packing import open_paged
from kvstore_kernels.storage import FileReader

Say = Callable[[str], None]

LAYOUTS = ("LBNHC", "LBHNC", "BLNHC")


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """The shape of an 8B model's KV in bfloat16, and how much of it is moved at once.

    A block is 2 MiB over all layers; blocks: of the pool. batch: moved by one launch.
    """

    layers: int = 32
    heads: int = 8
    head_size: int = 128
    block_tokens: int = 16
    blocks: int = 2048
    batch: int = 512
    rounds: int = 20
    prefix_blocks: int = 2000
    file_nbytes: int = 1 << 30
    resume: ResumePlan = ResumePlan(  # noqa: RUF009 - frozen
        prompt_tokens=32_000,
        rounds=3,
        dram_bytes=16 << 30,
        file_bytes=64 << 30,
        hbm_bytes=16 << 30,
        exact=False,
    )
    records: ResumePlan = ResumePlan(  # noqa: RUF009 - frozen
        prompt_tokens=32_000,
        rounds=3,
        dram_bytes=24 << 30,
        file_bytes=64 << 30,
        exact=False,
    )

    @property
    def record_nbytes(self) -> int:
        return self.layers * self.heads * self.block_tokens * 2 * self.head_size * 2


def cuda_device() -> torch.device:
    """Return the GPU to measure. Raises Unavailable without one."""
    if not torch.cuda.is_available():
        raise Unavailable("no CUDA device: nothing was measured")
    return torch.device("cuda", torch.cuda.current_device())


def run(
    plan: GpuPlan,
    directory: Path,
    device: torch.device,
    say: Say,
    only: Collection[str] = GPU_STAGES,
) -> dict[str, Any]:
    """Measure on `device`; a daemon's files go to a scratch folder of `directory`.

    only: what of `GPU_STAGES`. say: is told the figures of each when it is over.
    """
    llama = cache(partial(_llama_8b, device))
    stages: dict[str, Callable[[], dict[str, Any]]] = {
        "kernels": lambda: measure_kernels(plan, device),
        "coding": lambda: measure_coding(plan, _layers(plan, "LBHNC", device)),
        "copies": lambda: measure_copies(plan, device),
        "prefix": lambda: measure_prefix(plan, device),
        "files": lambda: measure_files(plan, device, directory),
        "resumed": lambda: _measure_resumed(llama(), plan, directory, say),
        "records": lambda: measure_records(llama(), plan.records, directory, say),
    }
    result: dict[str, Any] = {}
    for stage in GPU_STAGES:
        if stage not in only:
            continue
        say(stage)
        began = time.perf_counter()
        found = stages[stage]()
        took = time.perf_counter() - began
        figures = [
            f"{name} {value:.3g}" for name, value in found.items() if isinstance(value, float)
        ]
        say(f"{stage}, {took:.0f} s: {', '.join(figures)}")
        result |= found
    return {
        **result,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "torch": str(torch.__version__),
        "plan": asdict(plan),
    }


def _measure_resumed(model: Any, plan: GpuPlan, directory: Path, say: Say) -> dict[str, Any]:
    """Return the time to first token of a prompt that was computed before, as shares of a cold
    one's."""
    resumed = run_resumed(model, plan.resume, directory, say)
    return {
        "ttft_32k_hbm_vs_cold": resumed["ttft_hbm_vs_cold"],
        "ttft_32k_dram_vs_cold": resumed["ttft_dram_vs_cold"],
        "ttft_32k_nvme_vs_cold": resumed["ttft_file_vs_cold"],
        "resumed": resumed,
    }


def measure_kernels(plan: GpuPlan, device: torch.device) -> dict[str, Any]:
    """Return the speed of gather and scatter as shares of a copy's, the worst layout's."""
    nbytes = plan.batch * plan.record_nbytes
    source, target = (torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    batch = [(0, int(block)) for block in torch.randperm(plan.blocks)[: plan.batch]]
    seconds: dict[str, dict[str, float]] = {}
    for layout in LAYOUTS:
        paged = open_paged([_layers(plan, layout, device)])
        sides = {
            "copy": partial(target.copy_, source),
            "gather": partial(paged.gather, batch, target),
            "scatter": partial(paged.scatter, target, batch),
        }
        clock = host_seconds if device.type == "cpu" else device_seconds
        seconds[layout] = alternated(sides, plan.rounds, clock)
    worst = {
        side: max(times[side] / times["copy"] for times in seconds.values())
        for side in ("gather", "scatter")
    }
    slowest_s = max(times[side] for times in seconds.values() for side in worst)
    return {
        "gather_vs_copy": 1 / worst["gather"],
        "scatter_vs_copy": 1 / worst["scatter"],
        "kernels": paged.sums,
        "sm_ms_per_gb": 1e3 * slowest_s / (nbytes / 1e9),
        "kernel_seconds": seconds,
        "kernel_nbytes": nbytes,
    }


def measure_copies(plan: GpuPlan, device: torch.device) -> dict[str, Any]:
    """Return the speed of whole copies, pages to arena and back, as shares of a pinned copy's."""
    nbytes = plan.batch * plan.record_nbytes
    opened = open_device(device)
    paged = open_paged([_layers(plan, "LBNHC", device)])
    batch = [(0, block) for block in range(plan.batch)]
    staged = torch.empty(nbytes, dtype=torch.uint8, device=device)
    pinned = opened.pinned(nbytes)
    with arena(3 * nbytes) as client, registered(client, opened) as registration:
        records = Slots(client, plan, "copies", plan.batch).reserve(0, plan.batch)[1]
        transfers = [Transfer(paged, batch, records)]
        direct, bounced = (
            [Lane(opened, plan.record_nbytes, reached) for _ in range(2)]
            for reached in (registration, None)
        )
        mark = opened.mark()
        sides = {
            "pinned_out": lambda: pinned.copy_(staged, non_blocking=True),
            "out": lambda: list(direct[0].read(transfers, mark)),
            "bounced_out": lambda: list(bounced[0].read(transfers, mark)),
            "pinned_in": lambda: staged.copy_(pinned, non_blocking=True),
            "in": lambda: list(direct[1].write(transfers, mark)),
            "bounced_in": lambda: list(bounced[1].write(transfers, mark)),
        }
        seconds = alternated(sides, plan.rounds, host_seconds)
        failure = registration.failure
    return {
        "d2h_vs_pinned": seconds["pinned_out"] / seconds["out"],
        "h2d_vs_pinned": seconds["pinned_in"] / seconds["in"],
        "d2h_bounced_vs_pinned": seconds["pinned_out"] / seconds["bounced_out"],
        "h2d_bounced_vs_pinned": seconds["pinned_in"] / seconds["bounced_in"],
        "registration_failure": failure,
        "copy_seconds": seconds,
        "copy_nbytes": nbytes,
    }


def measure_prefix(
    plan: GpuPlan, device: torch.device, opened: Open = open_coder
) -> dict[str, Any]:
    """Return how fast a long prefix goes to the daemon and comes back, in GB/s of what the engine
    holds, and verify it; then the same with records that are coded on the device. None for these
    where `opened` gives no coder."""
    nbytes = plan.prefix_blocks * plan.record_nbytes
    machine = open_device(device)
    layers = _layers(plan, "LBNHC", device)
    fill(layers, plan.head_size)
    before = [layer[: plan.prefix_blocks].clone() for layer in layers]
    result: dict[str, Any] = {"prefix_nbytes": nbytes}
    with arena(3 * nbytes) as client, registered(client, machine) as registration:
        ways: dict[str, Prefix] = {"": RawPrefix(plan, client, layers, machine, registration)}
        coder = coder_of(plan, layers, opened, lossy=False)
        if coder is not None:
            ways["l3_"] = CodedPrefix(plan, client, coder, machine, registration)
        for name, way in ways.items():
            began = time.perf_counter()
            way.save()
            saved = time.perf_counter()
            for layer in layers:
                layer.zero_()
            machine.mark().synchronize()
            asked = time.perf_counter()
            way.restore()
            restored = time.perf_counter()
            after = [layer[: plan.prefix_blocks] for layer in layers]
            if not all(map(_alike, after, before)):
                raise CorruptBlock("what was restored is not what was saved")
            result[f"{name}save_gb_s"] = nbytes / 1e9 / (saved - began)
            result[f"{name}restore_gb_s"] = nbytes / 1e9 / (restored - asked)
    return result


def measure_files(plan: GpuPlan, device: torch.device, directory: Path) -> dict[str, Any]:
    """Return how fast a file that is not in memory gets into the device's, in GB/s."""
    target = torch.empty(plan.file_nbytes, dtype=torch.uint8, device=device)
    seconds = {}
    with tempfile.NamedTemporaryFile(dir=directory) as file:
        for _ in range(plan.file_nbytes >> 20):
            file.write(os.urandom(1 << 20))
        file.flush()
        os.fsync(file.fileno())
        readers = {"device": FileReader(device), "host": FileReader(torch.device("cpu"))}
        for name, reader in readers.items():
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            into = target if name == "device" else target.cpu()
            seconds[name] = host_seconds(partial(reader.read, Path(file.name), 0, into))
    return {
        "file_to_hbm_how": readers["device"].how,
        "file_to_hbm_gb_s": plan.file_nbytes / 1e9 / seconds["device"],
        "file_to_host_gb_s": plan.file_nbytes / 1e9 / seconds["host"],
    }


def _alike(left: torch.Tensor, right: torch.Tensor) -> bool:
    return bool(torch.equal(left.view(torch.int16), right.view(torch.int16)))


def _layers(plan: GpuPlan, layout: str, device: torch.device) -> list[torch.Tensor]:
    """Return the layers as (B, H, N, C) views of one allocation laid out as `layout`."""
    content = 2 * plan.head_size
    sizes = {
        "L": plan.layers,
        "B": plan.blocks,
        "H": plan.heads,
        "N": plan.block_tokens,
        "C": content,
    }
    physical = torch.zeros([sizes[axis] for axis in layout], dtype=torch.bfloat16, device=device)
    return list(physical.permute([layout.index(axis) for axis in "LBHNC"]).unbind(0))


def _llama_8b(device: torch.device) -> Any:
    """Return a Llama 3.1 8B with random weights: as fast as the real one, and as talkative."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=1 << 17,
        eos_token_id=None,
        dtype=torch.bfloat16,
    )
    with device:
        return LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()


def small(plan: GpuPlan) -> GpuPlan:
    """Return a plan that moves a few MiB, to try the benchmark itself."""
    resume = replace(
        plan.resume, prompt_tokens=500, rounds=1, dram_bytes=1 << 30, hbm_bytes=1 << 30
    )
    return replace(
        plan,
        layers=2,
        heads=2,
        head_size=32,
        blocks=8,
        batch=4,
        rounds=2,
        prefix_blocks=6,
        file_nbytes=1 << 20,
        resume=resume,
        records=replace(resume, hbm_bytes=0),
    )
