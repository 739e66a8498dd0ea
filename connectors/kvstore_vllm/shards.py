"""Which heads of a block each worker of a tensor-parallel engine holds, as parts of a namespace.

By default a block has one shard for each worker. With the setting `head_shards` it has as many as
that says, whatever the degree: a worker holds several shards that follow each other, each with its
share of the worker's heads. So engines of different degrees store and load the same records. The
idea is that of SGLang's HiCache, which splits pages by heads for the same reason.

Pages know nothing of it: each shard of a group is a group of its own to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvstore.model.block import Part
from kvstore.model.errors import Incompatible
from kvstore_vllm.metadata import SaveOrder

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Shards:
    """The shards of every group that one worker holds: `count` from `first` on."""

    first: int
    count: int = 1

    def __contains__(self, shard: object) -> bool:
        return isinstance(shard, int) and self.first <= shard < self.first + self.count

    def pages_of(self, part: Part) -> int:
        """Return which group of this worker's pages holds a part."""
        return part.group * self.count + part.shard - self.first

    def part_of(self, pages: int) -> Part:
        """Return the part that a group of this worker's pages holds."""
        group, shard = divmod(pages, self.count)
        return Part(group, self.first + shard)

    def of_pages(self, order: SaveOrder) -> SaveOrder:
        """Return an order with spans for groups of pages instead of those of the engine."""
        if self.count == 1:
            return order
        spans = tuple(
            replace(span, group=span.group * self.count + shard)
            for span in order.spans
            for shard in range(self.count)
        )
        return replace(order, spans=spans)


def held_shards(rank: int, workers: int, head_shards: int) -> Shards:
    """Return what one of `workers` that share the heads of a block holds.

    rank: of the worker among them. head_shards: how many shards a block has; 0: one a worker.
    Raises Incompatible if they cannot be dealt out.
    """
    if not head_shards:
        return Shards(rank)
    if head_shards % workers:
        raise Incompatible(
            f'"head_shards": {head_shards} cannot be dealt out to {workers} tensor-parallel '
            f"workers; use a multiple of {workers}, or leave it out"
        )
    count = head_shards // workers
    return Shards(rank * count, count)


def cut_heads(layers: Sequence[torch.Tensor], count: int) -> list[list[torch.Tensor]]:
    """Return `count` views of layers (B, H, ..., C), each with its share of the heads.

    Raises Incompatible if the heads of a layer cannot be shared out evenly.
    """
    if count == 1:
        return [list(layers)]
    heads = sorted({int(layer.shape[1]) for layer in layers})
    if any(each % count for each in heads):
        raise Incompatible(
            f"a worker with {heads} heads in a layer cannot cut them into {count} shards; "
            'use a smaller "head_shards", or leave it out'
        )
    return [[layer.chunk(count, dim=1)[shard] for layer in layers] for shard in range(count)]
