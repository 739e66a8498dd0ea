"""What a model says after a prompt whose KV was stored: beside what it says after exact KV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.model.errors import InvalidRequest
from kvstore_bench.codec.kv import Bits, bits_of
from kvstore_bench.codec.texts import TEXTS


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one text. kl: of the exact model's next-token distribution from this one, in nats, mean
    of all positions. top1: share of positions with the same likeliest token. perplexity: of the
    text. equal: whether the KV has the same bytes."""

    kl: float
    top1: float
    perplexity: float
    equal: bool


class Judge:
    """A model, and texts whose first `tokens` tokens are the prompt and `follow` more the rest."""

    def __init__(self, model: Path, tokens: int, follow: int) -> None:
        """Load the model. Needs torch and transformers."""
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._tokens = tokens
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._ids: Mapping[str, Any] = {
            name: self._tokenizer(text()[: 12 * (tokens + follow)], return_tensors="pt").input_ids[
                :, : tokens + follow
            ]
            for name, text in TEXTS.items()
        }
        for name, ids in self._ids.items():
            if ids.shape[1] < tokens + follow:
                raise InvalidRequest(f"the text {name!r} has {ids.shape[1]} tokens, not that many")
        self._said: dict[str, Any] = {}

    @property
    def texts(self) -> list[str]:
        return list(self._ids)

    def kv(self, text: str) -> list[Bits]:
        """Compute the prompt's KV: (heads, tokens, channels) of bfloat16 for each layer's keys,
        then its values."""
        import torch
        from transformers import DynamicCache

        from kvstore_transformers.compat import in_forward

        cache = DynamicCache()  # of no configuration: layers with a window keep everything, too
        with torch.inference_mode():
            self._model(
                input_ids=self._ids[text][:, : self._tokens],
                **in_forward(self._model, cache),
                use_cache=True,
                logits_to_keep=1,
            )
        return bits_of(cache)

    def judge(self, text: str, exact: Sequence[Bits], stored: Sequence[Bits]) -> Verdict:
        """Compare what the model says after `stored` with what it says after `exact`."""
        if text not in self._said:
            self._said[text] = self._say(text, exact)
        was = self._said[text]
        equal = all(np.array_equal(a, b) for a, b in zip(exact, stored, strict=True))
        now = self._say(text, stored)
        targets = self._ids[text][0, self._tokens + 1 :]
        likelihood = now[:-1].gather(1, targets[:, None])
        return Verdict(
            kl=max(float((was.exp() * (was - now)).sum(-1).mean()), 0.0),
            top1=float((was.argmax(-1) == now.argmax(-1)).double().mean()),
            perplexity=float((-likelihood.double().mean()).exp()),
            equal=equal,
        )

    def _say(self, text: str, parts: Sequence[Bits]) -> Any:
        """Return the log probabilities of every next token after the prompt (follow, words)."""
        import torch
        from transformers import DynamicCache

        from kvstore_transformers.compat import in_forward

        cache = DynamicCache()
        for layer, (keys, values) in enumerate(zip(parts[::2], parts[1::2], strict=True)):
            cache.update(*(_float(part)[None] for part in (keys, values)), layer)
        ids = self._ids[text]
        with torch.inference_mode():
            said = self._model(
                input_ids=ids[:, self._tokens :],
                **in_forward(self._model, cache),
                use_cache=True,
                position_ids=torch.arange(self._tokens, ids.shape[1])[None],
            )
            return torch.log_softmax(said.logits[0].float(), -1)


def _float(part: Bits) -> Any:
    import torch

    return torch.from_numpy(part.view(np.int16).copy()).view(torch.bfloat16).float()
