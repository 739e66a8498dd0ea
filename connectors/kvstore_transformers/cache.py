"""A `DynamicCache` that may start with a stored prefix, and shows its KV as pages of blocks."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig

from kvstore import InvalidRequest
from kvstore_transformers.namespace import LayerGroup

PREFILL_TOKENS_MIN = 128
"""Shorter pieces are decoding, whose time says nothing of prefill."""

Pages = list[Tensor]
"""Keys and values of a group's layers, in the order of its record, each (blocks, H, tokens, C)."""


class PrefixCache(DynamicCache):  # type: ignore[misc] # transformers is not checked
    """The KV of one sequence. `Prefixes.load` makes it, `generate(past_key_values=...)` fills it.

    prompt: the token ids it was made for. restored_blocks: how many blocks came from the store.
    request_id: what `kvstore explain` knows its load by.
    exact: False once KV was computed under autocast, in another precision than the model's.
    prefill_s_per_token: what the model took for the last long piece of the prompt, as the host sees
    it; 0 until there was one.
    Layers with a sliding window keep what they compute, beyond their window too, until the cache is
    dropped: what a later resume needs of them is not known before.
    """

    def __init__(self, config: PreTrainedConfig, prompt: Sequence[int], block_tokens: int) -> None:
        super().__init__(config=config)
        self.prompt = list(prompt)
        self.block_tokens = block_tokens
        self.restored_blocks = 0
        self.exact = True
        self.request_id = f"transformers-{secrets.token_hex(4)}"
        self.prefill_s_per_token = 0.0
        self._prefill_began = 0.0
        self.activate_past_recording()

    @property
    def restored_tokens(self) -> int:
        """How many tokens of the prompt need not be computed."""
        return self.restored_blocks * self.block_tokens

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """As every cache does. Raises InvalidRequest for more than one sequence."""
        if key_states.shape[0] != 1:
            raise InvalidRequest("a PrefixCache holds one sequence: no batches, no beams")
        if torch.is_autocast_enabled(key_states.device.type):
            self.exact = False  # the tensors may look as always: a cat makes them float32 again
        if key_states.shape[2] >= PREFILL_TOKENS_MIN:
            self._time_prefill(key_states.shape[2], layer_idx)
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return keys, values

    def _time_prefill(self, tokens: int, layer: int) -> None:
        """Note when a piece of the prompt reaches the first layer and the last one."""
        if layer == 0:
            self._prefill_began = time.perf_counter()
        elif layer == len(self.layers) - 1 and self._prefill_began:
            took = time.perf_counter() - self._prefill_began
            self.prefill_s_per_token = took * len(self.layers) / layer / tokens

    def restore(self, blocks: int, pages: Sequence[tuple[LayerGroup, Pages]]) -> None:
        """Take over the KV of the first `blocks` blocks; of a window, its last ones."""
        for group, tensors in pages:
            for index, keys, values in zip(group.layers, tensors[::2], tensors[1::2], strict=True):
                layer = self.layers[index]
                layer.lazy_initialization(keys, values)
                layer.keys, layer.values = _tokens(keys), _tokens(values)
                if group.window_tokens:
                    layer.cumulative_length = blocks * self.block_tokens
        self.restored_blocks = blocks

    def pages(self, group: LayerGroup) -> tuple[int, Pages]:
        """Return the first whole block that `group` still has, and its pages from there on.

        They stay as they are: a layer that grows or is cropped gets other tensors.
        """
        length = self.get_seq_length()
        kept = self.layers[group.layers[0]].keys.shape[-2]
        first = -(-(length - kept) // self.block_tokens)
        begin = first * self.block_tokens - (length - kept)
        count = length // self.block_tokens - first
        tensors = [
            part.detach()[0, :, begin : begin + count * self.block_tokens]
            .unflatten(1, (count, self.block_tokens))
            .transpose(0, 1)
            for index in group.layers
            for part in (self.layers[index].keys, self.layers[index].values)
        ]
        return first, tensors


def empty_pages(group: LayerGroup, blocks: int, block_tokens: int) -> Pages:
    """Return unset pages for `blocks` blocks, laid out as a cache has them: heads outermost."""
    return [
        part.new_empty((part.shape[1], blocks, block_tokens, part.shape[3])).transpose(0, 1)
        for pair in zip(group.keys, group.values, strict=True)
        for part in pair
    ]


def _tokens(pages: Tensor) -> Tensor:
    """View pages as a cache has them, (1, heads, tokens, head size)."""
    return pages.transpose(0, 1).flatten(1, 2).unsqueeze(0)
