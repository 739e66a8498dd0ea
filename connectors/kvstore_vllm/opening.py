"""The pages of a worker's KV cache, as its settings want its records."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from kvstore_kernels.codec.device_trial import AUTO_ON_A_GPU
from kvstore_kernels.registration import Extents
from kvstore_vllm.coded import Fidelity, Record, open_host_memory
from kvstore_vllm.coded_device import open_device_memory
from kvstore_vllm.packings import Packing
from kvstore_vllm.pages import Pages, by_block
from kvstore_vllm.shards import cut_heads

logger = logging.getLogger(__name__)


def open_pages(
    groups: Sequence[Sequence[torch.Tensor]],
    num_blocks: int,
    extents: Extents = dict,
    *,
    record: Record = "raw",
    fidelity: Fidelity = "exact",
    packings: Sequence[Sequence[Packing]] = (),
    shards: int = 1,
    agree: Callable[[bool], bool] = bool,
) -> Pages:
    """Return the pages of `groups`, lists of layers as vLLM registers them.

    extents: `Client.extents`, so that a GPU reaches the arena by itself. packings: of each layer of
    each group; none: they are not known. shards: into how many the heads of a block are cut; each
    has records of its own, and is a group of its own in the pages. agree: tells the engine's other
    workers whether this one can code its blocks, and returns whether all can. Where one cannot, and
    nobody asked for it by name, all store them raw.
    Raises ConfigError if `record` or `fidelity` is not possible, Incompatible for `shards`.
    """
    layers = [
        cut
        for group in groups
        for cut in cut_heads([by_block(layer, num_blocks) for layer in group], shards)
    ]
    packings = packings or [[Packing()] * len(group) for group in groups]
    packings = [each for each in packings for _ in range(shards)]
    on_cpu = layers[0][0].device.type == "cpu"
    is_auto = record == "auto" and fidelity == "exact"
    if is_auto and not on_cpu:
        record = AUTO_ON_A_GPU

    def open_as(record: Record) -> Pages:
        if on_cpu:
            return open_host_memory(layers, packings, record, fidelity, shards=shards)
        return open_device_memory(layers, packings, extents, record, fidelity, shards=shards)

    if not is_auto or record == "raw":
        return open_as(record)
    pages = open_as(record)
    if agree(pages.coded) or not pages.coded:
        return pages
    logger.warning("record=raw reason='another worker of this engine cannot code its blocks'")
    pages.close()
    return open_as("raw")
