"""Never slower than recompute: what is asked of a slow tier, and how long anybody waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.decide.pace import FORGET_S, PATIENCE, PATIENCE_SAVED_MAX, Pace, Stakes
from kvstore.metrics import Metrics
from kvstore.model.block import BlockKey
from kvstore.model.outcome import Reason
from kvstore.move.load_race import LoadRaces
from kvstore.store.gets import AT_STAKE_MIN_S
from tests.sim.loop import SimLoop
from tests.store.node import SPEC, Node, chain

A, B, OTHER = chain(1), chain(2), chain(3)
BLOCKS = 8
BLOCK_S = 0.05  # what computing a block takes the engine
PROMPT_S = BLOCKS * BLOCK_S
FAST_S, SLOW_S = 0.002, 1.5  # half of one I/O, about


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """Two prefixes in the file tier, while the arena is full of another one."""
    with Node(tmp_path / "kv", arena_bytes=256 << 10, loop=SimLoop(Random(5))) as node:
        for keys, blocks in ((A, BLOCKS), (B, BLOCKS), (OTHER, 16)):
            for begin in range(0, blocks, 4):
                node.put(keys, begin, begin + 4, durable=True)
        yield node


def ask(node: Node, keys: list[BlockKey], io_s: float) -> tuple[int, float]:
    """Acquire a prefix that is not resident; return the hit and how long that took."""
    assert isinstance(node.loop, SimLoop)
    node.loop.threads.io_s = io_s
    began = node.loop.time()
    hit = node.get(keys[:BLOCKS], wait_s=20.0, recompute_s_per_block=BLOCK_S, request_id="it")
    took_s = node.loop.time() - began
    node.loop.threads.io_s = FAST_S
    return hit, took_s


@pytest.mark.parametrize("block_s", [0.07, 0.05])
def test_an_engine_that_has_just_started_is_not_slower_either(
    tmp_path: Path, block_s: float
) -> None:
    """It does not know its pace, and the daemon has just started too. Where computing takes less
    than half a second, a guess may not cost a hit."""
    for life in range(2):
        with Node(tmp_path / "kv", arena_bytes=256 << 10, loop=SimLoop(Random(5))) as node:
            if not life:
                for begin in range(0, BLOCKS, 4):
                    node.put(A, begin, begin + 4, durable=True)
                node.get(A[:BLOCKS], recompute_s_per_block=block_s)
                continue
            node.recall()
            assert isinstance(node.loop, SimLoop)
            node.loop.threads.io_s = SLOW_S
            began = node.loop.time()
            hit, took_s = node.get(A[:BLOCKS], wait_s=20.0), node.loop.time() - began
            if BLOCKS * block_s < AT_STAKE_MIN_S:
                assert hit == BLOCKS
            else:
                assert hit < BLOCKS
                assert took_s <= BLOCKS * block_s * (1 + PATIENCE)
            node.loop.threads.io_s = FAST_S
            node.run(until_idle(node))


def test_who_tells_nothing_does_not_confirm_what_others_told(node: Node) -> None:
    node.get(A[:BLOCKS], wait_s=20.0, recompute_s_per_block=BLOCK_S)
    node.get(chain(9)[:1], recompute_s_per_block=5e-324)
    doubted = node.planner.costs.s_per_block(SPEC)
    for _ in range(10):
        assert node.get(A[:BLOCKS], wait_s=20.0) == BLOCKS
    assert node.planner.costs.s_per_block(SPEC) == doubted >= BLOCK_S / 1.4


async def until_idle(node: Node) -> None:
    while node.write_behind.reads.under_way:  # noqa: ASYNC110 - virtual time
        await asyncio.sleep(1.0)


def decisions(node: Node) -> dict[str, float]:
    counted = node.metrics.totals().get("load_decisions", {})
    return {name: count for name, count in counted.items() if count}


def test_what_comes_up_sooner_than_it_is_computed_is_waited_for(node: Node) -> None:
    assert ask(node, B, FAST_S)[0] == BLOCKS
    assert ask(node, A, FAST_S)[0] == BLOCKS
    assert decisions(node) == {"explore": 1, "load": 1}


def test_a_tier_that_became_slow_is_left_alone_after_one_short_wait(node: Node) -> None:
    ask(node, B, FAST_S)
    hit, took_s = ask(node, A, SLOW_S)
    assert hit == 0
    assert took_s <= PATIENCE_SAVED_MAX * PROMPT_S
    outcome = node.store.report.outcomes("it", 1)[0]
    assert outcome.ending is not None
    assert outcome.ending.reason is Reason.SLOWER
    assert decisions(node)["cut"] == 1


def test_a_tier_known_to_be_slow_costs_nothing_and_is_tried_again_later(node: Node) -> None:
    ask(node, B, SLOW_S)
    assert ask(node, B, SLOW_S) == (0, 0.0)  # that load is still under way
    match = node.store.gets.match(SPEC.id, B[:BLOCKS], 0, BLOCK_S)
    assert (match.hit_blocks, match.worth_blocks) == (BLOCKS, 0)
    node.loop.run_until_complete(until_idle(node))
    assert ask(node, A, SLOW_S) == (0, 0.0)  # it has ended, and took long
    node.loop.run_until_complete(asyncio.sleep(FORGET_S))
    assert ask(node, A, FAST_S)[0] == BLOCKS
    assert decisions(node) == {"explore": 2, "cut": 1, "refuse": 2}


def test_a_tier_that_is_faster_again_is_believed_after_one_load() -> None:
    """Of a load that counts as a whole: the one that tries it again may be cut short, and tells
    when it has ended how long it took. What was slow before is no longer of use."""
    at, nbytes = 0.0, 1 << 20
    pace = Pace(lambda: at)
    for _ in range(5):
        pace.note(nbytes, 10 * PROMPT_S)
    stakes = Stakes(PROMPT_S, PROMPT_S, at)
    assert pace.race(nbytes, stakes, whole=True) is None
    at = FORGET_S
    again = pace.race(nbytes, stakes, whole=True)
    assert again is not None
    assert again.predicted_s is None
    pace.note(nbytes, took_s := PROMPT_S / 4)
    race = pace.race(nbytes, stakes, whole=True)
    assert race is not None
    assert race.patience_s >= 2 * took_s
    pace.note(nbytes, 10 * PROMPT_S)  # one slow load among fast ones is not all that is known
    assert pace.predict(nbytes) == pytest.approx(took_s + (10 * PROMPT_S - took_s) / 8)


def test_who_does_not_tell_what_recomputing_takes_waits_as_long_as_was_asked(node: Node) -> None:
    assert isinstance(node.loop, SimLoop)
    node.loop.threads.io_s = 0.5
    assert node.get(B[:BLOCKS], wait_s=15.0) == BLOCKS
    assert not decisions(node)


@given(
    st.lists(st.floats(0.0, 5.0), min_size=1, max_size=20),
    st.floats(0.01, 2.0),
    st.floats(1.0, 4.0),
    st.floats(0.0, 1.0),
    st.booleans(),
)
def test_however_the_parts_of_a_load_come_up_little_is_lost(
    parts_s: list[float], saved_s: float, prompt_times: float, coming: float, whole: bool
) -> None:
    """coming: the share that another engine is computing still. whole: a start is of no use."""
    loop = SimLoop(Random(0))
    loads = LoadRaces(Metrics(), loop.time)

    async def load() -> None:
        stakes = Stakes(saved_s, prompt_times * saved_s, loop.time())
        race = loads.race(1 << 20, stakes, elsewhere_s=coming * saved_s, whole=whole)
        assert race is not None
        tasks = [asyncio.create_task(asyncio.sleep(part_s)) for part_s in parts_s]
        parts = {task: 1 + at % 3 for at, task in enumerate(tasks)}
        await loads.wait(parts, 1 << 20, began=0.0, deadline=100.0, race=race, arrived=lambda: True)
        took_s = loop.time() - stakes.began
        start = takewhile(asyncio.Task.done, tasks)  # without a gap
        came = sum(map(parts.__getitem__, start)) / sum(parts.values())
        came = 0.0 if whole and came < 1.0 else came
        lost_s = took_s - came * saved_s
        assert lost_s <= PATIENCE * stakes.prompt_s + coming * saved_s + 1e-6
        await asyncio.gather(*parts)

    loop.run_until_complete(load())
    loop.close()
