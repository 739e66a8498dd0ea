"""What the demo reads from a checkpoint's config."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvstore.model.errors import InvalidRequest
from kvstore_bench.demo.model import KVShape, kv_shape_of

GEMMA_3_270M = KVShape(full=3, sliding=15, window=512, elements_per_layer=512)


def write_config(folder: Path, **fields: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def test_a_hybrid_config_is_split_by_kind(tmp_path: Path) -> None:
    kinds = (["sliding_attention"] * 5 + ["full_attention"]) * 3
    model = write_config(
        tmp_path,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        hidden_size=640,
        sliding_window=512,
        layer_types=kinds,
    )
    assert kv_shape_of(model) == GEMMA_3_270M


def test_a_plain_config_has_full_layers_only(tmp_path: Path) -> None:
    model = write_config(
        tmp_path, num_hidden_layers=4, num_attention_heads=8, hidden_size=512, sliding_window=None
    )
    assert kv_shape_of(model) == KVShape(full=4, sliding=0, window=1, elements_per_layer=1024)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"num_hidden_layers": 2}'])
def test_another_file_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(InvalidRequest, match=r"config\.json"):
        kv_shape_of(tmp_path)


def test_a_hybrid_pool_is_as_small_as_vllm_accepts() -> None:
    # vLLM 0.32 refused 511 blocks for 3384 tokens and took 512.
    assert GEMMA_3_270M.blocks_for(3384, block_tokens=32, chunk_tokens=2048) == 512


def test_a_plain_pool_holds_one_request() -> None:
    plain = KVShape(full=28, sliding=0, window=1, elements_per_layer=2048)
    assert plain.blocks_for(3384, block_tokens=32, chunk_tokens=2048) == 106 + 1


def test_bytes_follow_the_layers_and_the_precision() -> None:
    assert GEMMA_3_270M.nbytes(1, dtype="bfloat16") == 18_432
    assert GEMMA_3_270M.nbytes(100, dtype="float32") == 2 * 18_432 * 100


def test_a_load_takes_only_the_window_of_sliding_layers() -> None:
    per_layer = 1024  # bytes of one token in bfloat16
    loaded = GEMMA_3_270M.load_nbytes(2000, dtype="bfloat16")
    assert loaded == (3 * 2000 + 15 * 512) * per_layer
