"""What engines share, which are refused, and what they are told to change."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore import ConfigError, Incompatible
from kvstore.testing.daemon import Daemon
from kvstore.testing.wait import until
from tests.connectors.trtllm.conftest import Open
from tests.connectors.trtllm.executor import llm_args, make_pool

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
    engine: Open, daemon: Daemon, words: Words, changes: dict[str, Any]
) -> None:
    first, second = engine(daemon), engine(daemon, **changes)
    assert first.namespace.id != second.namespace.id
    assert first.namespace.id == engine(daemon, blocks=20).namespace.id


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
    engine(daemon, {"weights_id": "mine"}, **changes)


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
