"""When requests start, and which of them count."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, pstdev
from typing import Any

import pytest

from kvstore.model.errors import InvalidRequest
from kvstore_bench.chat.drivers import gaps_s
from kvstore_bench.chat.runner import ChatOptions, Result, run_chat
from kvstore_bench.chat.sample import Sample
from kvstore_bench.chat.workloads.generator import Shape, SizeRange, generate
from kvstore_bench.chat.workloads.workload import Conversation, Message, Workload
from tests.bench.stub import Received, Script, StubServer, failing

# How late a request may start on a busy machine.
LATE_S = 1.0


def chats(conversations: int = 3, turns: int = 2) -> list[Conversation]:
    return generate(Shape(conversations, turns, SizeRange(10, 20)))


def timed(*due: tuple[float, ...]) -> list[Conversation]:
    made = [chats(1, len(times))[0] for times in due]
    return [
        replace(one, id=f"t{number}", due=times)
        for number, (one, times) in enumerate(zip(made, due, strict=True))
    ]


def run(
    server: StubServer,
    workload: list[Conversation] | Workload,
    *,
    stop_after: int | None = None,
    **options: Any,
) -> Result:
    async def main() -> Result:
        stop = asyncio.Event()
        seen = 0

        def on_sample(sample: Sample) -> None:
            nonlocal seen
            seen += 1
            if seen == stop_after:
                stop.set()

        chosen = ChatOptions(url=server.url, **options)
        return await run_chat(chosen, workload, on_sample=on_sample, stop=stop)

    return asyncio.run(main())


def starts(result: Result) -> dict[tuple[str, int], float]:
    return {(one.conversation_id, one.turn): one.started_s for one in result.requests}


def test_gaps_have_the_mean_and_the_spread_of_their_kind() -> None:
    for arrivals, spread in (("poisson", 0.25), ("uniform", 0.25 / 3**0.5), ("constant", 0.0)):
        gaps = gaps_s(4.0, arrivals, random.Random(0))  # type: ignore[arg-type]
        drawn = [next(gaps) for _ in range(5000)]
        assert fmean(drawn) == pytest.approx(0.25, rel=0.05)
        assert pstdev(drawn) == pytest.approx(spread, rel=0.05, abs=1e-9)


def test_turns_start_when_they_are_due_and_not_before() -> None:
    with StubServer() as server:
        result = run(server, timed((0.0, 0.3), (0.1,)))
    for (name, turn), started_s in starts(result).items():
        due_s = {("t0", 1): 0.0, ("t0", 2): 0.3, ("t1", 1): 0.1}[name, turn]
        assert due_s <= started_s < due_s + LATE_S


def test_a_turn_that_is_due_waits_for_the_answer_before_it() -> None:
    with StubServer(Script(first_s=0.3)) as server:
        result = run(server, timed((0.0, 0.05)))
    first, second = result.requests
    assert second.started_s >= first.started_s + first.latency_s
    assert second.queued_s == pytest.approx(second.started_s - 0.05)


def test_a_session_that_waited_for_a_place_keeps_its_pauses() -> None:
    with StubServer(Script(first_s=0.1)) as server:
        result = run(server, timed((0.0, 0.2), (0.0, 0.3)), concurrency=1)
    found = starts(result)
    ended_s = max(one.started_s + one.latency_s for one in result.requests[:2])
    assert found["t1", 1] >= ended_s
    assert found["t1", 2] - found["t1", 1] >= 0.29


def test_a_rate_overrules_recorded_times() -> None:
    with StubServer() as server:
        result = run(server, timed((60.0, 120.0)), request_rate=1000.0)
    assert len(result.requests) == 2
    assert result.duration_s < 30


def test_each_client_asks_by_its_own_arrivals_one_conversation_at_a_time() -> None:
    with StubServer() as server:
        options: dict[str, Any] = {"client_rate": 100.0, "concurrency": 2, "seed": 3}
        result = run(server, chats(5, 3), **options)
    assert len(result.requests) == 15
    assert result.report()["max_concurrency"] == 2
    # The first client's first arrivals, as anyone can compute them.
    stream = random.Random("kvstore-bench/arrivals/3/0")
    due_s = [stream.expovariate(100.0) for _ in range(2)]
    found = starts(result)
    assert found["s0-c0000", 1] >= due_s[0]
    assert found["s0-c0000", 2] >= sum(due_s)
    for one, other in pairwise(sorted(found)):
        if one[0] == other[0]:
            assert found[one] < found[other]


def test_a_barrier_separates_rounds() -> None:
    with StubServer(Script(first_s=0.02)) as server:
        result = run(server, chats(4), order="barrier", concurrency=4)
    ends = [one.started_s + one.latency_s for one in result.requests if one.turn == 1]
    assert min(one.started_s for one in result.requests if one.turn == 2) >= max(ends)


def test_answers_are_as_long_as_the_workload_says_unless_told_otherwise() -> None:
    workload = Workload(
        [replace(one, answers=(5, 6)) for one in chats(1)], {"format": "x"}, {"ignore_eos": True}
    )
    with StubServer() as server:
        run(server, workload)
        run(server, workload, max_tokens=9)
        run(server, chats(1, 1))
    assert [received.body["max_tokens"] for received in server.received] == [5, 6, 9, 9, 32]


def test_the_share_of_the_warm_up_is_measured_but_does_not_count() -> None:
    def slow_at_first(received: Received) -> Script:
        return Script(first_s=0.5 if len(server.received) <= 2 else 0.0)

    with StubServer(slow_at_first) as server:
        result = run(server, chats(4, 1), warmup_percent=50.0)
    report = result.report()
    assert [one["warmup"] for one in report["requests"]] == [True, True, False, False]
    assert (report["completed"], report["warmup_requests"]) == (2, 2)
    assert report["max_ttft_ms"] < min(one["ttft_ms"] for one in report["requests"][:2])
    assert report["duration"] < result.duration_s - 0.9


def test_goodput_counts_requests_within_their_objectives() -> None:
    def slow_once(received: Received) -> Script:
        return Script(first_s=0.6 if len(server.received) == 1 else 0.0)

    with StubServer(slow_once) as server:
        report = run(server, chats(4, 1), slo_ttft_s=0.5, slo_itl_s=10.0).report()
    assert report["slo_attainment"] == 0.75
    assert report["request_goodput"] == pytest.approx(3 / report["duration"])
    with StubServer(failing(Script(status=429, error="busy"), requests={0})) as server:
        report = run(server, chats(2, 1), slo_ttft_s=10.0).report()
    assert (report["slo_attainment"], report["errors"]) == (0.5, {"http_4xx": 1})
    assert report["http_statuses"] == {"429": 1}


def test_a_stopped_run_reports_what_was_measured() -> None:
    def third_hangs(received: Received) -> Script:
        return Script(first_s=60.0 if len(server.received) == 3 else 0.0)

    with StubServer(third_hangs) as server:
        result = run(server, chats(4, 1), stop_after=2)
    assert result.interrupted
    assert (len(result.requests), result.skipped) == (2, 2)
    assert result.report()["interrupted"]
    assert result.duration_s < 30


def test_a_run_that_is_given_up_does_not_wait_for_what_is_due_later() -> None:
    script = Script(status=500, error="broken")
    due = [(0.0,)] * 10 + [(500.0,)]
    with StubServer(script) as server:
        result = run(server, timed(*due), answers="file")
    assert len(result.requests) == 10
    assert result.skipped == 1
    assert result.duration_s < 60


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"request_rate": 1.0, "client_rate": 1.0}, "not both"),
        ({"client_rate": -1.0}, "above 0"),
        ({"warmup_percent": 100.0}, "less than 100 percent"),
    ],
)
def test_loads_that_make_no_sense_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        asyncio.run(run_chat(ChatOptions(**options), chats(1)))


def test_recorded_answers_must_be_there_to_be_used() -> None:
    messages = (Message("user", "a"), Message("assistant", ""), Message("user", "b"))
    with pytest.raises(InvalidRequest, match="no recorded answers"):
        asyncio.run(run_chat(ChatOptions(answers="file"), [Conversation("a", messages)]))
