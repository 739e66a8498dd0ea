"""The pages of a worker's KV cache, as its settings want its records."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvstore_kernels.registration import Extents
from kvstore_vllm.coded import Fidelity, Record, open_host_memory
from kvstore_vllm.coded_device import open_device_memory
from kvstore_vllm.pages import Pages, by_block

AUTO_ON_A_GPU: Record = "raw"
"""The codec's kernels have never run on a GPU, and one that fails there ends its engine: for now
they are used by those who ask for them by name."""


def open_pages(
    groups: Sequence[Sequence[torch.Tensor]],
    num_blocks: int,
    extents: Extents = dict,
    *,
    record: Record = "raw",
    fidelity: Fidelity = "exact",
    isas: Sequence[Sequence[str]] = (),
    backends: Sequence[Sequence[str]] = (),
) -> Pages:
    """Return the pages of `groups`, lists of layers as vLLM registers them.

    extents: `Client.extents`, so that a GPU reaches the arena by itself. isas: how the CPU back end
    packs each layer of each group; backends: the name of each layer's attention back end; ""
    unknown. Raises ConfigError if `record` or `fidelity` is not possible.
    """
    layers = [[by_block(layer, num_blocks) for layer in group] for group in groups]
    unknown = [[""] * len(group) for group in groups]
    if layers[0][0].device.type == "cpu":
        return open_host_memory(layers, isas or unknown, record, fidelity)
    if record == "auto" and fidelity == "exact":
        record = AUTO_ON_A_GPU
    return open_device_memory(layers, backends or unknown, extents, record, fidelity)
