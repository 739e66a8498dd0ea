"""What a checkpoint's config.json says about its KV: how many bytes, and how many engine blocks."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from kvstore.model.errors import InvalidRequest

ELEMENT_NBYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class KVShape:
    """The KV of one model. full, sliding: layers of each kind; window: tokens the latter see."""

    full: int
    sliding: int
    window: int
    elements_per_layer: int

    def blocks_for(self, tokens: int, *, block_tokens: int, chunk_tokens: int) -> int:
        """Return the least num_gpu_blocks with which vLLM serves one request of so many tokens.

        vLLM splits the layers of a hybrid model into groups of equal size, as large as the rarer
        kind; every group takes its own blocks from one pool. A sliding group holds its window and
        the chunk being computed (SlidingWindowSpec in vLLM), a full one everything.
        """
        per_group = min(self.full, self.sliding) or max(self.full, self.sliding)
        full_groups = math.ceil(self.full / per_group)
        sliding_groups = math.ceil(self.sliding / per_group)
        held = min(tokens, self.window - 1 + chunk_tokens)
        full_blocks = full_groups * math.ceil(tokens / block_tokens)
        sliding_blocks = sliding_groups * (math.ceil(held / block_tokens) + 1)
        return full_blocks + sliding_blocks + 1  # one block of every pool stays unused

    def nbytes(self, tokens: int, *, dtype: str) -> int:
        """Return the bytes that are stored for a prompt of so many tokens, all layers."""
        return (self.full + self.sliding) * tokens * self._layer_nbytes(dtype)

    def load_nbytes(self, tokens: int, *, dtype: str) -> int:
        """Return the bytes that a resume after so many tokens loads."""
        held = self.full * tokens + self.sliding * min(tokens, self.window)
        return held * self._layer_nbytes(dtype)

    def _layer_nbytes(self, dtype: str) -> int:
        return self.elements_per_layer * ELEMENT_NBYTES[dtype]


def kv_shape_of(model: Path) -> KVShape:
    """Read a checkpoint's config.json. Raises InvalidRequest if it is none we can read."""
    try:
        config = json.loads((model / "config.json").read_text())
        config = config.get("text_config", config)
        layers = int(config["num_hidden_layers"])
        heads = int(config.get("num_key_value_heads") or config["num_attention_heads"])
        head_dim = int(
            config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        )
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise InvalidRequest(
            f"{model}: no readable config.json of a transformer: {error}"
        ) from error
    sliding = list(config.get("layer_types") or ()).count("sliding_attention")
    return KVShape(
        full=layers - sliding,
        sliding=sliding,
        window=int(config.get("sliding_window") or 1) if sliding else 1,
        elements_per_layer=2 * heads * head_dim,
    )
