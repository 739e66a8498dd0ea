"""A run: what is sent in which order, with which history, and what becomes of failures."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from kvstore.model.errors import InvalidRequest, Unavailable
from kvstore_bench.chat.runner import CONSECUTIVE_FAILURES_MAX, ChatOptions, Result, run_chat
from kvstore_bench.chat.schedule import Job, schedule
from kvstore_bench.chat.workloads.generator import Shape, SizeRange, generate
from kvstore_bench.chat.workloads.workload import Conversation
from tests.bench.stub import Received, Script, StubServer, failing

BROKEN = Script(status=500, error="broken")


def chats(conversations: int = 3, turns: int = 3) -> list[Conversation]:
    sizes = SizeRange(10, 20)
    return generate(Shape(conversations, turns, sizes, SizeRange(3, 5), SizeRange(2, 4)))


def run(server: StubServer, conversations: list[Conversation], **options: Any) -> Result:
    return asyncio.run(run_chat(ChatOptions(url=server.url, **options), conversations))


def order_of(result: Result) -> list[tuple[str, int]]:
    return [(sample.conversation_id[-1], sample.turn) for sample in result.requests]


def answer_by_length(received: Received) -> Script:
    return Script(pieces=(f"answer {len(received.contents)}",))


def test_live_answers_become_history() -> None:
    with StubServer(answer_by_length) as server:
        result = run(server, chats(1), answers="live")
        histories = [received.contents for received in server.received]
    questions = [chats(1)[0].question(turn).content for turn in (1, 2, 3)]
    assert histories[0] == questions[:1]
    assert histories[1] == [questions[0], "answer 1", questions[1]]
    assert histories[2] == [*histories[1], "answer 3", questions[2]]
    spoken = [message.content for message in result.conversations[0].messages]
    assert spoken == [*histories[2], "answer 5"]


def test_fixed_answers_make_prompts_independent_of_the_model() -> None:
    conversations = chats(2)
    prompts = []
    for script in (Script(), answer_by_length):
        with StubServer(script) as server:
            run(server, conversations, answers="file")
            prompts.append([received.body["messages"] for received in server.received])
    assert prompts[0] == prompts[1]
    assert prompts[0][2][1]["content"] == conversations[0].messages[1].content


def test_a_system_message_opens_every_prompt() -> None:
    (plain,) = chats(1, turns=2)
    system = replace(plain.messages[0], role="system", content="Be brief.")
    for answers in ("live", "file"):
        with StubServer() as server:
            run(server, [replace(plain, messages=(system, *plain.messages))], answers=answers)
            roles = [[m["role"] for m in received.body["messages"]] for received in server.received]
        assert roles == [["system", "user"], ["system", "user", "assistant", "user"]]


def test_round_robin_asks_all_first_turns_first() -> None:
    with StubServer() as server:
        result = run(server, chats(), order="round-robin")
    assert order_of(result) == [(name, turn) for turn in (1, 2, 3) for name in "012"]


def test_sequential_asks_one_conversation_after_another() -> None:
    with StubServer() as server:
        result = run(server, chats(), order="sequential")
    assert order_of(result) == [(name, turn) for name in "012" for turn in (1, 2, 3)]


def test_never_more_in_flight_than_asked_and_no_turn_before_its_predecessor_ends() -> None:
    with StubServer(Script(first_s=0.02)) as server:
        result = run(server, chats(4), concurrency=2, answers="file")
    spans = sorted((s.started_s, s.started_s + s.latency_s) for s in result.requests)
    for started, _ in spans:
        assert sum(begin <= started < end for begin, end in spans) <= 2
    for sample in result.requests:
        for other in result.requests:
            if other.conversation_id == sample.conversation_id and other.turn < sample.turn:
                assert other.started_s + other.latency_s <= sample.started_s


def test_an_open_loop_does_not_wait_for_answers() -> None:
    with StubServer(Script(first_s=0.5)) as server:
        result = run(server, chats(4, turns=1), request_rate=1000.0)
        first_answer = min(received.sent[0] for received in server.received)
        assert all(received.arrived < first_answer for received in server.received)
    assert len(result.requests) == 4


def test_only_the_asked_turns_are_sent_with_their_full_history() -> None:
    conversations = chats(2)
    with StubServer() as server:
        result = run(server, conversations, answers="file", turns=(2, 2))
        lengths = [len(received.contents) for received in server.received]
    assert order_of(result) == [("0", 2), ("1", 2)]
    assert lengths == [3, 3]


def test_a_failed_turn_ends_a_live_conversation_but_no_other() -> None:
    with StubServer(failing(BROKEN, requests={1})) as server:
        result = run(server, chats(2), answers="live")
    assert order_of(result) == [("0", 1), ("1", 1), ("0", 2), ("0", 3)]
    assert result.skipped == 2
    assert [sample.failure is not None for sample in result.requests] == [False, True, False, False]


def test_a_failed_turn_does_not_end_a_replayed_conversation() -> None:
    with StubServer(failing(BROKEN, requests={1})) as server:
        result = run(server, chats(2), answers="file")
    assert len(result.requests) == 6
    assert result.skipped == 0


def test_a_dead_server_ends_the_run_unless_told_otherwise() -> None:
    conversations = chats(CONSECUTIVE_FAILURES_MAX + 5, turns=1)
    with StubServer(BROKEN) as server:
        stopped = run(server, conversations)
        kept_on = run(server, conversations, keep_going=True)
    assert (len(stopped.requests), stopped.skipped) == (CONSECUTIVE_FAILURES_MAX, 5)
    assert (len(kept_on.requests), kept_on.skipped) == (CONSECUTIVE_FAILURES_MAX + 5, 0)


def test_warm_up_is_not_measured_and_shares_no_prefix() -> None:
    with StubServer() as server:
        result = run(server, chats(1, turns=1), warmup=2)
        texts = [received.contents[0] for received in server.received]
    assert len(result.requests) == 1
    assert texts[0].startswith("Warm-up 0:")
    assert texts[1].startswith("Warm-up 1:")
    assert len(texts) == 3
    assert len(texts[0].split()) == len(texts[2].split()) + 2
    with StubServer(BROKEN) as server, pytest.raises(Unavailable, match="a warm-up request failed"):
        run(server, chats(1), warmup=1)


def test_options_reach_the_request_and_the_extra_body_wins() -> None:
    with StubServer() as server:
        run(
            server,
            chats(1, turns=1),
            max_tokens=7,
            min_tokens=7,
            ignore_eos=True,
            body={"temperature": 0.5, "priority": 1},
        )
        body = server.received[0].body
    assert body["model"] == "stub"
    assert (body["max_tokens"], body["min_tokens"], body["ignore_eos"]) == (7, 7, True)
    assert (body["temperature"], body["priority"]) == (0.5, 1)


def test_hints_name_each_conversation_and_its_last_turn() -> None:
    with StubServer() as server:
        run(server, [*chats(1, turns=1), *chats(2, turns=3)[1:]], hints=True)
        sent = [received.body["kv_transfer_params"]["kvstore"] for received in server.received]
    sessions: dict[str, list[bool]] = {}
    for hints in sent:
        sessions.setdefault(hints["session_id"], []).append(hints.get("end_session", False))
    assert sorted(sessions.values()) == [[False, False, True], [True]]
    with StubServer() as server:
        run(server, chats(1, turns=1))
        assert "kv_transfer_params" not in server.received[0].body


def test_a_turn_that_is_due_is_expected() -> None:
    (conversation,) = chats(1, turns=2)
    timed = replace(conversation, due=(0.0, 0.05))
    with StubServer() as server:
        run(server, [timed], hints=True)
        hints = server.received[0].body["kv_transfer_params"]["kvstore"]
    assert hints["expect_s"] == pytest.approx(0.05)


def test_hit_sources_are_the_differences_of_the_servers_counters() -> None:
    conversations = chats(2, turns=2)
    with StubServer() as server:
        cold = run(server, conversations, answers="file")
        warm = run(server, conversations, answers="file", kvstore_metrics=server.url + "/metrics")
    total = sum(sample.input_tokens or 0 for sample in warm.requests)
    first = sum(len(item.question(1).content.split()) for item in conversations)
    assert cold.server.prompt_tokens_by_source is not None
    assert cold.server.prompt_tokens_by_source["external_kv_transfer"] == first
    assert warm.server.prompt_tokens_by_source == {
        "local_compute": 0,
        "external_kv_transfer": total,
    }
    assert sum(sample.cached_tokens or 0 for sample in warm.requests) == total
    assert warm.server.preemptions == 0
    assert warm.server.kvstore == {}
    assert cold.server.notes == ()


def test_absent_metrics_are_said_to_be_absent() -> None:
    with StubServer(metrics=False) as server:
        result = run(server, chats(1, turns=1), kvstore_metrics="http://127.0.0.1:1/metrics")
    assert result.server.prompt_tokens_by_source is None
    assert result.server.notes[0] == "server metrics: no metrics page (HTTP 404)"
    assert result.server.notes[1].startswith("kvstore metrics: nothing answers at")


def test_the_api_key_is_not_shown_to_the_daemon_nor_in_the_report() -> None:
    options = ChatOptions(api_key="secret")
    assert "secret" not in repr(options)
    with StubServer() as server:
        result = run(server, chats(1, turns=1), api_key="secret")
    assert "secret" not in str(result.report(save_text=True))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"concurrency": 0}, "concurrency"),
        ({"request_rate": 0.0}, "request rate"),
        ({"turns": (2, 1)}, "first <= last"),
        ({"turns": (9, 9)}, "no conversation has a turn 9"),
        ({"turns": (2, 2), "answers": "live"}, "needs recorded answers"),
    ],
)
def test_impossible_options_are_refused_before_anything_is_sent(
    options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        asyncio.run(run_chat(ChatOptions(**options), chats(1)))
    with pytest.raises(InvalidRequest, match="no conversations"):
        asyncio.run(run_chat(ChatOptions(), []))


def test_round_robin_never_overtakes_a_turn_that_waits() -> None:
    jobs = schedule(chats(2, turns=2), "round-robin", (1, 2))
    first, second = jobs.take(), jobs.take()
    assert (first, second) == (Job(0, 1), Job(1, 1))
    jobs.finished(Job(1, 1))
    assert jobs.take() is None  # conversation 1 could go on, but conversation 0 is due
    jobs.finished(Job(0, 1))
    assert jobs.take() == Job(0, 2)


def test_sequential_fills_free_places_with_later_conversations() -> None:
    jobs = schedule(chats(3, turns=2), "sequential", (1, 2))
    assert [jobs.take(), jobs.take()] == [Job(0, 1), Job(1, 1)]
    jobs.finished(Job(1, 1))
    assert jobs.take() == Job(1, 2)
    assert jobs.abandon(2) == 2
    assert jobs.take() is None
