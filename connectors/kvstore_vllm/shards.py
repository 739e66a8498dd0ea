"""Which heads and layers of a block each worker of an engine holds, as parts of a namespace.

By default a block has one shard for each worker. With the setting `head_shards` it has as many as
that says, whatever the degree: a worker holds several shards that follow each other, each with its
share of the worker's heads. So engines of different degrees store and load the same records. The
idea is that of SGLang's HiCache, which splits pages by heads for the same reason.

Pages know nothing of it: each shard of a group is a group of its own to them. Nor do they know of
the stages of a pipeline, whose layers are stored in groups of their own: see `stages`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvstore.model.block import Namespace, Part, Span
from kvstore.model.errors import Incompatible
from kvstore_vllm.metadata import SaveOrder

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Shards:
    """The shards of every group that one worker holds: `count` from `first` on.

    tables, groups: of which groups of the engine its stage has layers, and which groups of the
    namespace these are; both empty: of all, and the same.
    """

    first: int
    count: int = 1
    tables: tuple[int, ...] = ()
    groups: tuple[int, ...] = ()

    def __contains__(self, part: object) -> bool:
        return (
            isinstance(part, Part)
            and self.first <= part.shard < self.first + self.count
            and (not self.groups or part.group in self.groups)
        )

    def pages_of(self, part: Part) -> int:
        """Return which group of this worker's pages holds a part."""
        group = self.groups.index(part.group) if self.groups else part.group
        return group * self.count + part.shard - self.first

    def part_of(self, pages: int) -> Part:
        """Return the part that a group of this worker's pages holds."""
        group, shard = divmod(pages, self.count)
        return Part(self.groups[group] if self.groups else group, self.first + shard)

    def of_pages(self, order: SaveOrder) -> SaveOrder:
        """Return an order with spans for groups of pages instead of those of the engine: none for
        a group of which this worker has no layer."""
        if self.count == 1 and not self.tables:
            return order
        spans = tuple(
            replace(span, group=group * self.count + shard)
            for span in order.spans
            if (group := self._place_of(span.group)) is not None
            for shard in range(self.count)
        )
        return replace(order, spans=spans)

    def spans_of(self, order: SaveOrder) -> list[Span]:
        """Return the parts of the blocks of an order for groups of pages."""
        return [
            Span(self.part_of(span.group), span.begin, span.begin + len(span.device_blocks))
            for span in order.spans
        ]

    def _place_of(self, table: int) -> int | None:
        if not self.tables:
            return table
        return self.tables.index(table) if table in self.tables else None


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


def with_fine_parts(namespace: Namespace, bases: Sequence[Span]) -> list[Span]:
    """Return base parts, and behind them their fine parts in the same order, if they have some."""
    fine = {namespace.groups[index].refines: index for index in namespace.fine}
    return [
        *bases,
        *(
            Span(Part(fine[part.group], part.shard), begin, end)
            for part, begin, end in bases
            if part.group in fine
        ),
    ]


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
