"""The KV of a model, by its Hugging Face `config.json`.

What a layer keeps of a token: a key and a value of every KV head (MHA, GQA, MQA), or, with latent
attention (MLA), one compressed vector and the positional key, the same on every rank.

    Llama-3.1-8B   2 x 8 heads x 128 x 2 bytes x 32 layers = 128 KiB
    Llama-3.1-70B  2 x 8 heads x 128 x 2 bytes x 80 layers = 320 KiB
    DeepSeek-V3    (512 + 64) x 2 bytes x 61 layers        = 70,272 bytes

Prefill of n tokens takes 2 x weights x n operations, and for each layer and query head
2 x (key + value size) for every pair of a token and one it attends to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.model.errors import InvalidRequest
from kvstore.plan.layers import Kind, LayerKind, layer_kinds, whole
from kvstore.plan.weights import active_weights

KV_DTYPES: Mapping[str, float] = {
    "float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1, "int8": 1, "int4": 0.5, "fp4": 0.5,
}  # fmt: skip
CONFIG_NBYTES_MAX = 16 << 20
INDEX_SCALE_TOKENS = 128  # values of a sparse attention's index that share a scale of 4 bytes


@dataclass(frozen=True, slots=True)
class _Layer:
    """nbytes: of one token, all ranks. width: query heads x (key + value size)."""

    nbytes: float
    window_tokens: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelKV:
    """What a model keeps per token, and what computing it takes.

    attention: mha, gqa, mqa or mla. rank_share: of these bytes, on each of `tp` ranks.
    state_layers: keep a state of fixed size instead, which is not counted and not stored.
    """

    name: str
    attention: str
    kv_dtype: str
    tp: int
    layers: tuple[_Layer, ...]
    layer_count: int
    state_layers: int
    rank_share: float
    active_weights: int

    @property
    def bytes_per_token(self) -> float:
        """Of all layers, while no window is full."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def rank_bytes_per_token(self) -> float:
        return self.bytes_per_token * self.rank_share

    @property
    def full_bytes_per_token(self) -> float:
        """Of the layers that keep every token: what a long prompt grows by."""
        return sum(layer.nbytes for layer in self.layers if not layer.window_tokens)

    @property
    def windows(self) -> tuple[int, ...]:
        """The sliding windows there are, in tokens."""
        return tuple(sorted({layer.window_tokens for layer in self.layers} - {0}))

    def prefix_nbytes(self, tokens: float) -> float:
        """Return what a resume after so many tokens reads."""
        return sum(
            layer.nbytes * (min(tokens, layer.window_tokens) if layer.window_tokens else tokens)
            for layer in self.layers
        )

    def mean_bytes_per_token(self, prompts: Sequence[int]) -> float:
        """Return the bytes of prompts of so many tokens over these tokens."""
        tokens = sum(prompts)
        return sum(map(self.prefix_nbytes, prompts)) / tokens if tokens else self.bytes_per_token

    def prefill_flops(self, tokens: float) -> float:
        """Return the operations that computing a prefix of so many tokens takes."""
        pairs = 0.0
        for layer in self.layers:
            window = layer.window_tokens
            full = tokens * tokens / 2
            seen = full if not window or tokens <= window else window * (tokens - window / 2)
            pairs += layer.width * seen
        return 2 * self.active_weights * tokens + 2 * pairs


def load_model(path: Path, *, kv_dtype: str = "auto", tp: int = 1) -> ModelKV:
    """Read a config.json, or the one in a folder. Raises InvalidRequest that names the file."""
    path = path / "config.json" if path.is_dir() else path
    try:
        with path.open("rb") as file:
            config = json.loads(file.read(CONFIG_NBYTES_MAX))
        if not isinstance(config, dict):
            raise InvalidRequest("not a JSON object")
        return model_of(config, name=path.parent.name or path.name, kv_dtype=kv_dtype, tp=tp)
    except OSError as error:
        raise InvalidRequest(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{path}: not JSON: {error}") from error
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise InvalidRequest(f"{path}: a field is not what it should be: {error!r}") from error
    except InvalidRequest as error:
        raise InvalidRequest(f"{path}: {error}") from error


def model_of(
    config: Mapping[str, Any], *, name: str = "", kv_dtype: str = "auto", tp: int = 1
) -> ModelKV:
    """Return the KV of a model. Raises InvalidRequest for what is not understood."""
    for nested in ("text_config", "language_config", "llm_config"):
        if isinstance(config.get(nested), dict):
            config = config | config[nested]
    kinds = layer_kinds(config)
    dtype = _dtype(config) if kv_dtype == "auto" else kv_dtype
    nbytes = KV_DTYPES[dtype]
    shape = _mla(config, nbytes) if config.get("kv_lora_rank") else _heads(config, nbytes)
    if not any(each.kind in (Kind.FULL, Kind.WINDOW) for each in kinds):
        raise InvalidRequest("no layer of this model keeps KV")
    if shape.kv_heads % tp and tp % shape.kv_heads and shape.kv_heads > 1:
        raise InvalidRequest(f"{shape.kv_heads} KV heads cannot be split over {tp} ranks")
    return ModelKV(
        name=str(config.get("_name_or_path") or name or config.get("model_type", "")),
        attention=shape.attention,
        kv_dtype=dtype,
        tp=tp,
        layers=tuple(shape.layer(each) for each in kinds if each.kind in (Kind.FULL, Kind.WINDOW)),
        layer_count=len(kinds),
        state_layers=sum(each.kind is Kind.STATE for each in kinds),
        rank_share=1 / min(tp, shape.kv_heads),
        active_weights=active_weights(config, kinds, shape.weights),
    )


@dataclass(frozen=True, slots=True)
class _Shape:
    """One layer's attention. nbytes: it keeps of a token. full_nbytes: if it has no window."""

    attention: str
    kv_heads: int  # 1 if all ranks keep the same
    nbytes: float
    full_nbytes: float
    width: int
    full_width: int
    weights: int

    def layer(self, kind: LayerKind) -> _Layer:
        if kind.kind is Kind.WINDOW:
            return _Layer(self.nbytes, kind.window_tokens, self.width)
        return _Layer(self.full_nbytes, 0, self.full_width)


def _heads(config: Mapping[str, Any], value_nbytes: float) -> _Shape:
    hidden = whole(config, "hidden_size", "n_embd", "d_model")
    heads = whole(config, "num_attention_heads", "n_head", "n_heads")
    if not heads:
        raise InvalidRequest("no attention heads")
    size = whole(config, "head_dim", "attention_head_dim", "kv_channels", default=hidden // heads)
    value = whole(config, "v_head_dim", default=size)
    kv_heads = _kv_heads(config, heads)
    # Gemma 4: the layers that see everything have heads of their own.
    full_size = whole(config, "global_head_dim", default=size)
    full_kv = kv_heads
    if config.get("attention_k_eq_v"):
        full_kv = whole(config, "num_global_key_value_heads", default=kv_heads)
    full_value = full_size if full_size != size else value
    return _Shape(
        "mha" if kv_heads == heads else "mqa" if kv_heads == 1 else "gqa",
        kv_heads,
        kv_heads * (size + value) * value_nbytes,
        full_kv * (full_size + full_value) * value_nbytes,
        heads * (size + value),
        heads * (full_size + full_value),
        hidden * (heads * (size + value) + kv_heads * (size + value)),
    )


def _kv_heads(config: Mapping[str, Any], heads: int) -> int:
    """Return the KV heads; the older a configuration, the less it says."""
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return whole(config, "multi_query_group_num", default=1)
    attention = config.get("attn_config")
    if isinstance(attention, dict) and "kv_n_heads" in attention:
        return whole(attention, "kv_n_heads")
    found = whole(config, "num_key_value_heads", "num_kv_heads", "n_head_kv", default=heads)
    if not found:
        raise InvalidRequest("no KV heads")
    return found


def _mla(config: Mapping[str, Any], value_nbytes: float) -> _Shape:
    hidden, heads = whole(config, "hidden_size"), whole(config, "num_attention_heads")
    rank, rope = whole(config, "kv_lora_rank"), whole(config, "qk_rope_head_dim")
    plain, value = whole(config, "qk_nope_head_dim"), whole(config, "v_head_dim")
    query = heads * (plain + rope)
    low = whole(config, "q_lora_rank", default=0)
    weights = hidden * low + low * query if low else hidden * query
    weights += hidden * (rank + rope) + rank * heads * (plain + value) + heads * value * hidden
    kept = (rank + rope) * value_nbytes
    index = whole(config, "index_head_dim", default=0)  # a byte a value, and scales
    kept += index + 4 * index / INDEX_SCALE_TOKENS
    width = heads * (plain + rope + value)
    return _Shape("mla", 1, kept, kept, width, width, weights)


def _dtype(config: Mapping[str, Any]) -> str:
    """Return the type of KV that engines choose by themselves: the model's, or its scheme's."""
    scheme = (config.get("quantization_config") or {}).get("kv_cache_scheme")
    if isinstance(scheme, dict) and scheme.get("num_bits") == 8:
        return "fp8" if scheme.get("type") == "float" else "int8"
    named = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")
    named = named.removeprefix("torch.")
    if named not in KV_DTYPES:
        raise InvalidRequest(f"the type {named!r} is not known: name it with --kv-dtype")
    return named
