"""How fast a device codes records: raw bytes a second, checksums included, beside a copy of them.

The values are made up: channels of several sizes, a few of them large, as of a model. Their number
of escapes, and so L3's size, is a model's within a few percent; EP's size does not depend on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from kvstore import Unavailable
from kvstore_bench.gpu.clock import alternated, device_seconds, host_seconds
from kvstore_bench.gpu.nvcomp import measure_nvcomp_ans
from kvstore_kernels.codec.coder import Memory
from kvstore_kernels.codec.device_coder import DeviceCoder
from kvstore_kernels.codec.device_passes import Arrived, OnDevice
from kvstore_kernels.codec.device_trial import open_coder
from kvstore_kernels.codec.places import Axis, Place, Shape
from kvstore_kernels.codec.record import DType
from kvstore_kernels.packing import open_paged

if TYPE_CHECKING:
    from kvstore_bench.gpu.gpu import GpuPlan

Open = Callable[..., DeviceCoder | None]
LARGE_EVERY = 16  # one channel of so many is large
FIELDS = ("l3_encode_tb_s", "l3_decode_tb_s", "ep_encode_tb_s", "ep_decode_tb_s")


def measure_coding(
    plan: GpuPlan, layers: Sequence[torch.Tensor], opened: Open = open_coder
) -> dict[str, Any]:
    """Return the speed of encoding and decoding `plan.batch` blocks, in TB/s of raw bytes.

    layers: (B, H, N, 2C), keys and values side by side; what they hold is overwritten. None for
    each where the kernels are not to be had; the log says why. `nvcomp_ans`: what nvCOMP makes of
    the same values, None where it is not installed.
    """
    fill(layers, plan.head_size)
    result: dict[str, Any] = dict.fromkeys(FIELDS)
    result["nvcomp_ans"] = measure_nvcomp_ans(layers, plan.batch, plan.rounds)
    for form, lossy in (("l3", False), ("ep", True)):
        coder = coder_of(plan, layers, opened, lossy=lossy)
        if coder is None:
            return {**result, "coding": False}
        result |= _measure(plan, coder, form, layers[0].device)
    return {**result, "coding": True}


def _measure(
    plan: GpuPlan, coder: DeviceCoder, form: str, device: torch.device
) -> dict[str, float]:
    """Return the fields of one form, once what was decoded is what was encoded."""
    nbytes = plan.batch * plan.record_nbytes
    blocks = list(range(plan.batch))
    staged = torch.empty(plan.batch * coder.room_nbytes(), dtype=torch.uint8, device=device)
    made = coder.encode(blocks, staged).finish()
    arrived = [_arrived(each) for each in made]
    found = coder.decode(blocks, staged, arrived).finish()
    if [each.base for each in found] != [each.base.checksum for each in made]:
        raise Unavailable(f"{form} records did not come back as they were made")
    source, target = (torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    sides = {
        "copy": partial(target.copy_, source),
        "encode": partial(coder.encode, blocks, staged),
        "decode": partial(coder.decode, blocks, staged, arrived),
    }
    clock = host_seconds if device.type == "cpu" else device_seconds
    seconds = alternated(sides, plan.rounds, clock)
    stored = sum(each.base.nbytes + (each.fine.nbytes if each.fine else 0) for each in made)
    return {
        f"{form}_encode_tb_s": nbytes / 1e12 / seconds["encode"],
        f"{form}_decode_tb_s": nbytes / 1e12 / seconds["decode"],
        f"{form}_encode_vs_copy": seconds["copy"] / seconds["encode"],
        f"{form}_decode_vs_copy": seconds["copy"] / seconds["decode"],
        f"{form}_ratio": nbytes / stored,
    }


def _arrived(made: OnDevice) -> Arrived:
    base, fine = made.base, made.fine
    return Arrived(base.begin, base.nbytes, *(fine or ()))


def coder_of(
    plan: GpuPlan, layers: Sequence[torch.Tensor], opened: Open, *, lossy: bool
) -> DeviceCoder | None:
    """Return what `opened` gives for layers (B, H, N, 2C), keys and values side by side."""
    shape = Shape([_places(layer, plan.head_size) for layer in layers], DType.BF16)
    memory = Memory.of(layers)
    return opened(shape, memory, (open_paged([list(layers)]), 0), lossy=lossy)


def _places(layer: torch.Tensor, head_size: int) -> list[Place]:
    """Return where keys and values of a layer (B, H, N, 2C) lie in a block."""
    heads, tokens = (Axis(layer.shape[axis], layer.stride(axis)) for axis in (1, 2))
    channels = Axis(head_size, 1)
    return [
        Place(kind, heads, tokens, channels, first) for kind, first in (("K", 0), ("V", head_size))
    ]


def fill(layers: Sequence[torch.Tensor], head_size: int) -> None:
    """Make up values: channels of several sizes, a few of them large."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.exp2(torch.randn(2 * head_size, generator=generator) * 1.5)
    scale[3::LARGE_EVERY] *= 30
    for layer in layers:
        layer.normal_().mul_(scale.to(layer.device, layer.dtype))
