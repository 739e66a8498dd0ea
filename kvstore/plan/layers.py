"""Which layers of a model keep KV, and for how long, by its Hugging Face `config.json`.

Newer configurations list `layer_types`. Older ones say it in a way of their own: a pattern, a
period, a list of indices. A kind of layer that is not known here is refused, because a wrong number
of bytes is worse than none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from kvstore.model.errors import InvalidRequest

LAYERS_MAX = 4096


class Kind(Enum):
    """FULL keeps every token, WINDOW the last ones, STATE something of a fixed size in place of KV,
    NONE nothing (an MLP of its own, or the KV of another layer)."""

    FULL = "full"
    WINDOW = "window"
    STATE = "state"
    NONE = "none"


class LayerKind(NamedTuple):
    """window_tokens: how many tokens a WINDOW keeps."""

    kind: Kind
    window_tokens: int = 0


_NAMES = {
    **dict.fromkeys(("full_attention", "attention", "indexed_attention", "hybrid"), Kind.FULL),
    **dict.fromkeys(("sliding_attention", "chunked_attention"), Kind.WINDOW),
    **dict.fromkeys(("linear_attention", "mamba", "mamba2", "conv", "recurrent"), Kind.STATE),
    **dict.fromkeys(("mlp", "moe"), Kind.NONE),
}
# Every n-th layer is a full one where the configuration only names the window.
_PATTERNS = {"gemma2": 2, "gpt_oss": 2, "gemma3": 6, "gemma3_text": 6, "gemma3n_text": 5}
_PATTERNS |= {"cohere2": 4, "olmo3": 4}


def layer_kinds(config: Mapping[str, Any]) -> list[LayerKind]:
    """Return the kind of each layer. Raises InvalidRequest."""
    if config.get("block_configs"):
        raise InvalidRequest("layers of different shapes (block_configs) are not known here")
    count = whole(config, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    if not 1 <= count <= LAYERS_MAX:
        raise InvalidRequest(f"{count} layers; 1 to {LAYERS_MAX} are allowed")
    names = _names(config, count)
    if len(names) != count:
        raise InvalidRequest(f"the kinds of {len(names)} layers for {count} layers")
    kinds = [_kind(config, name) for name in names]
    shared = config.get("num_kv_shared_layers") or 0  # the last ones use what others keep
    return kinds[: count - shared] + [LayerKind(Kind.NONE)] * shared


def whole(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    """Return the first of these fields that is there. Raises InvalidRequest."""
    for name in names:
        value = config.get(name)
        if value is not None:
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise InvalidRequest(f"{name}={value!r} is not a whole number")
            return value
    if default is None:
        raise InvalidRequest(f"no {' or '.join(names)}: not the configuration of such a model")
    return default


def _kind(config: Mapping[str, Any], name: str) -> LayerKind:
    kind = _NAMES.get(name)
    if kind is None:
        raise InvalidRequest(f"what layers of the kind {name!r} keep is not known here")
    if kind is not Kind.WINDOW:
        return LayerKind(kind)
    field = "attention_chunk_size" if name.startswith("chunked") else "sliding_window"
    window = whole(config, field)
    return LayerKind(kind, window) if window else LayerKind(Kind.FULL)


def _names(config: Mapping[str, Any], count: int) -> Sequence[str]:
    """Return the name of each layer's kind, however the configuration says it."""
    for field in ("layer_types", "layers_block_type"):
        if config.get(field):
            return [str(each) for each in config[field]]
    for field, names in _OLDER.items():
        if config.get(field) is not None:
            return names(config, count)
    return _windows(config, count)


def _windows(config: Mapping[str, Any], count: int) -> Sequence[str]:
    """Return which layers have a sliding window, of models that have nothing else."""
    model = config.get("model_type")
    full, window = "full_attention", "sliding_attention"
    if not config.get("sliding_window"):
        return [full] * count
    every = config.get("sliding_window_pattern") or _PATTERNS.get(str(model))
    if isinstance(every, str):  # "LLLG"
        return [window if every[i % len(every)] == "L" else full for i in range(count)]
    if every:
        return [window if (i + 1) % every else full for i in range(count)]
    if "use_sliding_window" in config:  # Qwen2: the last layers, if any
        first = whole(config, "max_window_layers", default=0)
        used = config["use_sliding_window"]
        return [window if used and i >= first else full for i in range(count)]
    return [window] * count


def _chosen(kept: Callable[[int], bool], count: int, otherwise: str = "mamba") -> Sequence[str]:
    return ["full_attention" if kept(i) else otherwise for i in range(count)]


def _by_letters(config: Mapping[str, Any], count: int) -> Sequence[str]:
    names = {"*": "full_attention", "M": "mamba"}
    return [names.get(letter, "mlp") for letter in config["hybrid_override_pattern"]]


def _by_numbers(config: Mapping[str, Any], count: int) -> Sequence[str]:
    full = config["linear_attn_config"].get("full_attn_layers")
    if full is None:
        raise InvalidRequest("linear_attn_config names no full_attn_layers")
    return _chosen(lambda i: i + 1 in full, count, "linear_attention")


def _by_rope(config: Mapping[str, Any], count: int) -> Sequence[str]:
    """Llama 4: layers with positions look at chunks only."""
    rope = config["no_rope_layers"] or [int((i + 1) % 4 != 0) for i in range(count)]
    return _chosen(lambda i: not rope[i], count, "chunked_attention")


_Names = Callable[[Mapping[str, Any], int], Sequence[str]]
_OLDER: Mapping[str, _Names] = {
    "hybrid_override_pattern": _by_letters,
    "linear_attn_config": _by_numbers,
    "no_rope_layers": _by_rope,
    "attn_layer_indices": lambda c, n: _chosen(lambda i: i in c["attn_layer_indices"], n),
    "attn_layer_period": lambda c, n: _chosen(
        lambda i: i % c["attn_layer_period"] == c.get("attn_layer_offset", 0), n
    ),
    "full_attn_idxs": lambda c, n: _chosen(lambda i: i in c["full_attn_idxs"], n, "conv"),
    "full_attention_interval": lambda c, n: _chosen(
        lambda i: (i + 1) % c["full_attention_interval"] == 0, n, "linear_attention"
    ),
    "attn_type_list": lambda c, n: _chosen(
        lambda i: c["attn_type_list"][i] == 1, n, "linear_attention"
    ),
}
