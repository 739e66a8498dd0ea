"""The daemon killed or stopped before, during and after a load: misses, and nothing else.

The executor checks every byte of every request, so an answer from wrong KV fails each of these.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvstore.testing.daemon import Daemon
from kvstore.testing.wait import until
from tests.connectors.trtllm.conftest import Engine, Open

Words = Callable[[int, int], list[int]]
DEADLINE_S = 0.5
pytestmark = pytest.mark.fault


def prepared(engine: Open, daemon: Daemon, prompt: list[int]) -> Engine:
    """Return an engine that has loaded nothing yet, beside a daemon that has the prompt."""
    first = engine(daemon)
    first.executor.run(prompt)
    first.flush()
    second = engine(daemon, {"load_deadline_s": DEADLINE_S})
    until(lambda: second.scheduler._engine.client.local)
    return second


def test_killed_before_a_load(engine: Open, mortal: Daemon, words: Words) -> None:
    prompt = words(100, 1)
    second = prepared(engine, mortal, prompt)
    mortal.kill()
    (request,) = second.executor.run(prompt)
    assert request.external == 0
    mortal.start()
    until(lambda: second.scheduler._engine.client.available)
    second.executor.forget()
    (request,) = second.executor.run(prompt)
    assert request.external == 96


@pytest.mark.parametrize("moment", ["leased", "copied", "promised", "loading", "loaded"])
def test_killed_during_a_load(
    engine: Open, mortal: Daemon, words: Words, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvstore.client.leased import PrefixLeases
    from kvstore_trtllm.pool import Pool
    from kvstore_trtllm.scheduler import KVStoreScheduler

    prompt = words(100, 1)
    second = prepared(engine, mortal, prompt)
    place, name = {
        "leased": (PrefixLeases, "copy"),
        "copied": (PrefixLeases, "release"),
        "promised": (KVStoreScheduler, "build_connector_meta"),
        "loading": (Pool, "write"),
        "loaded": (type(second.worker), "wait_for_save"),
    }[moment]
    original = getattr(place, name)

    def kill_first(*arguments: Any, **more: Any) -> Any:
        if mortal.alive:
            mortal.kill()
        return original(*arguments, **more)

    monkeypatch.setattr(place, name, kill_first)
    (request,) = second.executor.run(prompt, answer=10)
    assert not mortal.alive
    assert request.external == (0 if moment in ("leased", "copied") else 96)
    (other,) = second.executor.run(words(50, 2), answer=10)
    assert other.external == 0
    second.worker._saver.drain(20)
    second.executor.poll()
    assert second.executor.held == 0, "blocks are kept for a daemon that is dead"


@pytest.mark.parametrize("moment", ["before", "leased", "promised"])
def test_stopped_delays_one_prompt_by_its_deadline(
    engine: Open, mortal: Daemon, words: Words, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvstore.client.leased import PrefixLeases
    from kvstore_trtllm.scheduler import KVStoreScheduler

    prompt = words(100, 1)
    second = prepared(engine, mortal, prompt)

    def stop() -> None:
        os.kill(mortal.pid, signal.SIGSTOP)

    if moment == "before":
        stop()
    else:
        place, name = {
            "leased": (PrefixLeases, "copy"),
            "promised": (KVStoreScheduler, "build_connector_meta"),
        }[moment]
        original = getattr(place, name)

        def stop_first(*arguments: Any, **more: Any) -> Any:
            stop()
            return original(*arguments, **more)

        monkeypatch.setattr(place, name, stop_first)
    try:
        took = []
        lookup = second.scheduler.get_num_new_matched_tokens

        def timed(*arguments: Any) -> Any:
            began = time.monotonic()
            told = lookup(*arguments)
            took.append(time.monotonic() - began)
            return told

        second.scheduler.get_num_new_matched_tokens = timed
        (request,) = second.executor.run(prompt, answer=10)
        assert request.external == (96 if moment == "promised" else 0)
        for seed in (2, 3, 4):
            second.executor.run(words(50, seed), answer=10)
        assert took[0] < 2 * DEADLINE_S + 1
        assert sum(took[2:]) < DEADLINE_S / 2, "the breaker is not open"
        assert second.worker._saver.drain(20)
    finally:
        os.kill(mortal.pid, signal.SIGCONT)
    monkeypatch.undo()
    until(lambda: second.scheduler._engine.client.available)
    second.executor.forget()
    (request,) = second.executor.run(prompt)
    assert request.external == 96


def test_a_daemon_that_comes_later_is_found(engine: Open, words: Words) -> None:
    prompt = words(100, 1)
    with Daemon() as daemon:
        first = engine(daemon, {"load_deadline_s": DEADLINE_S})
        first.executor.run(prompt)
        daemon.start()
        until(lambda: first.scheduler._engine.client.available)
        first.executor.forget()
        first.executor.run(prompt)
        first.saved()
        first.executor.forget()
        (request,) = first.executor.run(prompt)
        assert request.external == 96
