"""Two ranks, the second in a process of its own: each loads and saves what it holds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvstore import Client, Incompatible
from kvstore.testing.daemon import Daemon
from kvstore.testing.wait import until
from tests.connectors.trtllm import standin
from tests.connectors.trtllm.conftest import Engine
from tests.connectors.trtllm.executor import BLOCK, KINDS, Executor, Rank, llm_args, write_config
from tests.connectors.trtllm.other_rank import other_rank

Words = Callable[[int, int], list[int]]
POOL = 64


@contextmanager
def two_ranks(
    target: str, model: str, monkeypatch: pytest.MonkeyPatch, kinds: int = KINDS, **other: Any
) -> Iterator[tuple[Engine, Any]]:
    """Yield an engine of two ranks, and the pipe to the second. other: what that one is told."""
    settings = json.dumps({"target": target, "load_deadline_s": 10})
    monkeypatch.setenv("TRTLLM_KVSTORE", settings)
    options = {"model": model, "tensor_parallel_size": 2}
    write_config(model, kinds)
    with other_rank(settings, POOL, kinds, {**options, **other}) as link:
        standin.enter(standin.World(0, [link]))
        from kvstore_trtllm import KVStoreScheduler, KVStoreWorker

        arguments = llm_args(**options)
        worker, scheduler = KVStoreWorker(arguments), KVStoreScheduler(arguments)
        try:
            rank = Rank(worker, 0, POOL, kinds)
            assert link.recv() == "ready"

            def forward(meta: object, work: Any) -> object:
                link.send(("forward", meta, work))
                return meta

            def finished(asked: list[int], own: list[int]) -> list[int]:
                link.send(("finished", asked))
                told[0].update(own)
                told[1].update(link.recv())
                both = sorted(told[0] & told[1])
                for each in told:
                    each.difference_update(both)
                return both

            told: tuple[set[int], set[int]] = (set(), set())
            executor = Executor(scheduler, rank, forward=forward, finished=finished)
            until(lambda: scheduler._engine.namespace is not None)
            yield Engine(scheduler, worker, executor), link
        finally:
            worker.close()
            standin.enter(standin.World())


def both_saved(engine: Engine, link: Any) -> None:
    assert engine.worker._saver.drain(20)
    link.send(("drain",))
    assert link.recv()
    until(lambda: (engine.executor.poll(), engine.executor.held == 0)[1])


def check_both(link: Any, request: Any) -> None:
    link.send(("check", request.tokens[: request.computed], request.blocks))
    assert link.recv() == ""


def test_each_rank_gets_its_own_heads(
    daemon: Daemon, model: str, words: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = words(100, 1)
    with two_ranks(daemon.target, model, monkeypatch) as (engine, link):
        (request,) = engine.executor.run(prompt)
        check_both(link, request)
        both_saved(engine, link)
        assert engine.namespace.groups[0].shards == 2
        namespace = engine.namespace.id
    with two_ranks(daemon.target, model, monkeypatch) as (engine, link):
        (request,) = engine.executor.run(prompt)
        assert request.external == 96
        check_both(link, request)
        assert engine.namespace.id == namespace


def test_a_block_of_one_rank_alone_is_no_hit(
    daemon: Daemon, model: str, words: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvstore import root_key
    from kvstore.model.keys import KeyChain

    prompt = words(100, 1)
    with two_ranks(daemon.target, model, monkeypatch) as (engine, link):
        with Client(daemon.target) as client:
            namespace = engine.namespace
            keys = KeyChain(root_key(namespace.id), BLOCK).update(prompt)
            client.register(namespace)
            record = bytes(namespace.groups[0].record_nbytes)
            client.put(namespace.id, keys, [record] * len(keys), shard=0)
        (request,) = engine.executor.run(prompt)
        assert request.external == 0
        check_both(link, request)


def test_latent_attention_is_stored_once(
    daemon: Daemon, model: str, words: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = words(100, 1)
    with two_ranks(daemon.target, model, monkeypatch, kinds=1) as (engine, link):
        (request,) = engine.executor.run(prompt)
        both_saved(engine, link)
        assert engine.namespace.groups[0].shards == 1
        assert engine.count("saved_blocks") == 12
    with two_ranks(daemon.target, model, monkeypatch, kinds=1) as (engine, link):
        (request,) = engine.executor.run(prompt)
        assert request.external == 96
        check_both(link, request)


def test_killed_after_the_promise_both_ranks_have_what_was_promised(
    mortal: Daemon, model: str, words: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = words(100, 1)
    with two_ranks(mortal.target, model, monkeypatch) as (engine, link):
        engine.executor.run(prompt)
        both_saved(engine, link)
    with two_ranks(mortal.target, model, monkeypatch) as (engine, link):
        build = engine.scheduler.build_connector_meta

        def kill_first(output: Any) -> Any:
            if mortal.alive:
                mortal.kill()
            return build(output)

        engine.scheduler.build_connector_meta = kill_first
        (request,) = engine.executor.run(prompt, answer=10)
        assert request.external == 96
        check_both(link, request)


def test_ranks_with_another_kind_of_kv_are_refused(
    daemon: Daemon, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        pytest.raises(Incompatible, match="different kinds of KV"),
        two_ranks(daemon.target, model, monkeypatch, dtype="fp8"),
    ):
        pass


def test_a_rank_that_cannot_read_what_is_staged_is_refused(
    daemon: Daemon, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvstore_trtllm.staged import Staged

    monkeypatch.setattr(Staged, "path", property(lambda self: "/proc/0/fd/0"))
    with (
        pytest.raises(Incompatible, match="one host"),
        two_ranks(daemon.target, model, monkeypatch),
    ):
        pass
