"""The hit is the longest prefix that satisfies every group; checked against the definition."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.decide.planner import longest_hit, needed_spans, planner
from kvstore.model.block import Group, Match, Namespace, Part, Span
from tests.decide.planner.spaces import PARTS, SPEC, Node, chain_of

BLOCK_TOKENS = 4


def namespace(windows: list[int]) -> Namespace:
    groups = tuple(Group(f"g{i}", 64, window) for i, window in enumerate(windows))
    return Namespace(BLOCK_TOKENS, groups, ())


def by_definition(spec: Namespace, masks: list[int], skip: int) -> int:
    """The promise itself: the largest n such that every needed block of every group is there."""
    best = skip
    for hit in range(skip + 1, len(masks) + 1):
        needed = [
            (group, i)
            for group, rule in enumerate(spec.groups)
            for i in rule.blocks_needed(hit, BLOCK_TOKENS)
            if i >= skip
        ]
        if all(masks[i] >> group & 1 for group, i in needed):
            best = hit
    return best


@given(
    st.lists(st.sampled_from([0, 1, 2, 5, 9, 100]), min_size=1, max_size=4),
    st.data(),
)
def test_the_hit_is_what_the_definition_says(windows: list[int], data: st.DataObject) -> None:
    spec = namespace(windows)
    full = (1 << len(windows)) - 1
    masks = data.draw(
        st.lists(st.sampled_from([0, full, full, full]) | st.integers(0, full), max_size=14)
    )
    skip = data.draw(st.integers(0, len(masks)))
    assert longest_hit(spec, masks, skip) == by_definition(spec, masks, skip)


def test_a_window_group_needs_only_its_last_tokens() -> None:
    spec = namespace([0, 9])
    # A window of 9 reads the 8 tokens before the next: two whole blocks.
    assert longest_hit(spec, [0b01, 0b01, 0b11, 0b11]) == 4
    assert longest_hit(spec, [0b01, 0b01, 0b01, 0b11]) == 0
    assert [(s.part.group, s.begin, s.end) for s in needed_spans(spec, 4)] == [(0, 0, 4), (1, 2, 4)]


def test_blocks_the_caller_holds_need_not_be_stored() -> None:
    spec = namespace([0, 9])
    assert longest_hit(spec, [0, 0, 0b11], 2) == 3
    assert [(s.part.group, s.begin, s.end) for s in needed_spans(spec, 3, 2)] == [
        (0, 2, 3),
        (1, 2, 3),
    ]


def test_every_shard_of_a_group_is_asked_for() -> None:
    spec = Namespace(BLOCK_TOKENS, (Group("full", 64, shards=2),), ())
    assert [span.part for span in needed_spans(spec, 1)] == [(0, 0), (0, 1)]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_long_prefix_is_matched_in_two_steps_alike(data: st.DataObject) -> None:
    node, keys = Node(dram_records=100), chain_of(24)
    for part in PARTS:
        node.put(keys, part)
    lost = data.draw(st.lists(st.integers(0, 23), max_size=3))
    if lost:
        node.planner.delete(SPEC.id, [keys[at] for at in lost])
    node.put(keys[: data.draw(st.integers(0, 24))])  # these lack their windows
    skip = data.draw(st.integers(0, 24))
    windows = data.draw(st.booleans())

    def match(first: int) -> Match:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(planner, "FIRST_KEYS", first)
            return node.planner.match(SPEC.id, keys, skip, windows=windows)

    assert match(2) == match(5) == match(24)


def test_no_block_is_looked_at_that_no_span_has(monkeypatch: pytest.MonkeyPatch) -> None:
    node, keys = Node(dram_records=100), chain_of(24)
    node.put(keys)
    looked_at = []
    index_find = node.planner.index.find

    def find(namespace_id: object, keys: list[object]) -> object:
        looked_at.append(len(keys))
        return index_find(namespace_id, keys)  # type: ignore[arg-type]

    monkeypatch.setattr(node.planner.index, "find", find)
    spans = (Span(Part(0, 0), 7, 9), Span(Part(0, 0), 5, 8))
    records = node.planner.find(SPEC.id, keys, spans)
    expected = [index_find(SPEC.id, keys)[at] for at in (7, 8, 5, 6, 7)]
    assert records == [block and block.record(Part(0, 0)) for block in expected]
    assert node.planner.find(SPEC.id, keys, ()) == []
    assert looked_at == [4, 0]
