"""The KV cache of vLLM's back ends on GPUs, and pages that code it by the kernels for the device,
compiled for the processor, on a device that does everything late."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence

import torch

from kvstore_kernels.codec.device_coder import DeviceCoder
from kvstore_vllm.coded_device import CodedDeviceMemory, open_device_memory
from kvstore_vllm.packings import Packing
from kvstore_vllm.pages import by_block
from tests.kernels.codec.device import open_on_host
from tests.kernels.late_device import LateDevice, LateEvent

BLOCKS, HEADS, TOKENS, CHANNELS = 12, 2, 16, 64
LAYOUTS = ["LBHNC", "LBNHC", "BLHNC", "BHLNC", "LHBNC", "BLNHC", "LBHNC in kernel blocks"]


def device_layers(
    layout: str,
    layers: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    tokens: int = TOKENS,
) -> list[torch.Tensor]:
    """Return layers as vLLM registers them, (B, H, N, 2D), side by side in one allocation.

    In kernel blocks: a block is two of them, as where a back end takes no more tokens at once.
    """
    axes, _, kernel_blocks = layout.partition(" in ")
    parts = 2 if kernel_blocks else 1
    sizes = {"L": layers, "B": BLOCKS * parts, "H": HEADS, "N": tokens // parts, "C": 2 * CHANNELS}
    physical = torch.zeros([sizes[axis] for axis in axes], dtype=dtype, device=device)
    logical = physical.permute([axes.index(axis) for axis in "LBHNC"])
    generator = torch.Generator().manual_seed(layers)
    logical.copy_(torch.randn(logical.shape, generator=generator))
    return list(logical.unbind(0))


def blocks_of(layers: list[torch.Tensor]) -> list[torch.Tensor]:
    """View layers by block, whatever their kernel blocks are."""
    return [by_block(layer, BLOCKS) for layer in layers]


class SharedLateDevice(LateDevice):
    """The same for threads: one at a time has it come to an event."""

    def __init__(self, seed: int, *, registers: bool = True) -> None:
        super().__init__(seed, registers=registers)
        self._lock = threading.Lock()

    def advance_until(self, event: LateEvent) -> None:
        with self._lock:
            super().advance_until(event)


def on_host(library: ctypes.CDLL) -> Callable[..., DeviceCoder]:
    """Return what opens coders by kernels compiled for the processor."""

    def opened(shape, layers, pages, places=(), *, lossy=False) -> DeviceCoder:
        return DeviceCoder(shape, layers, pages, open_on_host(library), places, lossy=lossy)

    return opened


def late_pages(
    groups: list[list[torch.Tensor]],
    library: ctypes.CDLL,
    device: LateDevice,
    extents=dict,
    fidelity: str = "exact",
    *,
    packings: Sequence[Sequence[Packing]] = (),
) -> CodedDeviceMemory:
    """Return coded pages of layers on `device`, by block. packings: by default, keys and values."""
    packings = packings or [[Packing("FLASH_ATTN")] * len(layers) for layers in groups]
    pages = open_device_memory(
        groups, packings, extents, "auto", fidelity, opened=on_host(library), device=device
    )
    assert isinstance(pages, CodedDeviceMemory)
    return pages
