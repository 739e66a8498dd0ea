"""`generate` on top of a prefix: which of its options allow that, and its streamer."""

from __future__ import annotations

from typing import Any

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
    "penalty_alpha",
    "prefill_chunk_size",
    "prompt_lookup_num_tokens",
    "token_healing",
    "use_mtp",
)
"""Options of GenerationConfig that bring a cache of their own, change the prompt, compute it anew
whatever the cache holds (chunked prefill), or were not tried."""


def follows_from_tokens(model_config: Any, input_ids: Tensor, options: dict[str, Any]) -> bool:
    """Whether the KV of this call is of one sequence, and follows from its token ids alone.

    An option may come from three places; one of them is enough to leave the cache out.
    """
    sources = [vars(model_config), options]
    if options.get("generation_config") is not None:
        sources.append(vars(options["generation_config"]))

    def values(name: str) -> set[Any]:
        return {source.get(name) for source in sources}

    mask, known = options.get("attention_mask"), vars(GenerationConfig()).keys() | _HARMLESS
    return (
        options.keys() <= known
        and input_ids.dim() == 2
        and input_ids.shape[0] == 1
        and all(values(name) <= {None, 1} for name in ("num_beams", "num_return_sequences"))
        and values("use_cache") <= {None, True}
        and all(values(name) <= {None, False} for name in _NOT_ON_TOP_OF_A_PREFIX)
        and (
            not any(each in input_ids for each in values("pad_token_id") if each is not None)
            if mask is None
            else bool(mask.all())
        )
    )


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
