"""Which records a completion adds, and where their bytes come from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kvstore_llamacpp.loading import snapshot_nbytes, write_snapshot
from kvstore_llamacpp.namespace import Layers
from kvstore_llamacpp.saving import Run
from kvstore_llamacpp.state import Bytes, CacheState
from kvstore_llamacpp.turn import Turn


def runs_of(
    layers: Sequence[Layers],
    states: Sequence[CacheState],
    turn: Turn,
    blocks: int,
    block_tokens: int,
) -> Iterator[Run]:
    """Yield the records to store of a prefix of `blocks` blocks.

    states: the KV caches of what was computed, none if nothing is new.
    """
    for group, each in enumerate(layers):
        if each.layout is None:
            yield from _snapshots(group, turn, blocks, block_tokens)
        elif each.window_tokens:
            found = _window_blocks(turn, each.window_tokens, blocks, block_tokens)
            yield from _window(group, each, found, block_tokens)
        elif states and blocks > turn.stored_blocks:
            nbytes = each.record_nbytes(block_tokens)
            sources = dict.fromkeys(range(turn.stored_blocks, blocks), states[each.cache])
            count = blocks - turn.stored_blocks
            fill = _filler(sources, block_tokens)
            yield Run(group, turn.stored_blocks, [nbytes] * count, fill)


def _snapshots(group: int, turn: Turn, blocks: int, block_tokens: int) -> Iterator[Run]:
    for kept in turn.all_kept():
        if kept.window is None and kept.blocks <= blocks:

            def fill(_: int, record: Bytes, kept=kept) -> None:  # type: ignore[no-untyped-def]
                write_snapshot(kept.memory, kept.blocks * block_tokens, record)

            yield Run(group, kept.blocks - 1, [snapshot_nbytes(kept.memory)], fill, varies=True)


def _window_blocks(
    turn: Turn, window_tokens: int, blocks: int, block_tokens: int
) -> dict[int, CacheState]:
    """Return which blocks of the window were kept, and in which state: those that a resume at one
    of the kept ends needs."""
    found: dict[int, CacheState] = {}
    for kept in turn.all_kept():
        state, end = kept.window, kept.blocks * block_tokens
        if state is None or kept.blocks > blocks or state.end != end:
            continue
        needed = max(0, end - (window_tokens - 1)) // block_tokens
        first = -(-state.first // block_tokens)
        found |= dict.fromkeys(range(max(needed, first), kept.blocks), state)
    return found


def _window(
    group: int, layers: Layers, found: Mapping[int, CacheState], block_tokens: int
) -> Iterator[Run]:
    """Yield the blocks in runs without gaps."""
    nbytes, fill = layers.record_nbytes(block_tokens), _filler(found, block_tokens)
    wanted = sorted(found)
    begin = 0
    for at in range(1, len(wanted) + 1):
        if at == len(wanted) or wanted[at] != wanted[at - 1] + 1:
            yield Run(group, wanted[begin], [nbytes] * (at - begin), fill)
            begin = at


def _filler(sources: Mapping[int, CacheState], block_tokens: int):  # type: ignore[no-untyped-def]
    def fill(block: int, record: Bytes) -> None:
        sources[block].copy_block(block * block_tokens, block_tokens, record)

    return fill
