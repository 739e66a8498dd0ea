"""What `paged` must equal, bit for bit: one block, one layer, one plain copy at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def gather_reference(layers: Sequence[Tensor], block_ids: Sequence[int]) -> Tensor:
    """Return (n, record_nbytes) uint8: per block its layers' elements in logical order."""
    records = [
        torch.cat([layer[block].contiguous().flatten().view(torch.uint8) for layer in layers])
        for block in block_ids
    ]
    return torch.stack(records)


def scatter_reference(records: Tensor, layers: Sequence[Tensor], block_ids: Sequence[int]) -> None:
    """Write records[i] into block block_ids[i] of every layer."""
    for record, block in zip(records, block_ids, strict=True):
        begin = 0
        for layer in layers:
            page = layer[block]
            end = begin + page.numel() * page.element_size()
            page.copy_(record[begin:end].clone().view(page.dtype).view(page.shape))
            begin = end
