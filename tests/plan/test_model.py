"""Bytes per token and operations are those that are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvstore.model.errors import InvalidRequest
from kvstore.plan import load_model
from kvstore.plan.layers import Kind, layer_kinds
from kvstore.plan.model import model_of
from tests.plan import configs

KIB = 1024


@pytest.mark.parametrize(
    ("config", "attention", "per_token", "full"),
    [
        (configs.LLAMA_8B, "gqa", 128 * KIB, 128 * KIB),
        (configs.LLAMA_70B, "gqa", 320 * KIB, 320 * KIB),
        (configs.LLAMA_2_7B, "mha", 512 * KIB, 512 * KIB),
        (configs.DEEPSEEK_V3, "mla", 70_272, 70_272),
        (configs.STARCODER, "mqa", 40 * 2 * 128 * 4, 40 * 2 * 128 * 4),
        (configs.MISTRAL_7B, "gqa", 128 * KIB, 0),
        (configs.GPT_OSS_20B, "gqa", 48 * KIB, 24 * KIB),
        (configs.GEMMA3_27B, "gqa", 62 * 8 * KIB, 10 * 8 * KIB),
        (configs.QWEN3_NEXT, "gqa", 24 * KIB, 24 * KIB),
    ],
)
def test_bytes_per_token_are_the_published_ones(
    config: dict[str, Any], attention: str, per_token: int, full: int
) -> None:
    model = model_of(config)
    assert (model.attention, model.bytes_per_token) == (attention, per_token)
    assert model.full_bytes_per_token == full


@pytest.mark.parametrize(
    ("config", "billions"),  # with the embeddings that the published number counts
    [
        (configs.LLAMA_8B, 8.03 - 2 * 0.525),
        (configs.LLAMA_70B, 70.55 - 2 * 1.05),
        (configs.MIXTRAL, 12.9 - 2 * 0.131),
        (configs.DEEPSEEK_V3, 37.0 - 2 * 0.93),
        (configs.QWEN3_30B, 3.3 - 2 * 0.311),
        (configs.GPT_OSS_20B, 3.6 - 0.58),
        (configs.GEMMA3_27B, 27.0 - 1.41),
    ],
)
def test_active_weights_are_the_published_ones(config: dict[str, Any], billions: float) -> None:
    assert model_of(config).active_weights / 1e9 == pytest.approx(billions, rel=0.03)


def test_prefill_takes_two_operations_a_weight_and_attention_grows_with_the_square() -> None:
    model = model_of(configs.LLAMA_8B)
    linear = 2 * model.active_weights * 1000
    # 32 layers, 32 heads, 2 x 2 x 128 operations for each of n^2 / 2 pairs.
    assert model.prefill_flops(1000) == pytest.approx(linear + 32 * 32 * 512 * 1000**2 / 2)
    windowed = model_of(configs.MISTRAL_7B)
    assert windowed.prefill_flops(4096) == model.prefill_flops(4096)
    assert windowed.prefill_flops(32768) < model.prefill_flops(32768)


def test_a_window_keeps_its_last_tokens_only() -> None:
    model = model_of(configs.GPT_OSS_20B)
    assert model.windows == (128,)
    assert model.prefix_nbytes(100) == 100 * 48 * KIB
    assert model.prefix_nbytes(1000) == (1000 + 128) * 24 * KIB
    assert model.mean_bytes_per_token([100, 1000]) == (4800 + 1128 * 24) * KIB / 1100


def test_ranks_share_heads_but_not_what_is_compressed() -> None:
    assert model_of(configs.LLAMA_8B, tp=4).rank_bytes_per_token == 32 * KIB
    assert model_of(configs.LLAMA_8B, tp=16).rank_bytes_per_token == 16 * KIB
    assert model_of(configs.DEEPSEEK_V3, tp=8).rank_bytes_per_token == 70_272
    with pytest.raises(InvalidRequest, match="8 KV heads cannot be split over 3 ranks"):
        model_of(configs.LLAMA_8B, tp=3)


def test_the_type_of_kv_is_told_or_the_models_own() -> None:
    assert model_of(configs.LLAMA_8B, kv_dtype="fp8").bytes_per_token == 64 * KIB
    scheme = {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    quantized = configs.LLAMA_8B | {"quantization_config": scheme}
    assert model_of(quantized).kv_dtype == "fp8"
    newer = {k: v for k, v in configs.LLAMA_8B.items() if k != "torch_dtype"} | {"dtype": "float32"}
    assert model_of(newer).bytes_per_token == 256 * KIB


def kinds(**more: Any) -> str:
    letters = {Kind.FULL: "F", Kind.WINDOW: "W", Kind.STATE: "S", Kind.NONE: "-"}
    found = layer_kinds({"num_hidden_layers": 8, **more})
    return "".join(letters[each.kind] for each in found)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, "FFFFFFFF"),
        ({"layer_types": ["linear_attention", "full_attention"] * 4}, "SFSFSFSF"),
        ({"sliding_window": 64, "model_type": "mistral"}, "WWWWWWWW"),
        ({"sliding_window": 64, "model_type": "gemma2"}, "WFWFWFWF"),
        ({"sliding_window": 64, "sliding_window_pattern": 4}, "WWWFWWWF"),
        ({"sliding_window": 64, "sliding_window_pattern": "LLLG"}, "WWWFWWWF"),
        ({"sliding_window": 64, "use_sliding_window": False, "max_window_layers": 2}, "FFFFFFFF"),
        ({"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 6}, "FFFFFFWW"),
        ({"hybrid_override_pattern": "M-M*-M-*"}, "S-SF-S-F"),
        ({"attn_layer_period": 4, "attn_layer_offset": 1}, "SFSSSFSS"),
        ({"attn_layer_indices": [2]}, "SSFSSSSS"),
        ({"full_attention_interval": 4}, "SSSFSSSF"),
        ({"linear_attn_config": {"full_attn_layers": [4, 8]}}, "SSSFSSSF"),
        ({"no_rope_layers": [1, 1, 1, 0] * 2, "attention_chunk_size": 8192}, "WWWFWWWF"),
        ({"num_kv_shared_layers": 3}, "FFFFF---"),
    ],
)
def test_layers_are_told_apart_however_a_configuration_says_it(
    config: dict[str, Any], expected: str
) -> None:
    assert kinds(**config) == expected


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({}, "no num_hidden_layers or n_layer"),
        ({"num_hidden_layers": "8"}, "num_hidden_layers='8' is not a whole number"),
        ({"num_hidden_layers": 10**9}, "1000000000 layers"),
        (configs.LLAMA_8B | {"layer_types": ["full_attention"]}, "the kinds of 1 layers for 32"),
        (configs.LLAMA_8B | {"layer_types": ["psychic"] * 32}, "layers of the kind 'psychic'"),
        (configs.LLAMA_8B | {"layer_types": ["mamba"] * 32}, "no layer of this model keeps KV"),
        (configs.LLAMA_8B | {"layer_types": 5}, "a field is not what it should be"),
        (configs.LLAMA_8B | {"block_configs": [1]}, "layers of different shapes"),
        (configs.LLAMA_8B | {"torch_dtype": "int3"}, "the type 'int3' is not known"),
        (configs.LLAMA_8B | {"num_key_value_heads": 0}, "no KV heads"),
        ([], "not a JSON object"),
    ],
)
def test_what_is_not_understood_is_refused(tmp_path: Path, config: Any, reason: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidRequest, match=reason) as error:
        load_model(tmp_path)
    assert str(error.value).startswith(str(tmp_path / "config.json"))


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read"):
        load_model(tmp_path / "nothing.json")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InvalidRequest, match="not JSON"):
        load_model(tmp_path / "config.json")
