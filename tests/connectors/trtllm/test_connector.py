"""Prompts resume from stored KV, and every byte in the pool is what the model would compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvstore import Client, root_key
from kvstore.model.keys import KeyChain
from kvstore.testing.daemon import Daemon
from kvstore.testing.damage import damage_resident
from kvstore.testing.wait import until
from tests.connectors.trtllm.conftest import Engine, Open
from tests.connectors.trtllm.executor import BLOCK

Words = Callable[[int, int], list[int]]


def test_a_new_engine_resumes_what_another_has_computed(
    engine: Open, daemon: Daemon, words: Words
) -> None:
    prompt = words(100, 1)
    first = engine(daemon)
    (request,) = first.executor.run(prompt, answer=20)
    assert request.external == 0
    first.saved()
    assert first.count("saved_blocks") == 119 // BLOCK

    second = engine(daemon)
    (again,) = second.executor.run(prompt, answer=20)
    assert again.external == 96
    assert again.tokens == request.tokens
    (longer,) = second.executor.run(request.tokens + words(30, 2), answer=3)
    second.saved()
    # Its own prefix cache has what it computed, so nothing has to come.
    assert longer.external == 0

    third = engine(daemon)
    (turn,) = third.executor.run(longer.tokens[:150], answer=3)
    assert turn.external == 144


def test_what_was_flushed_outlives_sigkill_of_the_daemon(
    engine: Open, mortal: Daemon, words: Words
) -> None:
    prompt = words(77, 1)
    first = engine(mortal)
    first.executor.run(prompt)
    first.flush()
    mortal.kill()
    mortal.start()
    second = engine(mortal)
    until(lambda: second.scheduler._engine.client.available)
    (request,) = second.executor.run(prompt)
    assert request.external == 72


def test_a_prefix_goes_on_behind_the_engine_s_own_blocks(
    engine: Open, daemon: Daemon, words: Words
) -> None:
    start, ends = words(40, 1), [words(60, seed) for seed in (2, 3)]
    first = engine(daemon)
    for end in ends:
        first.executor.run(start + end)
    first.saved()
    second = engine(daemon)
    (one,) = second.executor.run(start + ends[0])
    assert one.external == 96
    (other,) = second.executor.run(start + ends[1])
    assert other.external == 96 - 40
    second.executor.forget()
    (whole,) = second.executor.run(start + ends[1])
    assert whole.external == 96


def test_prompts_that_run_together_under_pressure(
    engine: Open, daemon: Daemon, words: Words
) -> None:
    """Twice as many blocks as the pool has, in turns, so that blocks are given away and come
    back; each token's KV is checked when its request ends."""
    prompts = [words(90, 1)[:48] + words(60, seed) for seed in range(12)]
    first = engine(daemon, blocks=40)
    for _ in range(3):
        for at in range(0, len(prompts), 2):
            first.executor.run(*prompts[at : at + 2], answer=12)
    first.saved()
    assert first.count("loaded_blocks") > 0
    assert first.count("lookups_failed") == 0
    second = engine(daemon, blocks=40)
    loaded = [second.executor.run(prompt)[0].external for prompt in prompts]
    assert loaded[0] == 104
    assert all(each >= 104 - 48 for each in loaded)


def test_what_is_stored_is_not_copied_again(engine: Open, daemon: Daemon, words: Words) -> None:
    prompt = words(100, 1)
    first = engine(daemon)
    first.executor.run(prompt)
    first.saved()
    before = first.count("saved_blocks")
    for _ in range(3):
        first.executor.run(prompt)
        first.saved()
    assert first.count("saved_blocks") == before
    second = engine(daemon)
    second.executor.run(prompt, answer=20)
    second.saved()
    assert second.count("saved_blocks") == (100 + 19) // BLOCK - before


def keys_of(engine: Engine, tokens: list[int]) -> list[Any]:
    namespace = engine.namespace
    return KeyChain(root_key(namespace.id), namespace.block_tokens).update(tokens)


def test_a_rotten_record_is_a_miss_and_is_stored_again(
    engine: Open, daemon: Daemon, words: Words
) -> None:
    prompt = words(100, 1)
    first = engine(daemon)
    first.executor.run(prompt)
    first.saved()
    with Client(daemon.target) as client:
        client.register(first.namespace)
        damage_resident(client, first.namespace.id, keys_of(first, prompt)[3:4])
    second = engine(daemon)
    (request,) = second.executor.run(prompt)
    assert request.external == 0
    assert second.count("lookups_failed") == 1
    second.saved()
    third = engine(daemon)
    (request,) = third.executor.run(prompt)
    assert request.external == 96


def test_at_least_one_token_is_computed(engine: Open, daemon: Daemon, words: Words) -> None:
    prompt = words(8 * BLOCK, 1)
    first = engine(daemon)
    first.executor.run(prompt)
    first.saved()
    second = engine(daemon)
    (request,) = second.executor.run(prompt)
    assert request.external == 7 * BLOCK
    for short in (prompt[:1], prompt[:BLOCK], prompt[: BLOCK + 1]):
        second.executor.forget()
        (request,) = second.executor.run(short)
        assert request.external == (len(short) - 1) // BLOCK * BLOCK


@pytest.mark.parametrize(
    "extra",
    [
        {"lora_task_id": 3},
        {"multimodal_hashes": [[1, 2]]},
        {"prompt_embedding_table": object()},
        {"py_return_context_logits": True},
    ],
)
def test_requests_whose_kv_is_not_of_tokens_alone_pass_by(
    engine: Open, daemon: Daemon, words: Words, extra: dict[str, Any]
) -> None:
    prompt = words(100, 1)
    first = engine(daemon)
    first.executor.run(prompt, **extra)
    first.saved()
    assert first.count("saved_blocks") == 0
    first.executor.forget()
    first.executor.run(prompt)
    first.saved()
    first.executor.forget()
    (request,) = first.executor.run(prompt, **extra)
    assert request.external == 0
    assert first.count("bypassed_inputs") == 2


def test_salts_share_nothing(engine: Open, daemon: Daemon, words: Words) -> None:
    prompt = words(100, 1)
    first = engine(daemon)
    for salt in ({}, {"cache_salt_id": 1}, {"cache_salt_id": 2}):
        first.executor.forget()
        (request,) = first.executor.run(prompt, **salt)
        first.saved()
        assert request.external == 0
        first.executor.forget()
        (request,) = first.executor.run(prompt, **salt)
        assert request.external == 96


def test_tokens_that_no_vocabulary_has_pass_by(engine: Open, daemon: Daemon, words: Words) -> None:
    first = engine(daemon)
    assert first.scheduler.get_num_new_matched_tokens(first.executor.submit([-1] * 20, 1), 0) == (
        0,
        False,
    )
    assert first.count("bypassed_inputs") == 1


def test_no_more_is_staged_than_may_be(engine: Open, daemon: Daemon, words: Words) -> None:
    """Each block has 1.5 KiB here; 1 MiB has room for some of them."""
    prompt = words(6000, 1)
    first = engine(daemon, blocks=800)
    first.executor.chunk = 2000
    first.executor.run(prompt)
    first.saved()
    nbytes = first.namespace.groups[0].record_nbytes
    second = engine(daemon, {"staged_mib_max": 1}, blocks=800)
    second.executor.chunk = 2000
    (request,) = second.executor.run(prompt)
    assert request.external == (1 << 20) // nbytes * BLOCK < 6000 - BLOCK
    assert second.scheduler._staged_nbytes == 0


def test_a_save_of_blocks_that_are_given_away_is_dropped(
    engine: Open, daemon: Daemon, words: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that gives blocks away all the same: a request that ends with an error."""
    from threading import Event

    from kvstore_trtllm.pool import Pool

    gate, copying = Event(), Event()
    read = Pool.read

    def slow(self: Any, *arguments: Any) -> Any:
        copying.set()
        assert gate.wait(20)
        return read(self, *arguments)

    monkeypatch.setattr(Pool, "read", slow)
    first = engine(daemon, {"reuse_wait_s": 0.05})
    request = first.executor.submit(words(17, 1), 5)
    first.executor.step([request])
    assert copying.wait(20)
    meta = first.executor.metas[-1]
    meta.saves, meta.loads, meta.handed_out = [], [], request.blocks
    first.worker.bind_connector_meta(meta)
    first.worker.start_load_kv(None)
    first.executor.rank.rows[request.blocks] = 0
    gate.set()
    assert first.worker._saver.drain(20)
    assert first.count("saves_dropped_reuse") == 1
    assert first.count("saved_blocks") == 0
    assert first.scheduler.request_finished(request, request.blocks)
    assert first.worker.get_finished([request.request_id], []) == ([request.request_id], [])


def test_blocks_are_kept_until_they_are_saved(
    engine: Open, daemon: Daemon, words: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    from threading import Event

    from kvstore_trtllm.pool import Pool

    gate = Event()
    read = Pool.read

    def slow(self: Any, *arguments: Any) -> Any:
        assert gate.wait(20)
        return read(self, *arguments)

    monkeypatch.setattr(Pool, "read", slow)
    first = engine(daemon)
    first.executor.run(words(40, 1))
    first.executor.poll()
    assert first.executor.held == 1
    gate.set()
    first.saved()
    assert first.count("saved_blocks") == 5
    # Nothing was saved of this one, so nothing has to be waited for.
    first.executor.run(words(5, 2))
    assert first.executor.held == 0


def test_a_full_daemon_refuses_and_is_counted(engine: Open, words: Words) -> None:
    with Daemon("dram.capacity=1MiB", "dram.extent=1MiB", file=False) as daemon:
        daemon.start()
        first = engine(daemon, {"save_deadline_s": 0.1}, blocks=800)
        first.executor.chunk = 6000
        first.executor.run(words(6000, 1))
        first.saved()
        assert first.count("saves_dropped_full") == 1


def test_what_operators_see(engine: Open, daemon: Daemon, words: Words) -> None:
    first = engine(daemon)
    first.executor.run(words(100, 1))
    first.saved()
    with Client(daemon.target) as client:
        (use,) = [
            each for each in client.admin.namespaces() if each.namespace.id == first.namespace.id
        ]
        assert use.model == "tiny-model"
        assert use.blocks == 12
        identity = dict(use.namespace.identity)
        assert identity["engine"] == "tensorrt-llm 1.2.1"
        assert [each for each in client.admin.outcomes() if each.request_id.startswith("trtllm-")]
