"""Pack and unpack paged KV on one device: pages of many layers <-> one record per block.

A layer is a tensor (B, ..., C): B blocks, any inner axes (heads, token slots), C contiguous
elements. Engines lay these axes out in memory as they like (LBHNC, LBNHC, BLHNC, BHLNC, LHBNC name
the order of layer, block, head, slot and content); here only strides differ. The record of a block
is the concatenation over the layers of its (..., C) elements in *logical* order:

    record[b] = bytes(layer_0[b]) | bytes(layer_1[b]) | ...

so records written under one layout can be read under another. One indexed copy per layer, moved in
the widest integers that sizes and strides allow: byte by byte runs at an eighth of the bandwidth.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def page_nbytes(layer: Tensor) -> int:
    """Return the bytes one block of `layer` holds."""
    return int(math.prod(layer.shape[1:]) * layer.element_size())


def record_nbytes(layers: Sequence[Tensor]) -> int:
    """Return the bytes of one block over all layers."""
    return sum(page_nbytes(layer) for layer in layers)


def gather_blocks(layers: Sequence[Tensor], block_ids: Sequence[int], records: Tensor) -> None:
    """Pack the blocks `block_ids` of all layers into records[i].

    layers: (B, ..., C) each, C contiguous, any dtype, all on one device.
    records: (len(block_ids), >= record_nbytes) uint8 on that device, rows contiguous; on CUDA valid
    after the current stream has reached this point.
    Raises ValueError if shapes, devices or block ids do not fit.
    """
    _check(layers, block_ids, records)
    ids = torch.tensor(block_ids, dtype=torch.int64, device=records.device)
    for pages, rows in _aligned(layers, records):
        torch.index_select(pages, 0, ids, out=rows)


def scatter_blocks(records: Tensor, layers: Sequence[Tensor], block_ids: Sequence[int]) -> None:
    """Unpack records[i] into the blocks `block_ids` of all layers; the inverse of `gather_blocks`.

    Same shapes and errors; in addition a block id given twice is a ValueError.
    """
    _check(layers, block_ids, records)
    if len(set(block_ids)) != len(block_ids):
        raise ValueError("a block id is given twice")
    ids = torch.tensor(block_ids, dtype=torch.int64, device=records.device)
    for pages, rows in _aligned(layers, records):
        pages.index_copy_(0, ids, rows)


def _aligned(layers: Sequence[Tensor], records: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield per layer its pages and their place in the records, both viewed as wide words."""
    ends = list(accumulate(page_nbytes(layer) for layer in layers))
    for layer, end in zip(layers, ends, strict=True):
        size = page_nbytes(layer)
        columns = records[:, end - size : end]
        word = _widest_word(layer, columns)
        pages = layer.view(word)
        yield pages, columns.view(word).unflatten(1, pages.shape[1:])


def _widest_word(layer: Tensor, columns: Tensor) -> torch.dtype:
    """Return the widest integer dtype that both views can be reinterpreted as."""
    nbytes = [layer.shape[-1] * layer.element_size(), columns.shape[1]]
    for tensor in (layer, columns):
        nbytes += [stride * tensor.element_size() for stride in tensor.stride()[:-1]]
        nbytes += [tensor.storage_offset() * tensor.element_size(), tensor.data_ptr()]
    common = math.gcd(*nbytes)
    return next(word for word in _WORDS if common % word.itemsize == 0)


def _check(layers: Sequence[Tensor], block_ids: Sequence[int], records: Tensor) -> None:
    if not layers or any(layer.dim() < 2 or layer.stride(-1) != 1 for layer in layers):
        raise ValueError("every layer is (B, ..., C) with C contiguous")
    if any(layer.device != records.device for layer in layers):
        raise ValueError("layers and records are on different devices")
    shape = (len(block_ids), record_nbytes(layers))
    if records.dtype != torch.uint8 or records.dim() != 2 or records.stride(1) != 1:
        raise ValueError("records are (n, record_nbytes) uint8 with contiguous rows")
    if records.shape[0] != shape[0] or records.shape[1] < shape[1]:
        raise ValueError(f"records of shape {tuple(records.shape)} cannot hold {shape}")
    num_blocks = min(layer.shape[0] for layer in layers)
    if block_ids and not 0 <= min(block_ids) <= max(block_ids) < num_blocks:
        raise ValueError(f"a block id is out of 0..{num_blocks - 1}")
