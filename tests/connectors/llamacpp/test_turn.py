"""Where a prompt is cut, so that a later one may resume there; and what of it is kept."""

from __future__ import annotations

import numpy as np

from kvstore import KeyChain, NamespaceId, root_key
from kvstore_llamacpp.turn import Kept, Turn

ROOT = root_key(NamespaceId(bytes(32)))


def turn(**more: int) -> Turn:
    return Turn(KeyChain(ROOT, 16), 16, **more)


def test_a_prompt_stops_at_its_last_block() -> None:
    assert list(turn().pieces(0, 40, stops=True)) == [(0, 32), (32, 40)]
    assert list(turn().pieces(0, 32, stops=True)) == [(0, 16), (16, 32)]
    assert list(turn().pieces(32, 8, stops=True)) == [(0, 8)]
    assert list(turn().pieces(30, 10, stops=True)) == [(0, 2), (2, 10)]
    assert list(turn().pieces(0, 9, stops=True)) == [(0, 9)]


def test_a_prompt_stops_where_it_parted_from_another() -> None:
    assert list(turn(parted_blocks=1).pieces(0, 64, stops=True)) == [(0, 16), (16, 48), (48, 64)]
    assert list(turn(parted_blocks=9).pieces(0, 64, stops=True)) == [(0, 48), (48, 64)]


def test_full_attention_needs_no_stops_and_answers_have_none() -> None:
    assert list(turn(parted_blocks=1).pieces(0, 64, stops=False)) == [(0, 64)]
    answering = turn()
    answering.prompt_seen = True
    assert list(answering.pieces(30, 40, stops=True)) == [(0, 40)]


def test_of_an_answer_the_last_state_counts() -> None:
    memory = [np.empty(1, np.uint8) for _ in range(4)]
    states = [
        Kept(blocks, buffer, None) for blocks, buffer in zip((2, 3, 4, 5), memory, strict=True)
    ]
    asked = turn()
    assert asked.keep(states[0]) is None
    asked.prompt_seen = True
    assert asked.keep(states[2]) is None
    assert asked.keep(states[3]) is states[2]
    assert [each.blocks for each in asked.all_kept()] == [2, 5]


def test_other_tokens_than_the_prompt_have_no_keys() -> None:
    asked = turn()
    asked.prompt = list(range(40))
    assert len(asked.keys(list(range(50))) or ()) == 3
    assert asked.keys([7, *range(1, 50)]) is None
    assert len(asked.keys(list(range(20))) or ()) == 1
