"""One completion: its keys, what is stored of it, and what was kept of it on the way.

A state of llama.cpp has only the cells of a sliding window that the next token needs, and a
recurrent model only its newest state. A later prompt resumes at the end of a block. So, where there
is more than full attention, the state is read when the model has come to such an end: before the
last tokens of the prompt, where this prompt parted from an earlier one, and at each block of the
answer, of which the last one counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvstore import BlockKey, KeyChain
from kvstore.client.request_hints import SessionHints
from kvstore_llamacpp.hints import NO_HINTS
from kvstore_llamacpp.state import Bytes, CacheState


@dataclass(frozen=True, slots=True)
class Kept:
    """A state as it was after `blocks` blocks. window: that of the window's cache, None for a
    snapshot. memory: its bytes."""

    blocks: int
    memory: Bytes
    window: CacheState | None


@dataclass(slots=True)
class Turn:
    """prompt: its tokens. stored_blocks: how many blocks the daemon is known to have of it.

    parted_blocks: how many blocks earlier prompts share with it, as far as this process knows.
    is_named: whether the chain is of the complete namespace, so that its keys name blocks.
    reads_scores: the caller wants what only computing gives, so nothing is loaded. hints: what it
    says about its conversation.
    """

    chain: KeyChain
    block_tokens: int
    reads_scores: bool = False
    hints: SessionHints = NO_HINTS
    prompt: list[int] = field(default_factory=list)
    stored_blocks: int = 0
    parted_blocks: int = 0
    request_id: str = ""
    is_named: bool = True
    prompt_seen: bool = False
    saved: bool = False
    kept: dict[int, Kept] = field(default_factory=dict)
    last: Kept | None = None

    def pieces(self, first: int, count: int, *, stops: bool) -> Iterator[tuple[int, int]]:
        """Yield the pieces [begin, end) in which to compute `count` tokens after `first` ones.

        stops: whether a state has to be read on the way. Only the prompt is cut: what comes at once
        behind it are drafts that may be dropped.
        """
        begin = 0
        if stops and not self.prompt_seen:
            last = (first + count - 1) // self.block_tokens
            for blocks in sorted({self.parted_blocks, last}):
                end = blocks * self.block_tokens - first
                if blocks <= last and begin < end < count:
                    yield begin, end
                    begin = end
        yield begin, count

    def keys(self, tokens: Sequence[int]) -> list[BlockKey] | None:
        """Return the keys of what was computed; None if that is not this prompt's."""
        known = tokens[: len(self.prompt)]
        if known != self.prompt[: len(known)]:
            return None
        return self.chain.update(tokens)[: len(tokens) // self.block_tokens]

    def keep(self, kept: Kept) -> Kept | None:
        """Take over a state; return the one that it replaces."""
        if not self.prompt_seen:
            replaced = self.kept.pop(kept.blocks, None)
            self.kept[kept.blocks] = kept
            return replaced
        replaced, self.last = self.last, kept
        return replaced

    def all_kept(self) -> list[Kept]:
        """Return every state that was kept, by length."""
        last = [self.last] if self.last is not None else []
        return sorted([*self.kept.values(), *last], key=lambda each: each.blocks)
