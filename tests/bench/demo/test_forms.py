"""The small arena that raw, L3 and EP records share, and in which order conversations use it."""

from itertools import pairwise
from pathlib import Path

import pytest

from kvstore.model.block import PAGE_NBYTES
from kvstore_bench.demo import forms
from kvstore_bench.demo.course import Plan
from kvstore_bench.demo.machine import describe
from kvstore_bench.demo.model import KVShape
from kvstore_bench.demo.workload import Shape, Workload, build

GEMMA_3_270M = KVShape(full=3, sliding=15, window=512, elements_per_layer=512)
SHAPE = Shape(conversations=8, turns=4, first_tokens_min=800, first_tokens_max=1200)


@pytest.fixture(scope="module")
def workload() -> Workload:
    return build(SHAPE, lambda text: [3 + ord(letter) for letter in text], (2,))


def test_the_conversation_that_was_asked_last_comes_first(workload: Workload) -> None:
    rounds = [workload.turns(1, 1)]
    rounds += [forms.last_first(workload, number) for number in forms.CAPACITY_TURNS]
    for before, after in pairwise(rounds):
        assert [turn.conversation for turn in after] == [turn.conversation for turn in before[::-1]]
        assert {turn.number for turn in after} == {before[0].number + 1}
    assert forms.CAPACITY_TURNS[-1] <= SHAPE.turns


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_small_arena_has_room_for_half_of_the_first_turns_raw(
    workload: Workload, dtype: str
) -> None:
    plan = Plan(
        model=Path("gemma-3-270m"),
        kv=GEMMA_3_270M,
        machine=describe(),
        dtype=dtype,
        threads=1,
        phases=frozenset(),
    )
    small = plan.arenas(workload).small_nbytes
    first = [len(questions[0]) for questions in workload.questions]
    raw = sum(GEMMA_3_270M.load_nbytes(tokens, dtype=dtype) for tokens in first)
    assert small % PAGE_NBYTES == 0
    assert 0 <= forms.DRAM_SHARE * raw - small < PAGE_NBYTES
    # Raw has room for less than half; L3, at 0.72 of its bytes, for more; EP's base parts for all.
    assert small < raw / 2 < small / 0.72 < 0.8 * raw < raw < small * (1 - forms.FINE_SHARE) / 0.32
