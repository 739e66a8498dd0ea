"""A `DynamicCache` that may start with a stored prefix, and shows its KV as pages of blocks."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig

from kvstore import InvalidRequest
from kvstore_transformers.namespace import LayerGroup
from kvstore_transformers.prefill import PieceClock

Pages = list[Tensor]
"""Keys and values of a group's layers, in the order of its record, each (blocks, H, tokens, C)."""


class Restoring(Protocol):
    """KV on its way into a cache."""

    def wait_layer(self, layer: int) -> None:
        """Return when a layer's KV is there, for what the model puts on its device from now on."""

    def finish(self) -> None:
        """Return when all KV is there and is what was stored. Raises LoadFailed if it is not."""


class PrefixCache(DynamicCache):  # type: ignore[misc] # transformers is not checked
    """The KV of one sequence. `Prefixes.load` makes it, `generate` fills it.

    prompt: its token ids. restored_blocks: how many blocks were loaded from the store.
    request_id: names its load for `kvstore explain`.
    exact: False once KV was computed under autocast, in another precision than the model's.
    stored_blocks: how many blocks the daemon has, or has given: they are not saved.
    refined: what is stored without its fine parts does not count for it.
    pace: times the long pieces of the prompt.
    Layers with a sliding window keep all KV that they compute until the cache is dropped, because
    a later resume may need KV from before their window.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        prompt: Sequence[int],
        block_tokens: int,
        *,
        refined: bool = False,
    ) -> None:
        super().__init__(config=config)
        self.prompt = list(prompt)
        self.block_tokens = block_tokens
        self.refined = refined
        self.restored_blocks = 0
        self.exact = True
        self.request_id = f"transformers-{secrets.token_hex(4)}"
        self.stored_blocks = 0
        self.pace = PieceClock()
        self._restoring: Restoring | None = None
        self.activate_past_recording()

    @property
    def restored_tokens(self) -> int:
        """How many tokens of the prompt were loaded, not computed."""
        return self.restored_blocks * self.block_tokens

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """As every cache does. Raises InvalidRequest for more than one sequence, LoadFailed if what
        was restored must not be used."""
        if key_states.shape[0] != 1:
            raise InvalidRequest("a PrefixCache holds one sequence: no batches, no beams")
        if torch.is_autocast_enabled(key_states.device.type):
            self.exact = False  # the tensors may look as always: a cat makes them float32 again
        if self._restoring is not None:
            began = time.perf_counter()
            self._restoring.wait_layer(layer_idx)
            self.pace.note_wait(time.perf_counter() - began)
        before = 0 if layer_idx else self.get_seq_length()
        self.pace.note(key_states.shape[2], layer_idx, len(self.layers), key_states.device, before)
        if layer_idx == len(self.layers) - 1:
            self.finish()
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return keys, values

    def finish(self) -> None:
        """Return when what is being restored is there. Raises LoadFailed: drop this cache then."""
        if self._restoring is not None:
            self._restoring.finish()
            self._restoring = None

    def restore(
        self, blocks: int, pages: Sequence[tuple[LayerGroup, Pages]], restoring: Restoring
    ) -> None:
        """Take over the KV of the first `blocks` blocks; of a window, its last ones.

        The pages need not be there yet: `restoring` knows."""
        for group, tensors in pages:
            for index, keys, values in zip(group.layers, tensors[::2], tensors[1::2], strict=True):
                layer = self.layers[index]
                layer.lazy_initialization(keys, values)
                layer.keys, layer.values = _tokens(keys), _tokens(values)
                if group.window_tokens:
                    layer.cumulative_length = blocks * self.block_tokens
        self.restored_blocks = blocks
        self._restoring = restoring

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
