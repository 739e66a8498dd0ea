"""`kvstore bench gpu`: the way between HBM and the daemon's memory, beside what the links can do.

Kernels: gather and scatter of an 8B-shaped KV cache, beside a device copy of the same bytes. While
they run they hold the SMs, so their time per GB is what saving and loading takes from the model.
Copies: records between pages and the daemon's arena, beside one plain pinned copy of as many bytes.
Resume: time to first token of a 32k-token prompt with the transformers connector.

Both sides of a ratio alternate in one run; medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvstore import Client, Group, Namespace, Part, Span, Unavailable
from kvstore.testing.daemon import Daemon
from kvstore_bench.resumed import ResumePlan
from kvstore_bench.resumed import run as run_resumed
from kvstore_bench.store import await_arena, chain
from kvstore_kernels.packing import PagedKV

Say = Callable[[str], None]

LAYOUTS = ("LBNHC", "LBHNC", "BLNHC")
HEAD_START_CYCLES = 20_000_000  # about 10 ms


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """The shape of an 8B model's KV in bfloat16, and how much of it is moved at once.

    A block is 2 MiB over all layers; blocks: of the pool. batch: moved by one launch.
    """

    layers: int = 32
    heads: int = 8
    head_size: int = 128
    block_tokens: int = 16
    blocks: int = 1024
    batch: int = 512
    rounds: int = 20
    resume: ResumePlan = ResumePlan(  # noqa: RUF009 - frozen
        prompt_tokens=32_000,
        rounds=3,
        dram_bytes=16 << 30,
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


def run(plan: GpuPlan, directory: Path, device: torch.device, say: Say) -> dict[str, Any]:
    """Measure on `device`; a daemon's files go to a scratch folder of `directory`."""
    say("kernels")
    kernels = measure_kernels(plan, device)
    say("copies")
    copies = measure_copies(plan, device)
    say("a resumed prompt of 32k tokens")
    resumed = run_resumed(_llama_8b(device), plan.resume, directory, say)
    return {
        **kernels,
        **copies,
        "ttft_32k_dram_vs_cold": resumed["ttft_dram_vs_cold"],
        "ttft_32k_nvme_vs_cold": resumed["ttft_file_vs_cold"],
        "resumed": resumed,
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "plan": asdict(plan),
    }


def measure_kernels(plan: GpuPlan, device: torch.device) -> dict[str, Any]:
    """Return the speed of gather and scatter as shares of a copy's, the worst layout's."""
    nbytes = plan.batch * plan.record_nbytes
    source, target = (torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    batch = [(0, int(block)) for block in torch.randperm(plan.blocks)[: plan.batch]]
    seconds: dict[str, dict[str, float]] = {}
    for layout in LAYOUTS:
        paged = PagedKV([_layers(plan, layout, device)])
        sides = {
            "copy": partial(target.copy_, source),
            "gather": partial(paged.gather, batch, target),
            "scatter": partial(paged.scatter, target, batch),
        }
        clock = _host_seconds if device.type == "cpu" else _device_seconds
        seconds[layout] = _alternated(sides, plan.rounds, clock)
    worst = {
        side: max(times[side] / times["copy"] for times in seconds.values())
        for side in ("gather", "scatter")
    }
    slowest_s = max(times[side] for times in seconds.values() for side in worst)
    return {
        "gather_vs_copy": 1 / worst["gather"],
        "scatter_vs_copy": 1 / worst["scatter"],
        "sm_ms_per_gb": 1e3 * slowest_s / (nbytes / 1e9),
        "kernel_seconds": seconds,
        "kernel_nbytes": nbytes,
    }


def measure_copies(plan: GpuPlan, device: torch.device) -> dict[str, Any]:
    """Return the speed of whole copies, pages to arena and back, as shares of a pinned copy's."""
    from kvstore_kernels.staging import Staging

    nbytes = plan.batch * plan.record_nbytes
    layers = _layers(plan, "LBNHC", device)
    blocks = list(range(plan.batch))
    staged = torch.empty(nbytes, dtype=torch.uint8, device=device)
    pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    lane = Staging(device, plan.record_nbytes)
    arena_nbytes = -(-3 * nbytes >> 30) << 30
    with ExitStack() as stack:
        settings = (f"dram.capacity={arena_nbytes}", "dram.extent=1GiB")
        daemon = stack.enter_context(Daemon(*settings, file=False)).start()
        client = stack.enter_context(Client(daemon.target))
        await_arena(client, arena_nbytes)
        records = _slots(client, plan)
        mark = torch.cuda.current_stream(device).record_event()
        sides = {
            "pinned_out": lambda: pinned.copy_(staged, non_blocking=True),
            "out": lambda: lane.read(layers, blocks, records, mark),
            "pinned_in": lambda: staged.copy_(pinned, non_blocking=True),
            "in": lambda: lane.write(layers, blocks, records, mark),
        }
        seconds = _alternated(sides, plan.rounds, _host_seconds)
    return {
        "d2h_vs_pinned": seconds["pinned_out"] / seconds["out"],
        "h2d_vs_pinned": seconds["pinned_in"] / seconds["in"],
        "copy_seconds": seconds,
        "copy_nbytes": nbytes,
    }


def _slots(client: Client, plan: GpuPlan) -> list[memoryview]:
    """Reserve a slot for each record of a batch."""
    namespace = Namespace(
        plan.block_tokens, (Group("all", plan.record_nbytes),), (("bench", "gpu"),)
    )
    grant = client.reserve(
        client.register(namespace),
        chain(namespace.id, plan.batch),
        first_block=0,
        parent=None,
        spans=[Span(Part(0, 0), 0, plan.batch)],
        wait_s=10.0,
    )
    if grant.refused:
        raise Unavailable(f"the arena refused {grant.refused} of {plan.batch} records")
    return [client.view(slot) for slot in grant.slots if slot is not None]


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


def _alternated(
    sides: Mapping[str, Callable[[], Any]], rounds: int, seconds_of: Callable[[Any], float]
) -> dict[str, float]:
    """Return the median seconds of each side, the sides taking turns, after one warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, work in sides.items():
            took = seconds_of(work)
            if number:
                seconds[name].append(took)
    return {name: statistics.median(values) for name, values in seconds.items()}


def _host_seconds(work: Callable[[], Any]) -> float:
    """Return how long `work` takes, until the device, if there is one, has done it."""
    started = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _device_seconds(work: Callable[[], Any]) -> float:
    """Return how long the device takes for what `work` puts on the current stream.

    The stream is kept busy meanwhile: else it would wait for the host, which is not measured.
    """
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(HEAD_START_CYCLES)
    began.record()
    work()
    ended.record()
    torch.cuda.synchronize()
    return float(began.elapsed_time(ended)) / 1e3


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
    resume = replace(plan.resume, prompt_tokens=500, rounds=1, dram_bytes=1 << 30)
    return replace(
        plan, layers=2, heads=2, head_size=32, blocks=8, batch=4, rounds=2, resume=resume
    )
