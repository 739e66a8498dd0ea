"""Made-up traffic is what was asked for, the same for a seed, and its length takes no memory."""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
import tracemalloc
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.model.errors import InvalidRequest
from kvstore.replay import load_workload, workload_of
from kvstore.replay.draws import parse_draws, zipf
from kvstore.replay.synth import (
    BLOCK_TOKENS,
    KINDS,
    Asked,
    Demand,
    synthesize,
    synthesize_trace,
    with_rate,
)
from tests.replay.traces import write

CHAT = replace(
    KINDS["chat"],
    sessions_per_s=5.0,
    turns=parse_draws("geometric:4"),
    gap_s=parse_draws("lognormal:20,0.8"),
    return_gap_s=parse_draws("exponential:100000"),
    return_probability=0.25,
    prefixes=50,
    prefix_exponent=1.1,
)


def made(demand: Demand, requests: int, seed: int = 1) -> list[Asked]:
    return list(itertools.islice(synthesize(demand, seed=seed), requests))


def by_session(asked: list[Asked]) -> dict[int, list[Asked]]:
    found: dict[int, list[Asked]] = defaultdict(list)
    for each in asked:
        found[each.session].append(each)
    return found


def begun(asked: list[Asked]) -> dict[int, list[Asked]]:
    """Return the sessions that begin within the trace."""
    return {key: rows for key, rows in by_session(asked).items() if not rows[0].turn}


def is_near(ratios: list[float], expected: float) -> bool:
    """Say whether the mean of ratios may be `expected`, by their own spread."""
    error = statistics.stdev(ratios) / math.sqrt(len(ratios))
    return abs(statistics.fmean(ratios) - expected) < 4 * error + 0.01


@pytest.mark.parametrize(
    "words",
    [
        "constant:7",
        "uniform:3,9",
        "exponential:20",
        "geometric:1",
        "geometric:5",
        "lognormal:30,1.2",
    ],
)
def test_draws_have_the_mean_they_say(words: str) -> None:
    draws, source = parse_draws(words), random.Random(1)
    found = [draws.draw(source) for _ in range(100_000)]
    assert statistics.fmean(found) == pytest.approx(draws.mean, rel=0.03)
    assert min(found) >= 0


@pytest.mark.parametrize(
    "words",
    [
        *("", "normal:1", "constant", "constant:x", "uniform:1", "uniform:5,1", "geometric:0.5"),
        *("constant:-1", "constant:nan", "constant:inf", "lognormal:0,1", "lognormal:5,50"),
    ],
)
def test_words_that_are_no_distribution_are_refused(words: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_draws(words)


def test_statistics_are_those_asked_for() -> None:
    asked = made(CHAT, 80_000)
    sessions = begun(asked)
    end = asked[-1].at_s
    assert len(sessions) / end == pytest.approx(CHAT.sessions_per_s, rel=0.05)
    # Of visits that had time to be over.
    visits = Counter((each.session, each.visit) for each in asked if each.at_s < end)
    early = {key for key, rows in sessions.items() if rows[0].at_s < end - 1200}
    lengths = [
        count for (session, visit), count in visits.items() if session in early and not visit
    ]
    assert statistics.fmean(lengths) == pytest.approx(CHAT.turns.mean, rel=0.05)
    gaps, new = [], []
    for key in early:
        for before, after in itertools.pairwise(sessions[key]):
            new.append(after.tokens - before.tokens - before.answer_tokens)
            if after.visit == before.visit:
                gaps.append(after.at_s - before.at_s)
    assert statistics.fmean(gaps) == pytest.approx(CHAT.gap_s.mean, rel=0.05)
    assert statistics.median(gaps) == pytest.approx(20, rel=0.05)
    assert statistics.fmean(new) == pytest.approx(CHAT.turn_tokens.mean, rel=0.05)
    answers = [each.answer_tokens for each in asked]
    assert statistics.fmean(answers) == pytest.approx(CHAT.answer_tokens.mean, rel=0.03)


def test_sessions_come_back_as_often_as_asked_for() -> None:
    demand = replace(CHAT, return_gap_s=parse_draws("constant:50"))
    sessions = begun(made(demand, 40_000))
    early = [rows for rows in sessions.values() if rows[0].at_s < 500]
    visits = [rows[-1].visit + 1 for rows in early]
    assert statistics.fmean(visits) == pytest.approx(1 / (1 - 0.25), rel=0.05)
    back = [
        after.at_s - before.at_s
        for rows in early
        for before, after in itertools.pairwise(rows)
        if after.visit != before.visit
    ]
    assert {round(gap, 6) for gap in back} == {50.0}


def test_shared_prefixes_are_as_popular_as_zipf_says() -> None:
    firsts = [rows[0] for rows in by_session(made(CHAT, 60_000)).values()]
    counts = Counter(each.prefix for each in firsts)
    weights = [(rank + 1) ** -1.1 for rank in range(50)]
    for rank in (0, 1, 4, 20):
        expected = len(firsts) * weights[rank] / sum(weights)
        assert abs(counts[rank] - expected) < 5 * math.sqrt(expected)
    one = [each for each in firsts if each.prefix == 0]
    shared = {tuple(each.blocks[: min(len(e.blocks) - 1 for e in one)]) for each in one}
    assert len(shared) == 1


def test_a_prompt_begins_with_the_one_before_it_and_nothing_else_is_shared() -> None:
    for rows in by_session(made(KINDS["agent"], 3000)).values():
        for before, after in itertools.pairwise(rows):
            full = before.tokens // BLOCK_TOKENS
            assert list(after.blocks[:full]) == list(before.blocks[:full])
            assert after.tokens > before.tokens
            assert len(after.blocks) == math.ceil(after.tokens / BLOCK_TOKENS)
            assert after.tokens <= KINDS["agent"].context_tokens_max


def test_turns_spawn_agents_as_often_as_asked_for() -> None:
    demand = replace(KINDS["agent"], subagent_probability=0.1, turns=parse_draws("constant:20"))
    asked = made(demand, 20_000)
    mains = [each for each in asked if not each.subagent]
    subs = {each.session for rows in begun(asked).values() for each in rows if each.subagent}
    expected = 0.1 * len(mains)
    assert abs(len(subs) - expected) < 4 * math.sqrt(expected)


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize(
    ("rate", "requests", "seeds"),
    [(0.05, 2000, 2), (20, 2000, 4), (3000, 5000, 2), (20, 20_000, 1)],
)
def test_a_trace_has_the_rate_asked_for(kind: str, rate: float, requests: int, seeds: int) -> None:
    demand = with_rate(KINDS[kind], rate)
    for seed in range(seeds):
        times = [each.at_s for each in synthesize_trace(demand, requests=requests, seed=seed)]
        assert len(times) == requests
        assert times == sorted(times)
        assert 0.97 <= requests / times[-1] / rate <= 1.03
        assert 0.97 <= requests / (times[-1] - times[0]) / rate <= 1.03


@pytest.mark.parametrize(
    ("turns", "gap", "returns"),
    [
        ("constant:1", "constant:5", 0.0),
        ("constant:100000", "constant:5", 0.0),
        ("uniform:1,9", "exponential:30", 0.9),
    ],
)
def test_any_demand_has_its_rate(turns: str, gap: str, returns: float) -> None:
    changes = {"turns": parse_draws(turns), "gap_s": parse_draws(gap)}
    demand = replace(KINDS["chat"], return_probability=returns, **changes)  # type: ignore[arg-type]
    asked = list(synthesize_trace(with_rate(demand, 5.0), requests=3000, seed=1))
    assert 0.97 <= 3000 / asked[-1].at_s / 5.0 <= 1.03


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_first_requests_are_like_the_last(kind: str) -> None:
    """Of draws as they come: their mean rate is right in every part, and so are their prompts."""
    demand = replace(KINDS[kind], return_gap_s=parse_draws("exponential:120"))
    rates: dict[int, list[float]] = defaultdict(list)
    grown: list[float] = []
    for seed in range(24):
        asked = list(itertools.takewhile(lambda each: each.at_s < 200.0, at_20_per_s(demand, seed)))
        parts = [[each for each in asked if int(each.at_s // 20) == part] for part in range(10)]
        for part in (0, 4, 9):
            rates[part].append(len(parts[part]) / 20.0 / 20.0)
        early, late = (statistics.fmean(each.turn for each in parts[part]) for part in (0, 9))
        grown.append(early / late)
    for ratios in rates.values():
        assert is_near(ratios, 1.0), statistics.fmean(ratios)
    assert is_near(grown, 1.0), statistics.fmean(grown)


def at_20_per_s(demand: Demand, seed: int) -> Iterator[Asked]:
    return synthesize(with_rate(demand, 20.0), seed=seed)


def test_what_began_before_the_trace_goes_on_in_it() -> None:
    asked = made(with_rate(KINDS["agent"], 20.0), 4000)
    assert {each.session for each in asked if each.first} == {each.session for each in asked}
    older = [rows for rows in by_session(asked).values() if rows[0].turn]
    assert len(older) > 100
    for rows in older:
        assert [each.turn for each in rows] == [rows[0].turn + n for n in range(len(rows))]
    assert (
        {rows[0].visit > 0 for rows in older}
        == {rows[0].subagent for rows in older}
        == {True, False}
    )


def test_a_seed_makes_the_same_requests_and_another_one_others() -> None:
    assert made(CHAT, 500) == made(CHAT, 500)
    assert made(CHAT, 500) != made(CHAT, 500, seed=2)


def test_memory_does_not_grow_with_the_number_of_requests() -> None:
    source = synthesize(replace(CHAT, return_gap_s=parse_draws("constant:60")), seed=1)

    def peak(requests: int) -> int:
        tracemalloc.reset_peak()
        for _ in itertools.islice(source, requests):
            pass
        return tracemalloc.get_traced_memory()[1]

    tracemalloc.start()
    try:
        peak(10_000)
        settled = peak(5_000)
        assert peak(30_000) < 1.3 * settled
    finally:
        tracemalloc.stop()


def test_it_is_replayed_from_a_file_as_from_memory(tmp_path: Path) -> None:
    asked = made(CHAT, 300)
    path = write(tmp_path / "made.jsonl.gz", [each.to_mooncake() for each in asked])
    from_file = load_workload(path)
    in_memory = workload_of((each.to_row() for each in asked), name="made", block_tokens=512)
    assert [r.blocks for r in from_file.requests] == [r.blocks for r in in_memory.requests]
    assert from_file.unique_blocks == in_memory.unique_blocks
    assert from_file.tokens == in_memory.tokens
    assert json.loads(json.dumps(asked[0].to_mooncake()))["turn"] == asked[0].turn


@pytest.mark.parametrize(
    "changes",
    [
        {"sessions_per_s": 0.0},
        {"prefixes": 0},
        {"prefix_exponent": 11.0},
        {"return_probability": 1.0},
        {"subagent_probability": -0.1},
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, float]) -> None:
    with pytest.raises(InvalidRequest):
        replace(CHAT, **changes)  # type: ignore[arg-type]


@given(st.integers(1, 1000), st.floats(0, 5))
def test_zipf_draws_what_there_is(count: int, exponent: float) -> None:
    source = random.Random(3)
    draw = zipf(count, exponent)
    assert all(0 <= draw(source) < count for _ in range(20))
