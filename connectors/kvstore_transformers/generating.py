"""`generate` on top of a prefix: which of its options allow that, and its streamer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

_HARMLESS = {
    "attention_mask",
    "generation_config",
    "logits_processor",
    "stopping_criteria",
    "streamer",
    "synced_gpus",
    "tokenizer",
    "use_model_defaults",
}
"""Arguments of `generate` beside those of GenerationConfig under which KV still follows from token
ids alone. With any other, `generate` leaves the cache out."""
_NOT_ON_TOP_OF_A_PREFIX = (
    "assistant_early_exit",
    "cache_implementation",
    "dola_layers",
    "output_attentions",
    "output_hidden_states",
    "penalty_alpha",
    "prefill_chunk_size",
    "prompt_lookup_num_tokens",
    "token_healing",
    "use_mtp",
)
"""Options of GenerationConfig that bring a cache of their own, change the prompt, compute it anew
whatever the cache holds (chunked prefill), return tensors of all its tokens, or were not tried."""


def follows_from_tokens(model_config: Any, input_ids: Tensor, options: dict[str, Any]) -> bool:
    """Whether the KV of this call is of one sequence, and follows from its token ids alone.

    An option may come from three places; one of them is enough to leave the cache out.
    """
    sources = [options, vars(model_config)]
    if options.get("generation_config") is not None:
        sources.insert(1, vars(options["generation_config"]))

    def only(name: str, *allowed: object) -> bool:
        return all(source.get(name) in (None, *allowed) for source in sources)

    mask, known = options.get("attention_mask"), vars(GenerationConfig()).keys() | _HARMLESS
    return (
        options.keys() <= known
        and input_ids.dim() == 2
        and input_ids.shape[0] == 1
        and all(only(name, 1) for name in ("num_beams", "num_return_sequences"))
        and only("use_cache", True)
        and all(only(name, False) for name in _NOT_ON_TOP_OF_A_PREFIX)
        and (not _is_padded(input_ids, sources) if mask is None else bool(mask.all()))
    )


def _is_padded(input_ids: Tensor, sources: Sequence[Mapping[str, Any]]) -> bool:
    """Whether `generate` may take some of these tokens for padding: not those that end an answer.

    sources: options, the arguments of `generate` first, which count even if they are None.
    """
    pads = [source["pad_token_id"] for source in sources if source.get("pad_token_id") is not None]
    ends = [each["eos_token_id"] for each in sources if each.get("eos_token_id") is not None]
    if "eos_token_id" in sources[0]:
        ends = [sources[0]["eos_token_id"]]
    ended_by = torch.as_tensor(ends[0] if ends and ends[0] is not None else [])
    return any(pad in input_ids and pad not in ended_by for pad in pads)


class AfterPrompt:
    """A streamer that was given the prompt already: its first piece is not passed on again."""

    def __init__(self, streamer: Any) -> None:
        self._streamer = streamer
        self._prompt_seen = False

    def put(self, value: Any) -> None:
        if self._prompt_seen:
            self._streamer.put(value)
        self._prompt_seen = True

    def end(self) -> None:
        self._streamer.end()
