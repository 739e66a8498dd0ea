"""A family of traffic that policies are judged by: made up, and the same for a seed."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

import pytest

from kvstore.model.errors import InvalidRequest
from kvstore.replay import Setup, replay, workload_of
from kvstore.replay.bounds import Bounds
from kvstore.replay.mixes import DAYS, MIXES, Mix, mix_named, synthesize_mix
from kvstore.replay.models import check_mix, merged, named
from kvstore.replay.synth import BLOCK_TOKENS, KINDS, Asked
from kvstore.replay.workload import Workload


def made(mix: Mix, requests: int, seed: int = 1) -> list[Asked]:
    return list(synthesize_mix(mix, requests=requests, seed=seed))


def workload(name: str, requests: int, seed: int = 1) -> Workload:
    rows = [asked.to_row() for asked in made(MIXES[name], requests, seed)]
    return workload_of(rows, name=name, block_tokens=BLOCK_TOKENS)


def hits(workload: Workload, policy: str, share: float) -> float:
    setup = Setup(dram_blocks=int(share * workload.unique_blocks), dram_policy=policy)
    return replay(workload, setup, Bounds(workload)).token_hit_ratio


def test_there_are_enough_of_them_and_each_says_what_is_hard_in_it() -> None:
    assert len(MIXES) + len(KINDS) >= 24
    assert len({mix.about for mix in MIXES.values()}) == len(MIXES)
    assert not MIXES.keys() & KINDS.keys()
    with pytest.raises(InvalidRequest, match="no mix 'tea'; choose one of chat-long"):
        mix_named("tea")


@pytest.mark.parametrize("name", ["office", "scan-bursts", "shift-to-and-fro"])
def test_a_mix_is_the_same_for_a_seed_in_order_of_time_and_keeps_its_streams_apart(
    name: str,
) -> None:
    asked = made(MIXES[name], 400)
    assert asked == made(MIXES[name], 400)
    assert asked != made(MIXES[name], 400, seed=2)
    assert len(asked) == 400
    times = [each.at_s for each in asked]
    assert times == sorted(times)
    streams = len(MIXES[name].streams)
    for each in asked:
        assert {block % streams for block in each.blocks} <= {each.session % streams}
    assert len(workload(name, 400).requests) == 400, "no block comes after two prefixes"


def test_streams_run_in_their_spans() -> None:
    asked = made(MIXES["shift-chat-agents"], 1200)
    half = asked[-1].at_s / 2
    sides = Counter((each.session % 2, each.at_s > half) for each in asked)
    assert sides[0, True] + sides[1, False] < 0.05 * len(asked)
    assert min(sides[0, False], sides[1, True]) > 0.4 * len(asked)


def test_fewer_come_by_night() -> None:
    mix = replace(MIXES["day-night"], requests_per_s=0.02)
    asked = made(mix, 2000)
    day = asked[-1].at_s / DAYS
    quarters = Counter(int(4 * (each.at_s / day % 1)) for each in asked)
    assert quarters[1] + quarters[2] > 2 * (quarters[0] + quarters[3])


def test_each_request_names_its_model_in_memory_and_in_a_file() -> None:
    asked = made(MIXES["models-chat"], 200)
    assert {each.model for each in asked} == set(MIXES["models-chat"].models) == {"large", "small"}
    assert {each.to_mooncake()["model"] for each in asked} == {"large", "small"}
    assert workload("models-chat", 200).models == {"large", "small"}
    assert "model" not in made(MIXES["office"], 1)[0].to_mooncake()


@pytest.mark.parametrize("name", ["in-turn", "models-chat", "scan"])
def test_hz_loses_nothing_worth_mentioning_to_lru(name: str) -> None:
    """On a few of them, and short: `make policies` takes all, and says by how much."""
    found = workload(name, 1000)
    for share in (0.02, 0.2):
        assert hits(found, "hz", share) >= hits(found, "lru", share) - 0.01


def test_where_models_differ_in_cost_the_dear_one_is_kept_and_seconds_are_saved() -> None:
    found = workload("models-chat", 1500)
    costs = {"large": 2.0, "small": 0.1}
    check_mix(found, costs)
    saved, shares = {}, defaultdict(dict)
    for aware in (False, True):
        setup = Setup(dram_blocks=found.unique_blocks // 8, dram_policy="hz", cost_aware=aware)
        result = replay(found, setup, Bounds(found), mix=costs)
        saved[aware] = result.saved_s
        for model in result.models:
            shares[model.model][aware] = model.hit_tokens
        assert sum(model.tokens for model in result.models) == found.tokens
    assert saved[True] is not None
    assert saved[False] is not None
    assert saved[True] > 1.15 * saved[False]
    assert shares["small"][True] > 0, "nobody is shut out"


def test_costs_are_said_of_the_models_there_are() -> None:
    found = workload("models-chat", 100)
    with pytest.raises(InvalidRequest, match="no cost is said of small"):
        check_mix(found, {"large": 1.0})
    with pytest.raises(InvalidRequest, match="does not have tiny"):
        check_mix(found, {"large": 1.0, "small": 1.0, "tiny": 1.0})


def test_traces_beside_each_other_share_nothing_and_hit_what_each_hits_alone() -> None:
    one, two = workload("in-turn", 300), workload("chat-hasty", 300)
    both = merged([named(one, "one"), named(two, "two")])
    assert both.models == {"one", "two"}
    assert both.unique_blocks == one.unique_blocks + two.unique_blocks == len(set(both.keys))
    times = [request.at_s for request in both.requests]
    assert times == sorted(times)
    assert both.tokens == one.tokens + two.tokens
    hit = [Bounds(each).infinite() * each.tokens for each in (one, two, both)]
    assert hit[2] == pytest.approx(hit[0] + hit[1])
    with pytest.raises(InvalidRequest, match="say --block-tokens"):
        merged([one, replace(two, block_tokens=16)])
