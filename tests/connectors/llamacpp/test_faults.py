"""The daemon stopped or killed before, during and after a load: the answer is right, and soon."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvstore.testing.daemon import Daemon
from tests.connectors.llamacpp.conftest import Chat, Open

Words = Callable[[int, int], list[int]]
DEADLINE_S = 0.5
pytestmark = pytest.mark.fault


def prepared(chat: Open, daemon: Daemon, prompt: list[int]) -> tuple[Chat, list[int]]:
    """Return a model that has loaded nothing yet, and what it has to answer."""
    first = chat("gemma3", daemon)
    answer = first.ask(prompt)
    first.saved()
    return chat("gemma3", daemon, cache={"load_deadline_s": DEADLINE_S}), answer


def test_killed_before_a_load(chat: Open, own_daemon: Daemon, words: Words) -> None:
    prompt = words(100, 1)
    kept, answer = prepared(chat, own_daemon, prompt)
    own_daemon.kill()
    assert kept.ask(prompt) == answer
    own_daemon.start()
    deadline = time.monotonic() + 20
    while not kept.cache._client.available:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    kept.llama.reset()
    assert kept.ask(prompt) == answer
    assert kept.cache.counts.loads == 1


@pytest.mark.parametrize("moment", ["acquired", "copied", "restored"])
def test_killed_during_a_load(
    chat: Open, own_daemon: Daemon, words: Words, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvstore_llamacpp.context import Context
    from kvstore_llamacpp.loading import Loader

    prompt = words(100, 1)
    kept, answer = prepared(chat, own_daemon, prompt)
    place, name = {
        "acquired": (Loader, "_copy"),
        "copied": (Loader, "_state"),
        "restored": (Context, "restore"),
    }[moment]
    original = getattr(place, name)

    def kill_first(*args: Any) -> Any:
        own_daemon.kill()
        return original(*args)

    monkeypatch.setattr(place, name, kill_first)
    assert kept.ask(prompt) == answer
    # Copied: the daemon may have said before that the lease was held.
    loads = {"acquired": {0}, "copied": {0, 1}, "restored": {1}}[moment]
    assert kept.cache.counts.loads in loads
    assert kept.ask(words(50, 2)) == chat("gemma3", None).ask(words(50, 2))


def test_stopped_delays_one_prompt_by_its_deadline(
    chat: Open, own_daemon: Daemon, words: Words
) -> None:
    prompt = words(100, 1)
    kept, answer = prepared(chat, own_daemon, prompt)
    os.kill(own_daemon.pid, signal.SIGSTOP)
    try:
        took = []
        for _ in range(2):
            began = time.monotonic()
            with pytest.raises(KeyError):
                _ = kept.cache[prompt]
            took.append(time.monotonic() - began)
        assert took[0] < DEADLINE_S * 2 + 1
        assert took[1] < DEADLINE_S / 2  # the breaker is open
        assert kept.ask(prompt) == answer
    finally:
        os.kill(own_daemon.pid, signal.SIGCONT)


def test_killed_after_a_load_saves_are_dropped(
    chat: Open, own_daemon: Daemon, words: Words
) -> None:
    prompt = words(100, 1)
    kept, answer = prepared(chat, own_daemon, prompt)
    assert kept.ask(prompt) == answer
    own_daemon.kill()
    other = words(150, 2)
    assert kept.ask(other) == chat("gemma3", None).ask(other)
    assert kept.cache.saved_blocks == 0


def test_a_daemon_that_is_not_there_yet(chat: Open, words: Words) -> None:
    with Daemon() as daemon:
        kept = chat("llama", daemon, cache={"load_deadline_s": DEADLINE_S})
        prompt = words(100, 1)
        answer = kept.ask(prompt)
        daemon.start()
        deadline = time.monotonic() + 20
        while not kept.cache._client.available:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        kept.llama.reset()
        assert kept.ask(prompt) == answer
        assert kept.cache.flush()
        assert kept.cache.saved_blocks == 3


def test_a_full_daemon_refuses_and_is_counted(chat: Open, words: Words) -> None:
    with Daemon("dram.capacity=1MiB", "dram.extent=1MiB", file=False) as daemon:
        daemon.start()
        kept = chat("llama", daemon, cache={"save_deadline_s": 0.1})
        prompt = words(950, 1)
        assert kept.ask(prompt) == chat("llama", None).ask(prompt)
        kept.cache._prefixes.saver.drain(20)
        assert kept.cache.saves_dropped == 1
