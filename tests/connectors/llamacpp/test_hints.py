"""Hints of a conversation with llama.cpp reach the daemon, from a program or from headers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kvstore import Client, InvalidRequest
from kvstore.testing.daemon import Daemon
from kvstore.testing.wait import until
from kvstore_llamacpp.hints import NO_HINTS, HintHeaders, current_hints, hints_for
from tests.connectors.llamacpp.conftest import Open

Words = Callable[[int, int], list[int]]


def test_hints_last_as_long_as_their_context() -> None:
    assert current_hints() is NO_HINTS
    with hints_for({"session_id": "a", "expect_s": 30}):
        with hints_for({"session_id": "b"}):
            assert current_hints().session_id == "b"
        assert (current_hints().session_id, current_hints().expect_s) == ("a", 30)
    assert current_hints() is NO_HINTS


@pytest.mark.parametrize("fields", [{"sesion_id": "s"}, {"expect_s": -1}, {"pin_bytes": "all"}])
def test_hints_that_are_none_are_refused_with_those_that_are(fields: dict[str, Any]) -> None:
    with (
        pytest.raises(InvalidRequest, match="known are session_id, end_session"),
        hints_for(fields),
    ):
        pass


@pytest.mark.parametrize(
    ("headers", "session", "pin_s"),
    [
        ([(b"X-Session-ID", b"s"), (b"x-session-pin-s", b"60")], "s", 60),
        ([(b"x-session-id", b"s"), (b"x-session-expect-s", b"soon")], "", None),
        ([(b"accept", b"*/*")], "", None),
    ],
)
def test_headers_are_hints_of_what_answers_the_request(headers, session, pin_s) -> None:
    seen = []

    async def app(scope, receive, send) -> None:
        seen.append(await asyncio.to_thread(current_hints))  # the server completes in a thread

    async def serve() -> None:
        scope = {"type": "http", "headers": headers}
        others = {"type": "http", "headers": [(b"x-session-id", b"other")]}
        await asyncio.gather(*(HintHeaders(app)(each, None, None) for each in (scope, others)))

    asyncio.run(serve())
    assert [each.session_id for each in seen] == [session, "other"]
    assert seen[0].pin_s == pin_s
    assert current_hints() is NO_HINTS


def test_the_daemon_is_told_of_a_conversation(chat: Open, own_daemon: Daemon, words: Words) -> None:
    kept = chat("llama", own_daemon)
    prompt = words(200, 1)
    with kept.cache.hints(session_id="chat-17", pin_s=60, pin_bytes=1 << 20):
        answer = kept.ask(prompt)
    assert kept.cache.flush()
    until(lambda: kept.cache.counts.hints == 1)
    with Client(own_daemon.target) as client:
        until(lambda: client.admin.stats()["dram"]["pinned_bytes"] > 0, 5)
        report = client.hints.end_session("chat-17")
        assert report.blocks == (len(prompt) + len(answer)) // 32, "all blocks are of this session"
    kept.llama.reset()
    assert kept.ask(prompt) == answer, "without hints"
    assert kept.cache.counts.hints == 1


def test_hints_cost_nothing_when_the_daemon_is_away(
    chat: Open, own_daemon: Daemon, words: Words
) -> None:
    kept = chat("llama", own_daemon, cache={"load_deadline_s": 0.3})
    prompt = words(200, 1)
    answer = kept.ask(prompt)
    own_daemon.kill()
    kept.llama.reset()
    with kept.cache.hints(session_id="s", end_session=True):
        assert kept.ask(prompt) == answer
    until(lambda: kept.cache.counts.hints_failed == 1)
