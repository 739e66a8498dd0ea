"""How many blocks of a prefix are a hit, and which parts a resume there reads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from kvstore.model.block import Namespace, Part, Span


def longest_hit(namespace: Namespace, masks: Sequence[int], skip_blocks: int = 0) -> int:
    """Return the largest n for which every group has the blocks a resume after n blocks needs.

    masks[i]: bit g is set when group g of block i is there. Blocks before `skip_blocks` are the
    caller's own and need not be. Returns `skip_blocks` when nothing beyond them can be used.
    """
    if masks.count((1 << len(namespace.groups)) - 1) == len(masks):
        return len(masks)  # everything is there, found out at the speed of C
    limit = reach(namespace, masks, skip_blocks)
    if limit <= skip_blocks or not namespace.has_windows:
        return limit
    return _longest_window_hit(namespace, masks, skip_blocks, limit)


def reach(namespace: Namespace, masks: Sequence[int], skip_blocks: int = 0) -> int:
    """Return how many blocks from the first on have all groups that a resume needs of each block:
    no hit is longer, and those of windows decide which shorter ones there are."""
    bits = sum(1 << i for i, group in enumerate(namespace.groups) if not group.window_tokens)
    limit = skip_blocks
    for mask in islice(masks, skip_blocks, None):
        if mask & bits != bits:
            break
        limit += 1
    return limit


def _longest_window_hit(
    namespace: Namespace, masks: Sequence[int], skip_blocks: int, limit: int
) -> int:
    """Shorten `limit` until the window of every window group is there, in one pass backwards."""
    runs = []  # per window size: how many blocks in a row end at i and have all its groups
    for window in {group.window_tokens for group in namespace.groups if group.window_tokens}:
        bits = sum(
            1 << index for index, g in enumerate(namespace.groups) if g.window_tokens == window
        )
        spec = next(group for group in namespace.groups if group.window_tokens == window)
        run, lengths = 0, []
        for mask in masks[:limit]:
            run = run + 1 if mask & bits == bits else 0
            lengths.append(run)
        runs.append((spec, lengths))
    for hit in range(limit, skip_blocks, -1):
        for spec, lengths in runs:
            first = spec.blocks_needed(hit, namespace.block_tokens).start
            if lengths[hit - 1] < hit - max(first, skip_blocks):
                break
        else:
            return hit
    return skip_blocks


def needed_spans(
    namespace: Namespace, hit_blocks: int, skip_blocks: int = 0, *, fine: bool = False
) -> tuple[Span, ...]:
    """Return the parts a resume after `hit_blocks` reads, beyond the caller's own blocks.

    fine: those that refine others as well, behind all others.
    """
    spans = []
    groups = [(i, group) for i, group in enumerate(namespace.groups) if group.refines == -1]
    if fine:
        groups += [(i, namespace.groups[i]) for i in namespace.fine]
    for index, group in groups:
        needed = group.blocks_needed(hit_blocks, namespace.block_tokens)
        begin = max(needed.start, skip_blocks)
        if begin < hit_blocks:
            spans += [Span(Part(index, shard), begin, hit_blocks) for shard in range(group.shards)]
    return tuple(spans)
