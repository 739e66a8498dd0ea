"""What `kvstore bench cluster --vllm` asks, and of which engines."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.model.errors import InvalidRequest
from kvstore_bench.demo.model import kv_shape_of

FIRST_TOKEN = 4  # those before it mean something to most models
BLOCK_TOKENS = 32


FAULTS = {
    "dead": "killed before it is asked",
    "dead_midway": "killed while it sends",
    "stopped": "stopped before it is asked",
    "stopped_midway": "stopped while it sends",
    "slow": "sends 50 times slower",
    "corrupt": "a bit of every MiB flipped",
}


@dataclass(frozen=True, slots=True)
class VllmPlan:
    """prompts: for each way to the first token. fault_rounds: of each fault, with two prompts each.
    warm_ups: of each way of handing off that do not count, until the link's pace is known.
    chunk_tokens: that the prefilling engine computes in a step: a sixteenth of the prompt, as 2k of
    32k. link_bits_per_s: between the hosts, for prefill here and decode there. slow_factor: how
    much slower a slow holder answers."""

    model: Path
    prompt_tokens: int = 2000
    prompts: int = 5
    fault_rounds: int = 2
    pd_prompts: int = 4
    warm_ups: int = 2
    answer_tokens: int = 16
    chunk_tokens: int = 128
    link_bits_per_s: int = 200_000_000
    slow_factor: float = 50.0
    seed: int = 0

    @property
    def tokens_max(self) -> int:
        """Of a prompt and its answer."""
        return self.prompt_tokens + self.answer_tokens + 1

    @property
    def blocks(self) -> int:
        """Full blocks of a prompt."""
        return self.prompt_tokens // BLOCK_TOKENS

    @property
    def loadable_blocks(self) -> int:
        """Those that need not be computed: at least one token of a prompt has to be."""
        return (self.prompt_tokens - 1) // BLOCK_TOKENS

    @property
    def steps(self) -> int:
        """Steps that are shown as progress."""
        asked = self.prompts + 1
        return (
            2 + 2 * asked + len(FAULTS) * self.fault_rounds + 2 * (self.pd_prompts + self.warm_ups)
        )

    def shown(self) -> dict[str, Any]:
        """Return it as a part of the result."""
        names = [name for name in self.__slots__ if name != "model"]
        return {"model": self.model.name, **{name: getattr(self, name) for name in names}}


class Prompts:
    """Prompts without a common beginning, each given out once."""

    def __init__(self, plan: VllmPlan) -> None:
        self._drawn = random.Random(plan.seed)
        self._tokens = plan.prompt_tokens
        self._top = vocabulary_of(plan.model)

    def next(self, tokens: int = 0) -> list[int]:
        """Return one of so many tokens; 0: as many as is planned."""
        return [
            self._drawn.randrange(FIRST_TOKEN, self._top) for _ in range(tokens or self._tokens)
        ]


def vocabulary_of(model: Path) -> int:
    """Return how many tokens a checkpoint knows. Raises InvalidRequest."""
    kv_shape_of(model)  # says what is wrong with the file
    config = json.loads((model / "config.json").read_text())
    size = config.get("text_config", config).get("vocab_size", 0)
    if not isinstance(size, int) or size < 2 * FIRST_TOKEN:
        raise InvalidRequest(f"{model}: config.json names no vocab_size")
    return size
