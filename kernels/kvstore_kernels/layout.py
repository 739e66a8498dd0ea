"""How paged KV lies in memory, in the tables that the kernels of `cuda/paged.cu` read.

A layer (B, ..., C) is described by the address of its block 0, the distance of two blocks, and the
page of one block: runs of contiguous bytes and up to three axes of them. Axes that follow each
other in memory are merged, so a page in one piece is one run whatever its axes are called.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kvstore_kernels.paged import page_nbytes

LEAF_NBYTES = 64 * 1024
ALIGNMENT = 256
RUN_AXES = 3
WORDS = (16, 4, 1)

LAYER = np.dtype(
    [
        ("base", "<u8"),
        ("block_stride", "<i8"),
        ("strides", "<i8", (RUN_AXES,)),
        ("count1", "<u4"),
        ("count2", "<u4"),
        ("run", "<u4"),
        ("nbytes", "<u4"),
        ("begin", "<u8"),
    ]
)
RECORD = np.dtype(
    [
        ("address", "<u8"),
        ("nbytes", "<u8"),
        ("block", "<i8"),
        ("first_layer", "<u4"),
        ("last_layer", "<u4"),
        ("first_leaf", "<u8"),
    ]
)
Table = npt.NDArray[np.void]


class Layout:
    """Groups of layers as the kernels see them; addresses stay valid while the tensors do.

    layers: LAYER, of all groups. spans: which of them each group has. num_blocks: per group.
    word: the widest access, in bytes, that all of their addresses and sizes allow.
    """

    def __init__(self, groups: Sequence[Sequence[Tensor]]) -> None:
        """Raise ValueError, naming the layer, for one that cannot be described."""
        if not groups or not all(groups):
            raise ValueError("every group has at least one layer")
        ends = list(accumulate(map(len, groups)))
        self.spans = [(end - len(group), end) for group, end in zip(groups, ends, strict=True)]
        self.num_blocks = [min(layer.shape[0] for layer in group) for group in groups]
        self.layers: Table = np.concatenate([_describe(group) for group in groups])
        self.record_nbytes = [sum(map(page_nbytes, group)) for group in groups]
        sizes = [
            int(each)
            for name in ("base", "block_stride", "run", "begin", "nbytes")
            for each in self.layers[name]
        ]
        common = math.gcd(*sizes, *map(int, self.layers["strides"].flat))
        self.word = next(word for word in WORDS if common % word == 0)

    def records(self, batch: Sequence[tuple[int, int]], address: int) -> Table:
        """Describe the records of (group, block) pairs, one after another from `address` on.

        Raises ValueError for an id that is out of range.
        """
        pairs = np.asarray(batch, np.int64).reshape(-1, 2)
        groups, blocks = pairs[:, 0], pairs[:, 1]
        if ((groups < 0) | (groups >= len(self.spans))).any():
            raise ValueError(f"a group is out of 0..{len(self.spans) - 1}")
        wrong = (blocks < 0) | (blocks >= np.asarray(self.num_blocks)[groups])
        if wrong.any():
            group, block = pairs[wrong][0]
            raise ValueError(f"block id {block} is out of 0..{self.num_blocks[group] - 1}")
        table = np.zeros(len(pairs), RECORD)
        nbytes = np.asarray(self.record_nbytes)[groups]
        table["nbytes"], table["block"] = nbytes, blocks
        table["address"] = address + _before(-(-nbytes // ALIGNMENT) * ALIGNMENT)
        table["first_leaf"] = _before(-(-nbytes // LEAF_NBYTES))
        table["first_layer"], table["last_layer"] = np.asarray(self.spans)[groups].T
        return table


def _before(sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the sum of all sizes before each."""
    return np.cumsum(sizes) - sizes


def _describe(group: Sequence[Tensor]) -> Table:
    table = np.zeros(len(group), LAYER)
    begin = 0
    for index, layer in enumerate(group):
        if layer.dim() < 2 or layer.stride(-1) != 1 or not layer.numel():
            raise ValueError(f"layer {index} is not (B, ..., C) with C contiguous")
        if any(n > 1 and not step for n, step in zip(layer.shape, layer.stride(), strict=True)):
            raise ValueError(f"layer {index} has several elements in one place")
        nbytes = page_nbytes(layer)
        if nbytes >= 1 << 32:
            raise ValueError(f"layer {index} has pages of {nbytes:,} bytes; 4 GiB are too much")
        *axes, (run, _) = _merged(layer)
        if len(axes) > RUN_AXES:
            raise ValueError(f"layer {index} has pages in more than {RUN_AXES} axes of runs")
        axes = [(1, 0)] * (RUN_AXES - len(axes)) + axes
        counts, strides = zip(*axes, strict=True)
        stride = layer.stride(0) * layer.element_size()
        address = layer.data_ptr()
        table[index] = (address, stride, strides, counts[1], counts[2], run, nbytes, begin)
        begin += nbytes
    return table


def _merged(layer: Tensor) -> list[tuple[int, int]]:
    """Return the axes of a page as (count, stride), outermost first, in bytes; the last is a run.

    Axes of one element are left out, and two that are one in memory become one.
    """
    itemsize = layer.element_size()
    merged = [(layer.shape[-1] * itemsize, 1)]
    for count, stride in _inner(layer):
        inner_count, inner_stride = merged[0]
        if stride * itemsize == inner_count * inner_stride:
            merged[0] = (count * inner_count, inner_stride)
        else:
            merged.insert(0, (count, stride * itemsize))
    return merged


def _inner(layer: Tensor) -> Iterator[tuple[int, int]]:
    """Yield (elements, stride) of the axes between B and C, the innermost first."""
    for axis in range(layer.dim() - 2, 0, -1):
        if layer.shape[axis] > 1:
            yield layer.shape[axis], layer.stride(axis)
