"""The hit is the longest prefix that satisfies every group; checked against the definition."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.decide.planner import longest_hit, needed_spans
from kvstore.model.block import Group, Namespace

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
