"""A replay counts what the shipping planner would have hit, beside what nobody can beat."""

from __future__ import annotations

import random
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.decide.policy.registry import BUILT_IN
from kvstore.model.block import PAGE_NBYTES
from kvstore.model.errors import InvalidRequest
from kvstore.replay import Result, Setup, Workload, load_workload, replay
from kvstore.replay.bounds import Bounds
from kvstore.replay.node import Node
from kvstore.replay.room import LogRoom
from kvstore.settings import ADMISSIONS
from tests.replay.traces import chat, mooncake, write


def run(workload: Workload, *, end_hints: float = 0.0, **setup: float | str) -> Result:
    return replay(workload, Setup(**setup), Bounds(workload), end_hints=end_hints)  # type: ignore[arg-type]


def load(tmp_path: Path, rows: list[dict[str, object]], **options: object) -> Workload:
    return load_workload(write(tmp_path / "trace.jsonl.gz", rows), **options)  # type: ignore[arg-type]


def test_with_room_for_everything_it_hits_what_the_infinite_cache_hits(tmp_path: Path) -> None:
    workload = load(tmp_path, chat(5, 4))
    result = run(workload, dram_blocks=1000)
    # Turns of 3, 5, 7 and 9 blocks: all but the first hit what their predecessor had.
    assert result.token_hit_ratio == result.infinite == result.optimum
    assert result.token_hit_ratio == pytest.approx((5 * 15 + 4) / (5 * 24))
    assert result.unique_blocks == 1 + 5 * 8
    assert result.traffic.dram_writes == result.unique_blocks


def test_a_partial_block_is_never_a_hit_but_its_tokens_count(tmp_path: Path) -> None:
    rows = [mooncake(t, [0, 1], rest=100) for t in (0, 1)]
    result = run(load(tmp_path, rows), dram_blocks=10)
    assert result.token_hit_ratio == pytest.approx(1024 / (2 * 1124))
    assert result.unique_blocks == 2


def test_lru_forgets_what_does_not_fit_tail_first(tmp_path: Path) -> None:
    rows = [mooncake(t, ids) for t, ids in enumerate(([0, 1, 2], [3, 4], [0, 1, 2], [0, 1, 2]))]
    result = run(load(tmp_path, rows), dram_blocks=4, leased_fraction=1.0)
    # Two of the first three blocks are left when they are asked for again, then all of them.
    assert result.traffic.dram_hits == 2 + 3
    assert result.optimum == pytest.approx((3 + 3) / 11)


@pytest.mark.parametrize("file_blocks", [0, 100])
def test_no_hit_is_longer_than_what_the_daemon_leases_at_once(
    tmp_path: Path, file_blocks: int
) -> None:
    rows = [mooncake(t, list(range(30))) for t in range(3)]
    result = run(load(tmp_path, rows), dram_blocks=40, file_blocks=file_blocks)
    assert result.traffic.dram_hits + result.traffic.file_hits == 2 * 20


@pytest.mark.parametrize("policy", sorted(BUILT_IN))
def test_what_dram_forgets_comes_up_from_the_file_tier(tmp_path: Path, policy: str) -> None:
    workload = load(tmp_path, chat(20, 4))
    result = run(workload, dram_blocks=20, file_blocks=500, dram_policy=policy, file_policy=policy)
    assert result.token_hit_ratio == result.infinite
    assert result.traffic.file_hits > 0
    assert result.traffic.promotions_used == result.traffic.file_reads
    assert result.writes_per_unique == 1.0
    flat = result.to_dict()
    assert flat["dram_hit_ratio"] + flat["file_hit_ratio"] == pytest.approx(result.infinite)


def test_a_small_file_tier_keeps_its_cap_and_writes_again_what_it_dropped(tmp_path: Path) -> None:
    workload = load(tmp_path, chat(20, 4, gap_s=200))
    result = run(workload, dram_blocks=15, file_blocks=30)
    assert 0 < result.token_hit_ratio < result.infinite
    assert result.writes_per_unique > 1


@pytest.mark.parametrize("policy", sorted(BUILT_IN))
def test_a_restart_loses_dram_and_what_policies_knew_and_little_more(
    tmp_path: Path, policy: str
) -> None:
    workload = load(tmp_path, chat(300, 4, gap_s=100.0))
    small = {"dram_policy": policy, "file_policy": policy}
    for file_blocks, lost_max in ((5000, 0.0), (150, 0.01), (0, 0.05)):
        setup = Setup(dram_blocks=60, file_blocks=file_blocks, **small)
        bounds = Bounds(workload)
        whole = replay(workload, setup, bounds)
        cut = replay(workload, setup, bounds, restart_at=0.5)
        assert whole.token_hit_ratio - cut.token_hit_ratio <= lost_max
        assert cut.traffic != whole.traffic


def test_sessions_that_say_when_they_end_make_room_for_others(tmp_path: Path) -> None:
    draw = random.Random(1)
    rows: list[dict[str, object]] = []
    block = 1
    for session in range(300):  # one in three comes back
        path = [0, *range(block, block + 6)]
        block += 10
        at_s = session * 10.0
        rows.append(mooncake(at_s, path, session_id=session))
        if draw.random() < 0.33:
            again = [*path, block - 4, block - 3]
            rows.append(mooncake(at_s + draw.uniform(50, 250), again, session_id=session))
    rows.sort(key=lambda row: float(str(row["timestamp"])))
    workload = load(tmp_path, rows)
    plain, half, hinted = (
        run(workload, dram_blocks=40, dram_policy="hz", end_hints=share)
        for share in (0.0, 0.5, 1.0)
    )
    assert plain.token_hit_ratio < half.token_hit_ratio < hinted.token_hit_ratio
    assert hinted.token_hit_ratio <= hinted.optimum
    assert (plain.hinted_sessions, hinted.hinted_sessions) == (0, 300)


@pytest.mark.parametrize("policy", sorted(BUILT_IN))
def test_sessions_that_have_ended_are_not_written(tmp_path: Path, policy: str) -> None:
    workload = load(tmp_path, chat(40, 4, gap_s=100))
    results = [
        run(
            workload,
            dram_blocks=60,
            file_blocks=400,
            dram_policy=policy,
            file_policy=policy,
            admission="demotion",
            end_hints=share,
        )
        for share in (0.0, 1.0)
    ]
    written, spared = (result.writes_per_unique for result in results)
    assert results[0].token_hit_ratio == results[0].infinite
    assert results[1].token_hit_ratio > 0.98 * results[1].infinite
    assert spared < 0.8 * written


def test_what_was_used_once_is_not_written_on_second_use(tmp_path: Path) -> None:
    workload = load(tmp_path, chat(20, 4))  # the last two blocks of each session are used once
    result = run(workload, dram_blocks=1000, file_blocks=1000, admission="second_use")
    assert result.traffic.file_writes == result.unique_blocks - 20 * 2
    assert result.token_hit_ratio == result.infinite


def test_what_was_lost_before_its_second_use_is_written_when_it_is_computed_again(
    tmp_path: Path,
) -> None:
    rows = [mooncake(t, [10 * name, 10 * name + 1]) for t, name in enumerate((1, 2, 1, 2, 1))]
    workload = load(tmp_path, rows)
    result = run(
        workload, dram_blocks=2, file_blocks=10, admission="second_use", leased_fraction=1.0
    )
    assert result.traffic.file_writes == 4
    assert result.traffic.file_hits == 2


@pytest.mark.parametrize("admission", ADMISSIONS)
@pytest.mark.parametrize("policy", sorted(BUILT_IN))
def test_within_a_write_budget_nothing_is_in_the_file_tier_without_its_start(
    tmp_path: Path, policy: str, admission: str
) -> None:
    workload = load(tmp_path, chat(150, 4, gap_s=200))
    setup = Setup(
        dram_blocks=60,
        file_blocks=200,
        dram_policy=policy,
        file_policy=policy,
        admission=admission,
        write_bytes_per_day=24 * (240 << 20),
    )
    node = Node(setup, workload.block_tokens)
    began = workload.requests[0].at_s
    for number, request in enumerate(workload.requests):
        node.clock.now_s = request.at_s
        if number == 300:
            node.restart()
        node.ask([workload.keys[block] for block in request.blocks])
        index = node.planner.index
        for block in index:
            above = index.by_key(block.parent) if block.parent else None
            if block.framed_parts and block.parent:
                assert above is not None
                assert above.framed_parts or (above.resident_parts and admission == "demotion")
        hours = (request.at_s - began) / 3600
        assert node.traffic.file_writes <= 240 * (hours + 1) + 1
    node.settle()
    assert node.traffic.unwritten
    assert node.traffic.file_hits
    assert node.traffic.file_writes > 100


def test_a_write_budget_keeps_what_comes_back_rather_than_what_comes_first(tmp_path: Path) -> None:
    """Conversations of short turns go on after minutes; long documents are read once."""
    rows = chat(100, 6, gap_s=300)
    for at in range(0, 2500, 10):
        rows.append(mooncake(at, [0, *range(10**6 + 40 * at, 10**6 + 40 * at + 39)]))
    rows.sort(key=lambda row: float(str(row["timestamp"])))
    workload = load(tmp_path, rows)
    everything, budget = (
        run(
            workload,
            dram_blocks=100,
            file_blocks=20_000,
            write_bytes_per_day=24 * (records << 20),
        )
        for records in (0, 2500)
    )
    assert everything.writes_per_unique == 1.0
    assert budget.writes_per_unique < 0.3
    assert budget.traffic.file_hits > 0.7 * everything.traffic.file_hits


def test_a_write_budget_is_worth_more_blocks_where_files_have_them_smaller(tmp_path: Path) -> None:
    workload = load(tmp_path, chat(150, 4, gap_s=200))
    room = {"dram_blocks": 60, "file_blocks": 200}
    budget = 24 * (240 << 20)
    plain = run(workload, **room, write_bytes_per_day=budget)
    smaller = run(
        workload, **room, write_bytes_per_day=budget // 4, file_record_nbytes=(1 << 20) // 4
    )
    assert plain.traffic.unwritten > 0
    assert smaller.traffic == plain.traffic
    large, small = plain.to_dict(), smaller.to_dict()
    assert small["file_written_bytes"] == large["file_written_bytes"] / 4
    assert small["dram_written_bytes"] == large["dram_written_bytes"]


def test_winning_segments_back_writes_what_lives_in_them_again(tmp_path: Path) -> None:
    workload = load(tmp_path, chat(300, 4, gap_s=300))
    holes, segments = (
        run(
            workload,
            dram_blocks=15,
            file_blocks=400,
            reclaim=reclaim,
            file_policy="hz",
            record_nbytes=1 << 24,
        )
        for reclaim in ("punch", "reinsert")
    )
    assert holes.traffic.file_moved == 0
    assert segments.traffic.file_moved > 0
    assert segments.writes_per_unique > holes.writes_per_unique
    assert 0 < segments.token_hit_ratio <= holes.token_hit_ratio + 0.01


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=200))
def test_a_log_never_holds_more_than_its_size_and_gives_all_of_it_back(
    steps: list[tuple[int, bool]],
) -> None:
    room = LogRoom(400 * PAGE_NBYTES, 4 * PAGE_NBYTES)
    held = []
    for pages, gives_back in steps:
        if gives_back and held:
            room.free(held.pop(pages % len(held)))
        elif place := room.allocate(pages * PAGE_NBYTES):
            held.append(place)
        assert sum(place.nbytes for place in held) <= 400 * PAGE_NBYTES
    for place in held:
        room.free(place)
    assert room.allocate(64 * PAGE_NBYTES) is not None


def test_prefill_that_hits_made_needless_is_counted_per_request(tmp_path: Path) -> None:
    workload = load(tmp_path, [mooncake(t, [1, 2, 3]) for t in range(3)])
    setup = Setup(dram_blocks=10)
    seen = []
    result = replay(
        workload,
        setup,
        Bounds(workload),
        prefill_flops=lambda tokens: tokens**2,
        watch=lambda at_s, traffic: seen.append((at_s, traffic.dram_hits)),
    )
    assert result.saved_flops == 2 * (3 * 512) ** 2
    assert seen == [(0.0, 0), (1.0, 3), (2.0, 6)]
    assert run(workload, dram_blocks=10).saved_flops is None


def test_the_same_seed_gives_the_same_replay(tmp_path: Path) -> None:
    workload = load(tmp_path, chat(30, 3))
    first, second = (
        run(workload, dram_blocks=30, dram_policy="hz", end_hints=0.5).to_dict() for _ in range(2)
    )
    del first["blocks_per_s"], second["blocks_per_s"]
    assert first == second


def test_no_room_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no room for a single block"):
        run(load(tmp_path, chat(2, 2)), dram_blocks=0)


def best(paths: list[list[int]], blocks_max: int) -> int:
    """Return the most hits any choice of what to keep gives, by trying all that keep prefixes."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    parent = {b: a for path in paths for a, b in zip([-1, *path], path, strict=False)}
    for path in paths:
        after: dict[frozenset[int], int] = {}
        for here, hits in states.items():
            hit = next((i for i, block in enumerate(path) if block not in here), len(path))
            full = here | set(path)
            for size in range(min(len(full), blocks_max) + 1):
                for kept in map(frozenset, combinations(full, size)):
                    if all(parent[block] in (-1, *kept) for block in kept):
                        after[kept] = max(after.get(kept, 0), hits + hit)
        states = after
    return max(states.values())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.sampled_from([[0], [0, 1], [0, 1, 2], [0, 3], [4], [4, 5]]), min_size=1, max_size=7
    ),
    st.integers(1, 4),
)
def test_the_optimum_is_what_trying_everything_finds(
    tmp_path_factory: pytest.TempPathFactory, paths: list[list[int]], blocks_max: int
) -> None:
    rows = [mooncake(t, path) for t, path in enumerate(paths)]
    workload = load(tmp_path_factory.mktemp("t"), rows)
    blocks = sum(map(len, paths))
    optimum = Bounds(workload).optimum(blocks_max)
    assert optimum * blocks == pytest.approx(best(paths, blocks_max))
    for policy in BUILT_IN:
        found = run(workload, dram_blocks=blocks_max, dram_policy=policy)
        assert found.token_hit_ratio <= optimum + 1e-9
