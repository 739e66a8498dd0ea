"""A replay over many hosts counts what each source gave; with one host it is the plain replay."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.decide.heads import Change, Heads
from kvstore.decide.policy.registry import BUILT_IN
from kvstore.model.block import BlockKey
from kvstore.model.errors import InvalidRequest
from kvstore.peer.view import View
from kvstore.replay import Fleet, HostsResult, Setup, Workload, all_of, replay, replay_hosts
from kvstore.replay.bounds import Bounds
from kvstore.replay.hosts import Hosts
from kvstore.replay.routers import LOAD_S, ROUTERS, Affinity, KVAware, make_router
from kvstore.replay.rows import Row
from kvstore.replay.told import Told
from kvstore.replay.workload import load_workload, workload_of
from kvstore.testing.samples import sample_keys
from tests.replay.traces import chat, mooncake, write

T = 512


def run(workload: Workload, setup: Setup, **fleet: object) -> HostsResult:
    settings = Fleet(**fleet)  # type: ignore[arg-type]
    one = replay(workload, all_of(setup, settings.hosts), Bounds(workload))
    return replay_hosts(workload, setup, settings, one)


def load(tmp_path: Path, *asked: tuple[float, list[int]]) -> Workload:
    rows = [mooncake(at_s, blocks) for at_s, blocks in asked]
    return load_workload(write(tmp_path / "trace.jsonl.gz", rows))


def test_two_hosts_by_turns_counted_by_hand(tmp_path: Path) -> None:
    workload = load(
        tmp_path,
        (0, [1, 2, 3]),  # host 0 computes three
        (1, [1, 2, 3, 4]),  # host 1 borrows three, computes one
        (2, [1, 2, 3, 4, 5]),  # host 0 has three, borrows one, computes one
        (3, [6, 7]),  # host 1 asks in vain, computes two
        (4, [6, 8]),  # host 0 borrows one, computes one
        (5, [6, 7]),  # host 1 has both
    )
    result = run(workload, Setup(dram_blocks=20), hosts=2, router="round-robin")
    assert (result.own_tokens, result.peer_tokens) == ((3 + 2) * T, (3 + 1 + 1) * T)
    assert result.to_dict()["computed_tokens"] == (3 + 1 + 1 + 2 + 1) * T
    assert result.peer_bytes == 5 << 20
    # Of two hosts, each asks the other whenever it lacks something.
    assert (result.lent.asked, result.lent.vain) == (5, 2)
    assert result.hit_tokens == 1.0
    assert result.busiest == 3
    flat = result.to_dict()
    assert flat["token_hit_ratio"] == pytest.approx(10 / 18)
    assert flat["view_bytes"] == flat["view_heads"] * 10 > 0


def test_what_a_view_does_not_say_yet_is_computed_and_what_it_says_no_more_is_asked_in_vain(
    tmp_path: Path,
) -> None:
    """Five hosts by turns, so that nobody is asked without a view. Each has room for two blocks."""
    asked = [
        (0.0, [1, 2]),  # host 0: told at once
        (0.1, [1, 2]),  # host 1 borrows
        (0.2, [9]),
        (0.3, [10]),
        (0.4, [11]),
        (0.5, [3, 4]),  # host 0 drops 1 and 2; told at 1.0 at the earliest
        (0.6, [5, 6]),  # host 1 does, too
        (0.7, [1, 2]),  # host 2 asks both in vain
        (0.8, [3, 4]),  # host 3: the view does not know of them: computed
        (2.0, [3, 4]),  # host 4 borrows
    ]
    setup = Setup(dram_blocks=2, dram_policy="lru", leased_fraction=1.0)
    result = run(load(tmp_path, *asked), setup, hosts=5, router="round-robin")
    assert (result.own_tokens, result.peer_tokens) == (0, 4 * T)
    assert (result.lent.asked, result.lent.vain) == (3, 1)
    assert result.staleness.max_s == pytest.approx(0.5)  # host 0: from 0.5 to 1.0
    fresh = run(load(tmp_path, *asked), setup, hosts=5, router="round-robin", view_age_s=0.0)
    assert (fresh.peer_tokens, fresh.lent.vain) == (6 * T, 0)
    assert fresh.staleness.max_s == 0.0


def test_copies_are_written_at_their_second_use_and_read_from_files(tmp_path: Path) -> None:
    workload = load(
        tmp_path, (0, [1, 2]), (1, [1, 2]), (2, [1, 2]), (3, [1, 2]), (4, [3]), (5, [4])
    )
    setup = Setup(dram_blocks=20, file_blocks=20)
    once, twice = (
        run(dataclasses.replace(workload, requests=workload.requests[:n]), setup, hosts=2,
            router="round-robin")
        for n in (2, 6)
    )  # fmt: skip
    assert once.traffic.file_writes == 2  # host 0's own
    assert twice.traffic.file_writes == 2 + 2 + 2
    assert once.lent.blocks == twice.lent.blocks == 2
    # What has left the lender's arena is read in its files, and stays there.
    workload = load(tmp_path, (0, [1, 2]), (1, [9]), (2, [3, 4]), (3, [1, 2]))
    lru = {"dram_policy": "lru", "file_policy": "lru", "leased_fraction": 1.0}
    setup = Setup(dram_blocks=2, file_blocks=20, file_record_nbytes=1 << 18, **lru)  # type: ignore[arg-type]
    result = run(workload, setup, hosts=2, router="round-robin")
    assert (result.peer_tokens, result.lent.from_files) == (2 * T, 2)
    assert result.peer_bytes == 2 << 18
    assert result.traffic.file_reads == 0


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 1 << 30),
    st.sampled_from(ROUTERS),
    st.sampled_from(sorted(BUILT_IN)),
    st.sampled_from([(5, 0), (8, 20), (200, 200)]),
)
def test_one_host_is_the_plain_replay_and_many_never_hit_more_than_there_is(
    seed: int, router: str, policy: str, room: tuple[int, int]
) -> None:
    draw = random.Random(seed)
    rows = []
    for number in range(60):
        stem = draw.randrange(6)
        blocks = [stem * 100 + i for i in range(draw.randint(1, 8))]
        rows.append(Row(float(number), len(blocks) * T, 0, blocks=tuple(blocks), line=number))
    workload = workload_of(rows, name="drawn", block_tokens=T)
    setup = Setup(dram_blocks=room[0], file_blocks=room[1], dram_policy=policy, file_policy=policy)
    alone = run(workload, setup, hosts=1, router=router, seed=seed)
    assert alone.traffic == alone.one.traffic
    assert alone.hit_tokens == pytest.approx(1.0) or not alone.one.token_hit_ratio
    assert (alone.hit_requests, alone.lent.asked) == (alone.one.hit_requests, 0)
    many = run(workload, setup, hosts=6, router=router, seed=seed)
    assert 0 <= many.own_hit_ratio + many.peer_hit_ratio <= many.one.infinite + 1e-9
    again = run(workload, setup, hosts=6, router=router, seed=seed).to_dict()
    assert {**again, "blocks_per_s": 0} == {**many.to_dict(), "blocks_per_s": 0}


def test_with_all_the_room_routing_does_not_matter_if_the_view_is_fresh(tmp_path: Path) -> None:
    workload = load_workload(write(tmp_path / "chat.jsonl.gz", chat(30, 4)))
    for router in ROUTERS:
        result = run(workload, Setup(dram_blocks=400), hosts=7, router=router, view_age_s=0.0)
        assert result.hit_tokens == 1.0, router
    assert run(workload, Setup(dram_blocks=400), hosts=1000).hit_tokens > 0.9


def test_a_conversation_stays_at_its_host_and_few_move_when_one_more_comes() -> None:
    eight, nine = Affinity(8), Affinity(9)
    rows = [Row(float(n), T, 0, f"chat {n}", (n,), line=n) for n in range(2000)]
    requests = workload_of(rows, name="drawn", block_tokens=T).requests
    before = [eight.route(each, []) for each in requests]
    assert before == [eight.route(each, []) for each in requests]
    moved = sum(at != nine.route(each, []) for at, each in zip(before, requests, strict=True))
    assert 0 < moved < 2000 / 9 * 1.5
    assert max(map(before.count, range(8))) < 2000 / 8 * 1.5


def test_the_kv_router_follows_blocks_within_the_bound_on_loads() -> None:
    rows = [Row(at_s, T, 0, blocks=(n,), line=n) for n, at_s in enumerate((0, 0, 0, 0, 0, 50.0))]
    requests = workload_of(rows, name="drawn", block_tokens=T).requests
    router = KVAware(4, 1, lambda keys: [(2, 9), (3, 8)], 2.0)
    # At most 2 x the mean, rounded up: 1 request of 1 or 2, 2 of 3 or 4.
    sent = [router.route(each, []) for each in requests[:5]]
    assert sent[:4] == [2, 3, 2, 3]
    assert requests[5].at_s - LOAD_S > requests[4].at_s
    assert router.route(requests[5], []) == 2
    spread = KVAware(4, 1, lambda keys: [], 1.0)
    assert sorted(spread.route(each, []) for each in requests[:4]) == [0, 1, 2, 3]
    with pytest.raises(InvalidRequest, match="random, round-robin"):
        make_router("best", 2, seed=1, holding=lambda keys: [])


def test_a_view_over_its_bound_knows_every_second_head_and_the_rest_at_once() -> None:
    heads = [Heads(), Heads()]
    told = Told(heads, age_s=1.0, nbytes_max=600 * 10)

    def came(host: int, first: int, count: int) -> None:
        for i in range(count):
            level = ((i + 1) & -(i + 1)).bit_length() - 1
            heads[host]._levels[first + i] = level
            heads[host]._note(Change(first + i, True, level))

    came(0, 0, 1000)
    told.note(0, 0.0)
    told.tell(0.0)
    told._view.settle_at_once()
    came(1, 5000, 2)
    told.note(1, 0.5)
    told.tell(0.5)
    assert told.level == 0  # half of 10,000 bytes are of the host itself
    came(1, 9000, 500)
    told.note(1, 0.6)
    told.tell(1.4)
    assert told.staleness.answers == 2
    told.tell(1.5)
    assert told.staleness.max_s == pytest.approx(0.9)
    told._view.settle_at_once()
    came(0, 20_000, 1)
    told.note(0, 9.0)
    told.tell(9.0)
    assert told.level == 1
    assert told.heads_known() == 251 + 500 - 251


def test_a_view_changed_at_once_is_the_one_changed_beside_others() -> None:
    view, plain = View(), set[int]()
    draw = random.Random(3)
    for _ in range(30):
        heads = np.array(draw.sample(range(50), 8), dtype=np.uint64)
        if draw.random() < 0.3:
            view.replace_at_once(4, heads)
            plain = set(heads.tolist())
        else:
            view.change(4, heads, b"\1" * 4 + b"\0" * 4)
            plain = (plain | set(heads[:4].tolist())) - set(heads[4:].tolist())
        if draw.random() < 0.5:
            view.settle_at_once()
            assert view.pending == 0
            assert len(view) == len(plain)
        assert all(bool(view.holders([h], 1)) == (h in plain) for h in range(50))


def test_of_lenders_within_a_head_any_may_be_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a daemon: one block more, of 16 to a head, does not send all to the same host."""
    take, first = Hosts._take, list[int]()

    def noted(self: Hosts, host: int, other: int, keys: Sequence[BlockKey], hit: int) -> int:
        if host == 2 and not hit:
            first.append(other)
        return take(self, host, other, keys, hit)

    monkeypatch.setattr(Hosts, "_take", noted)
    setup = Setup(dram_blocks=4000)
    hosts = Hosts(3, setup, 16, age_s=0.0, view_nbytes_max=1 << 20, seed=1)
    for number in range(40):
        keys = sample_keys(f"prefix {number}", 20)
        assert hosts.ask(0, keys, 0.0) == 0
        assert hosts.ask(1, keys[:19], 0.0) == 19
        assert hosts.ask(2, keys, 0.0) == 20  # who has less is asked first, and the other then
    assert 8 < first.count(1) < 32
    assert len(first) == 40
