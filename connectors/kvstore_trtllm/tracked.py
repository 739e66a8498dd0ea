"""One request as the scheduler half follows it: its keys, its blocks, what of it is stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.model.block import BlockKey
from kvstore.model.keys import KeyChain
from kvstore_trtllm.staged import Staged

_BEYOND_TOKENS = (
    "encoder_input_features",
    "lora_task_id",
    "mrope_rotary_cos_sin",
    "multimodal_embedding",
    "multimodal_hashes",
    "prompt_embedding_table",
    "py_multimodal_data",
    "skip_cross_attn_blocks",
)
"""Of a request: what else its KV depends on. Its blocks are neither loaded nor saved."""
_WANTS_PROMPT = ("return_context_logits", "py_return_context_logits")
"""Of a request: it wants something of every token of the prompt, so all are computed."""

Order = tuple[tuple[BlockKey, ...], int, BlockKey | None, tuple[int, ...]]


def bypasses(request: Any) -> bool:
    """Whether the tokens do not tell what the KV of a request is, or all have to be computed."""
    other = any(getattr(request, name, None) is not None for name in _BEYOND_TOKENS)
    return other or any(getattr(request, name, False) for name in _WANTS_PROMPT)


def salt_of(request: Any) -> bytes:
    """Return the cache salt of a request: others with another one share nothing with it."""
    salt = getattr(request, "cache_salt_id", None)
    return b"" if salt is None else f"trtllm {salt}".encode()


@dataclass(frozen=True, slots=True)
class Promise:
    """Blocks [first, first + blocks) of a prefix that the engine was told it will have."""

    first: int
    blocks: int
    staged: Staged


class Tracked:
    """Follows one request from its lookup to its end."""

    def __init__(self, root: BlockKey, block_tokens: int) -> None:
        """root: the key before the first block."""
        self.promise: Promise | None = None
        self.stored_blocks = 0  # of its prefix, as the daemon said
        self.blocks: list[int] = []  # of the device
        self.saves = False  # whether a save was ordered
        self.miscounted = False  # whether its blocks are not as many as its tokens need
        self._root = root
        self._block_tokens = block_tokens
        self._chain = KeyChain(root, block_tokens)
        self._tokens: list[int] = []
        self._seen_tokens = 0  # of the steps' data
        self._promised_tokens = 0
        self._planned_blocks = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Learn more of the sequence. Raises InvalidRequest for what is no token id."""
        self._tokens.extend(tokens)
        self._chain.update(self._tokens)

    def loadable_keys(self) -> list[BlockKey]:
        """Return the keys that may be loaded: at least one token is left to compute."""
        return self._chain.keys[: max(0, len(self._tokens) - 1) // self._block_tokens]

    def follow(self, data: Any) -> list[int]:
        """Note what a step tells of the request; return the blocks that it may overwrite."""
        begin = len(self.blocks)
        self.blocks += data.new_block_ids
        # The first data repeat the prompt, which is known since the lookup.
        known = len(self._tokens) - self._seen_tokens
        self._seen_tokens += len(data.new_tokens)
        if len(data.new_tokens) > known:
            self.extend(data.new_tokens[known:])
        # A sample may be under way that the engine has room for, and nobody has seen.
        fewest, most = (-(-(len(self._tokens) + more) // self._block_tokens) for more in (0, 1))
        self.miscounted = self.miscounted or not fewest <= len(self.blocks) <= most
        if self.promise is not None:
            self._promised_tokens = self.promise.blocks * self._block_tokens
        written = max(begin, data.computed_position // self._block_tokens)
        return self.blocks[written:]

    def save_order(self, data: Any) -> Order | None:
        """Return which blocks are complete after this step, and are not known to be stored: their
        keys, the index of the first, its parent, and where they are. None: there are none, or it
        is not known which tokens are in a block."""
        if self.miscounted:
            return None
        # The first data leave out what was promised.
        computed = data.computed_position + self._promised_tokens + data.num_scheduled_tokens
        self._promised_tokens = 0
        done = min(computed // self._block_tokens, len(self._chain.keys), len(self.blocks))
        first = max(self._planned_blocks, self.stored_blocks)
        if done <= first:
            return None
        self._planned_blocks = done
        self.saves = True
        keys = self._chain.keys
        parent = keys[first - 1] if first else None
        return tuple(keys[first:done]), first, parent, tuple(self.blocks[first:done])
