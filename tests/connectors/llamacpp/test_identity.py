"""Whose records a model gets: those of its own GGUF, parameters and build, as they were stored."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import BlockKey, Client, Namespace, Part, Span, checksum
from kvstore.testing.daemon import Daemon
from tests.connectors.llamacpp.conftest import Chat, Open
from tests.connectors.llamacpp.tiny import make_model

Words = Callable[[int, int], list[int]]


def stored(chat: Open, daemon: Daemon, prompt: list[int], kind: str | Path, **options: Any) -> Chat:
    kept = chat(kind, daemon, **options)
    kept.ask(prompt)
    kept.saved()
    return kept


def place(kept: Chat, prompt: Sequence[int]) -> tuple[Namespace, list[BlockKey]]:
    prefixes = kept.cache._prefixes
    return prefixes._namespace, prefixes._chain().update(prompt)


def test_a_gguf_that_changed_under_its_name(
    chat: Open, daemon: Daemon, words: Words, tmp_path: Path
) -> None:
    path, prompt = make_model(tmp_path / "model.gguf", "llama"), words(100, 1)
    before = stored(chat, daemon, prompt, path)
    time.sleep(0.05)
    make_model(tmp_path / "other.gguf", "llama", seed=8).rename(path)
    before.llama.reset()
    before.ask(prompt)  # the model that runs has the old weights; what the file says is not it
    assert before.cache.counts.bypassed == 1
    after = chat(path, daemon)
    assert after.ask(prompt) == chat(path, None).ask(prompt)
    assert after.cache.counts.loads == 0
    assert place(before, prompt)[0] != place(after, prompt)[0]


@pytest.mark.parametrize(
    "options",
    [
        {"rope_freq_base": 5000.0},
        {"flash_attn": True},
        {"type_k": 8},
        {"kv_overrides": {"llama.rope.freq_base": 7000.0}},
    ],
)
def test_other_parameters_share_nothing(
    chat: Open, daemon: Daemon, words: Words, options: dict[str, Any]
) -> None:
    prompt = words(100, 1)
    stored(chat, daemon, prompt, "llama")
    other = chat("llama", daemon, **options)
    other.ask(prompt)
    assert (other.cache.counts.lookups, other.cache.counts.loads) == (1, 0)


def test_the_size_of_the_context_and_of_batches_makes_no_difference(
    chat: Open, daemon: Daemon, words: Words
) -> None:
    prompt = words(100, 1)
    stored(chat, daemon, prompt, "gemma3")
    other = chat("gemma3", daemon, n_ctx=512, n_batch=64, swa_full=False)
    other.ask(prompt)
    assert other.cache.counts.loads == 1


def test_records_of_another_build_are_a_miss(
    chat: Open, daemon: Daemon, words: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvstore_llamacpp import namespace

    prompt = words(100, 1)
    stored(chat, daemon, prompt, "llama")
    library = tmp_path / "libllama.so"
    library.write_bytes(b"another build")
    monkeypatch.setattr(namespace, "_libraries", lambda: [library])
    other = chat("llama", daemon)
    other.ask(prompt)
    assert (other.cache.counts.lookups, other.cache.counts.loads) == (1, 0)


def test_records_that_rot_in_memory_are_a_miss(chat: Open, daemon: Daemon, words: Words) -> None:
    prompt = words(100, 1)
    kept = stored(chat, daemon, prompt, "gemma3")
    namespace, keys = place(kept, prompt)
    with Client(daemon.target) as client:
        client.register(namespace)
        grant = client.acquire(namespace.id, keys[:1], spans=[Span(Part(0, 0), 0, 1)])
        client.view(grant.slots[0])[100] ^= 1
        client.release(grant.lease_id)
    again = chat("gemma3", daemon)
    assert again.ask(prompt) == chat("gemma3", None).ask(prompt)
    assert (again.cache.counts.loads, again.cache.counts.failed) == (0, 1)


@pytest.mark.parametrize("nbytes", [1, 24, 40, 5000])
def test_a_snapshot_that_is_none_does_not_reach_llama_cpp(
    chat: Open, daemon: Daemon, words: Words, nbytes: int
) -> None:
    """Whoever may open the socket may store any bytes with their own checksum."""
    prompt = words(100, 1)
    kept = chat("mamba", daemon)
    namespace, keys = place(kept, prompt)
    garbage = np.random.default_rng(1).integers(0, 256, nbytes, dtype=np.uint8)
    with Client(daemon.target) as client:
        client.register(namespace)
        spans = [Span(Part(0, 0), 0, 1)]
        grant = client.reserve(
            namespace.id, keys[2:3], first_block=2, parent=keys[1], spans=spans, sizes=[nbytes]
        )
        client.view(grant.slots[0])[:nbytes] = garbage.tobytes()
        client.commit(grant.lease_id, [checksum(garbage.tobytes())])
    assert kept.ask(prompt) == chat("mamba", None).ask(prompt)
    assert (kept.cache.counts.loads, kept.cache.counts.failed) == (0, 1)
    replaced(kept, prompt)


@pytest.mark.parametrize("damage", ["truncated", "tail", "type"])
def test_a_snapshot_that_llama_cpp_refuses_is_a_miss(
    chat: Open, daemon: Daemon, words: Words, damage: str
) -> None:
    from kvstore_llamacpp.loading import snapshot_nbytes, write_snapshot

    prompt = words(100, 1)
    kept = chat("mamba", daemon)
    namespace, keys = place(kept, prompt)
    kept.llama.eval(prompt[:96])
    state = kept.cache._context.save()
    state = {
        "truncated": state[: len(state) // 2],
        "tail": np.concatenate([state, np.zeros(64, np.uint8)]),
        "type": np.concatenate([state[:8], np.full(64, 255, np.uint8), state[72:]]),
    }[damage]
    record = np.empty(snapshot_nbytes(state), np.uint8)
    write_snapshot(state, 96, record)
    with Client(daemon.target) as client:
        client.register(namespace)
        spans = [Span(Part(0, 0), 0, 1)]
        grant = client.reserve(
            namespace.id, keys[2:3], first_block=2, parent=keys[1], spans=spans, sizes=[len(record)]
        )
        client.view(grant.slots[0])[: len(record)] = record.tobytes()
        client.commit(grant.lease_id, [checksum(record.tobytes())])
    kept.cache._context.clear()
    assert kept.ask(prompt) == chat("mamba", None).ask(prompt)
    assert (kept.cache.counts.loads, kept.cache.counts.failed) == (0, 1)
    replaced(kept, prompt)


def replaced(kept: Chat, prompt: list[int]) -> None:
    """Check that what was of no use has been deleted, and is stored anew."""
    kept.saved()
    kept.cache._context.clear()
    kept.ask(prompt)
    assert (kept.cache.counts.loads, kept.cache.counts.failed) == (1, 1)


def test_a_model_whose_layout_is_unknown_says_so(
    chat: Open, daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    kept = chat("mamba", daemon)
    assert kept.cache.stores_snapshots
    assert "layout=unknown stored=snapshots" in caplog.text
