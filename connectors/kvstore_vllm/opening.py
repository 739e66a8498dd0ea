"""The pages of a worker's KV cache, as its settings want its records."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvstore.model.errors import ConfigError
from kvstore_kernels.registration import Extents
from kvstore_vllm.coded import DO_WITHOUT, Fidelity, Record, open_host_memory
from kvstore_vllm.pages import DeviceMemory, Pages, by_block


def open_pages(
    groups: Sequence[Sequence[torch.Tensor]],
    num_blocks: int,
    extents: Extents = dict,
    *,
    record: Record = "raw",
    fidelity: Fidelity = "exact",
    isas: Sequence[Sequence[str]] = (),
) -> Pages:
    """Return the pages of `groups`, lists of layers as vLLM registers them.

    extents: `Client.extents`, so that a GPU reaches the arena by itself. isas: how the CPU back end
    packs each layer of each group, "" unknown. Raises ConfigError if `record` or `fidelity` is not
    possible.
    """
    layers = [[by_block(layer, num_blocks) for layer in group] for group in groups]
    if layers[0][0].device.type == "cpu":
        isas = isas or [[""] * len(group) for group in groups]
        return open_host_memory(layers, isas, record, fidelity)
    if fidelity == "ep":
        raise ConfigError(f'"fidelity": "ep" is not possible on a GPU yet; {DO_WITHOUT}')
    if record == "l3":
        raise ConfigError('"record": "l3" is not possible on a GPU yet; use "auto" or "raw"')
    return DeviceMemory(layers, extents)
