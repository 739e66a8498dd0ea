"""What engines share, which are refused, and what they are told to change."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore import ConfigError, Incompatible
from kvstore.testing.daemon import Daemon
from kvstore.testing.wait import until
from tests.connectors.trtllm.conftest import Open
from tests.connectors.trtllm.executor import (
    BLOCK,
    DIM,
    KINDS,
    LAYERS,
    llm_args,
    make_pool,
    write_config,
)

Words = Callable[[int, int], list[int]]


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float16"},
        {"quant_config": "fp8"},
        {"model_kwargs": {"rope_theta": 1}},
        {"attn_backend": "FLASHINFER"},
        {"kinds": 1},
    ],
)
def test_whatever_changes_the_kv_changes_the_namespace(
    engine: Open, daemon: Daemon, model: str, changes: dict[str, Any]
) -> None:
    named = {"weights_id": model}
    first = engine(daemon, named)
    assert first.namespace.id == engine(daemon, named, blocks=20).namespace.id
    write_config(model, changes.get("kinds", KINDS))
    second = engine(daemon, named, **changes)
    assert first.namespace.id != second.namespace.id


def test_other_weights_share_nothing(engine: Open, daemon: Daemon, model: str) -> None:
    before = engine(daemon).namespace.id
    weights = Path(model, "model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    assert engine(daemon).namespace.id != before
    named = [engine(daemon, {"weights_id": name}).namespace.id for name in "aab"]
    assert named[0] == named[1] != named[2]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline"),
        ({"context_parallel_size": 2}, "context"),
        ({"max_beam_width": 4}, "beam"),
        ({"enable_attention_dp": True}, "attention data"),
        ({"orchestrator_type": "ray"}, "by MPI"),
        ({"speculative_config": object()}, "turn speculation off"),
        ({"sparse_attention_config": object()}, "sparse"),
        ({"enable_block_reuse": False}, "enable_block_reuse: true"),
        ({"enable_partial_reuse": True}, "enable_partial_reuse: false"),
        ({"host_cache_size": 1 << 30}, "host_cache_size: 0"),
        ({"max_attention_window": [4096]}, "sliding windows"),
        ({"use_kv_cache_manager_v2": True}, "use_kv_cache_manager_v2: false"),
        ({"dtype": "nvfp4"}, "NVFP4 KV"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_the_option_to_change(
    engine: Open, daemon: Daemon, changes: dict[str, Any], reason: str
) -> None:
    (name,) = changes
    with pytest.raises(Incompatible, match=rf"{name}=.*{reason}"):
        engine(daemon, **changes)


def test_options_that_say_nothing_are_fine(engine: Open, daemon: Daemon) -> None:
    engine(daemon, host_cache_size=None, max_beam_width=None, pipeline_parallel_size=None)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"load_format": "LoadFormat.DUMMY"}, "load_format=LoadFormat.DUMMY"),
        ({"checkpoint_loader": object()}, "load_format"),
        ({"model": "nobody/nothing"}, "cannot find the weights of nobody/nothing"),
    ],
)
def test_weights_that_no_file_tells_need_a_name(
    engine: Open,
    daemon: Daemon,
    changes: dict[str, Any],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(Incompatible, match=rf'{reason}.*"weights_id"'):
        engine(daemon, **changes)
    # Without the model's config.json, what KV it has is not told either.
    engine(daemon, {"weights_id": "mine", "allow_untested": "model" in changes}, **changes)


def test_another_version_is_refused_unless_it_is_to_be_tried(
    engine: Open, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tensorrt_llm

    monkeypatch.setattr(tensorrt_llm, "__version__", "1.4.0")
    with pytest.raises(Incompatible, match=r"1\.4\.0 .* only 1\.2\.1; .*\"allow_untested\": true"):
        engine(daemon)
    tried = engine(daemon, {"allow_untested": True})
    assert dict(tried.namespace.identity)["engine"] == "tensorrt-llm 1.4.0"


@pytest.mark.parametrize(
    "pool", [make_pool(4).reshape(4, -1), make_pool(4)[:, :, ::2], make_pool(4)[0]]
)
def test_a_pool_of_another_shape_is_refused(engine: Open, daemon: Daemon, pool: Any) -> None:
    first = engine(daemon)
    with pytest.raises(Incompatible, match="KV pool of shape"):
        first.worker.register_kv_caches(pool)


@pytest.mark.parametrize("kinds", [1, KINDS])
def test_blocks_of_another_size_than_the_option_says_are_refused(
    engine: Open, daemon: Daemon, model: str, kinds: int
) -> None:
    write_config(model, kinds)
    with pytest.raises(Incompatible, match=rf"tokens_per_block=4: .*tokens_per_block: {BLOCK}$"):
        engine(daemon, {"allow_untested": True}, kinds=kinds, tokens_per_block=BLOCK // 2)
    engine(daemon, kinds=kinds)


@pytest.mark.parametrize("told", [BLOCK // 2, 2 * BLOCK])
def test_nothing_is_saved_of_a_request_with_other_blocks_than_its_tokens_need(
    engine: Open,
    daemon: Daemon,
    model: str,
    words: Words,
    *,
    told: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """config.json tells nothing, so only the number of blocks shows it."""
    Path(model, "config.json").write_text("{}")
    first = engine(daemon, {"allow_untested": True}, tokens_per_block=told)
    with caplog.at_level(logging.ERROR):
        first.executor.run(words(100, 1), words(90, 2), answer=20)
        first.executor.run(words(100, 1))
    first.saved()
    assert first.count("saved_blocks") == first.count("lookups_failed") == 0
    assert first.count("lookups") == 2
    assert caplog.text.count("blocks=miscounted") == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_hidden_layers": 2 * LAYERS}, f"holds {LAYERS} layers, and the model has"),
        ({"num_key_value_heads": [1, 2, 1]}, "layers with different KV heads"),
        ({"block_configs": [{}]}, "layers with different KV heads"),
        ({"head_dim": 3 * DIM}, "does not support this model"),
        ({"index_topk": 2048}, "indexers"),
        ({"kv_lora_rank": 12, "qk_rope_head_dim": 4}, "not known for this model"),
        ({"quantization_config": {"kv_cache_scheme": {"num_bits": 4}}}, "NVFP4 KV"),
        ({"num_hidden_layers": None, "text_config": {"index_topk": 1}}, "indexers"),
    ],
)
def test_a_model_whose_kv_is_not_all_in_the_pool_is_refused(
    engine: Open, daemon: Daemon, model: str, changes: dict[str, Any], reason: str
) -> None:
    write_config(model, **changes)
    with pytest.raises(Incompatible, match=reason):
        engine(daemon, {"allow_untested": True})


def test_a_checkpoint_with_nvfp4_kv_is_refused(engine: Open, daemon: Daemon, model: str) -> None:
    loaded = SimpleNamespace(kv_cache_quant_algo="NVFP4")
    with pytest.raises(Incompatible, match=r"quant_config\.kv_cache_quant_algo=NVFP4"):
        engine(daemon, quant_config=loaded)
    told = Path(model, "hf_quant_config.json")
    told.write_text(json.dumps({"quantization": {"kv_cache_quant_algo": "NVFP4"}}))
    with pytest.raises(Incompatible, match="NVFP4 KV"):
        engine(daemon)
    told.write_text(json.dumps({"quantization": {"kv_cache_quant_algo": "FP8"}}))
    engine(daemon)


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_key_value_heads": None, "num_attention_heads": None}, "num_attention_heads"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_what_config_json_does_not_tell_is_named(
    engine: Open, daemon: Daemon, model: str, changes: dict[str, Any], missing: str
) -> None:
    write_config(model, **changes)
    with pytest.raises(Incompatible, match=rf'not tell {missing},.*"allow_untested": true'):
        engine(daemon)
    engine(daemon, {"allow_untested": True})


def test_the_text_part_of_a_model_tells_its_kv(engine: Open, daemon: Daemon, model: str) -> None:
    inner = json.loads(Path(model, "config.json").read_text())
    Path(model, "config.json").write_text(json.dumps({"text_config": inner}))
    engine(daemon)


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"socket": "unix:/k"}', '{"target": "127.0.0.1:1"}', '{"load_deadline_s": 0}'],
)
def test_settings_that_are_unknown_or_malformed_are_refused(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvstore_trtllm.settings import Settings, read_settings

    monkeypatch.setenv("TRTLLM_KVSTORE", text)
    with pytest.raises(ConfigError, match=r"TRTLLM_KVSTORE: .*known keys: target, "):
        read_settings()
    assert read_settings({}) == Settings()


def test_an_engine_serves_before_its_weights_are_known(
    engine: Open, daemon: Daemon, words: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvstore.system.file_digests import FileDigests

    gate = threading.Event()
    digest = FileDigests.digest

    def slow(self: Any, *arguments: Any) -> Any:
        assert gate.wait(20)
        return digest(self, *arguments)

    monkeypatch.setattr(FileDigests, "known", lambda self, files: None)
    monkeypatch.setattr(FileDigests, "digest", slow)
    prompt = words(100, 1)
    first = engine(daemon, known=False)
    first.executor.run(prompt)
    assert first.count("bypassed_unknown_weights") == 1
    assert first.namespace is None
    gate.set()
    until(lambda: first.namespace is not None)
    first.executor.forget()
    first.executor.run(prompt)
    first.saved()
    assert first.count("saved_blocks") == 12


def test_both_halves_made_at_once_share_one_client(
    daemon: Daemon, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvstore_trtllm import KVStoreScheduler, KVStoreWorker

    monkeypatch.setenv("TRTLLM_KVSTORE", json.dumps({"target": daemon.target}))
    arguments = llm_args(model)
    halves: list[Any] = []
    threads = [
        threading.Thread(target=lambda half=half: halves.append(half(arguments)))
        for half in (KVStoreWorker, KVStoreScheduler)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    one, other = halves
    assert one._engine is other._engine
    other_engine = KVStoreWorker(llm_args(model))
    assert other_engine._engine is not one._engine
    other_engine.close()
    one._engine.close()
