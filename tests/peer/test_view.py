"""The view of all peers' heads answers as a plain dictionary would."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.peer.view import BYTES_A_HEAD, View, _merged

HEADS = list(range(1, 40))
changes = st.tuples(
    st.sampled_from(["came", "left", "snapshot", "forget", "settle"]),
    st.integers(0, 4),
    st.lists(st.sampled_from(HEADS), max_size=12),
)


def expected(plain: dict[int, set[int]], prefix: list[int], beyond: int) -> dict[int, int]:
    found = {}
    for place, heads in plain.items():
        longest = max((at + 1 for at, head in enumerate(prefix) if head in heads), default=0)
        if longest > beyond:
            found[place] = longest
    return found


@settings(max_examples=200, deadline=None)
@given(
    st.lists(changes, max_size=25), st.lists(st.sampled_from(HEADS), max_size=10), st.integers(0, 5)
)
def test_it_knows_who_has_the_longest_prefix(
    steps: list[tuple[str, int, list[int]]], prefix: list[int], beyond: int
) -> None:
    async def run() -> None:
        view, plain = View(), {place: set[int]() for place in range(5)}
        for kind, place, heads in steps:
            if kind == "snapshot":
                await view.replace(place, np.array(sorted(set(heads)), dtype=np.uint64))
                plain[place] = set(heads)
            elif kind == "forget":
                await view.forget(place)
                plain[place] = set()
            elif kind == "settle":
                await view.settle()
            else:
                came = bytes([kind == "came"]) * len(heads)
                view.change(place, np.array(heads, dtype=np.uint64), came)
                for head in heads:
                    (plain[place].add if kind == "came" else plain[place].discard)(head)
        wanted = list(dict.fromkeys(prefix))
        found = view.holders(wanted, 5, beyond)
        assert view.knows(wanted) or not expected(plain, wanted, 0)
        assert {each.place: each.heads for each in found} == expected(plain, wanted, beyond)
        assert [each.heads for each in found] == sorted(
            (each.heads for each in found), reverse=True
        )
        await view.settle()
        assert len(view) == sum(map(len, plain.values()))

    asyncio.run(run())


def test_it_takes_ten_bytes_a_head() -> None:
    async def run() -> None:
        view, drawn = View(), random.Random(1)
        for place in range(3):
            heads = sorted({drawn.getrandbits(64) for _ in range(1000)})
            await view.replace(place, np.array(heads, dtype=np.uint64))
        assert view.nbytes == BYTES_A_HEAD * len(view) == BYTES_A_HEAD * 3000

    asyncio.run(run())


def test_no_more_are_named_than_are_asked_for() -> None:
    async def run() -> None:
        view = View()
        for place in range(10):
            await view.replace(place, np.array([7], dtype=np.uint64))
        assert len(view.holders([7], 3)) == 3

    asyncio.run(run())


@settings(max_examples=100, deadline=None)
@given(st.lists(changes, max_size=12), st.lists(changes, max_size=12))
def test_changes_while_others_are_merged_are_not_lost(
    before: list[tuple[str, int, list[int]]], meanwhile: list[tuple[str, int, list[int]]]
) -> None:
    async def run() -> None:
        view, plain = View(), {place: set[int]() for place in range(5)}

        def change(steps: list[tuple[str, int, list[int]]]) -> None:
            for kind, place, heads in steps:
                came = bytes([kind != "left"]) * len(heads)
                view.change(place, np.array(heads, dtype=np.uint64), came)
                plain[place] = (
                    plain[place] - {*heads} if kind == "left" else plain[place] | {*heads}
                )

        def check() -> None:
            for head in HEADS:
                holders = {each.place for each in view.holders([head], 5)}
                assert holders == {place for place, heads in plain.items() if head in heads}

        change(before)
        await view.settle()
        change(meanwhile[::2])
        settling = asyncio.ensure_future(view.settle())
        await asyncio.sleep(0)  # its thread has begun
        change(meanwhile)
        check()
        await settling
        check()
        await view.settle()
        check()
        assert not view.pending
        assert len(view) == sum(map(len, plain.values()))

    asyncio.run(run())


def test_who_waits_for_a_merge_does_not_merge_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A merge takes a thread for as long as the table is large, and many peers change at once."""
    merged: list[int] = []

    def counting(*arguments: Any) -> Any:
        merged.append(1)
        return _merged(*arguments)

    monkeypatch.setattr("kvstore.peer.view._merged", counting)

    async def run() -> None:
        view = View()
        view.change(1, np.arange(100, dtype=np.uint64), bytes([1]) * 100)
        await asyncio.gather(*(view.settle(50) for _ in range(20)))
        assert len(merged) == 1
        assert len(view) == 100

    asyncio.run(run())
