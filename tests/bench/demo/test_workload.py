"""The demo's workload: the same for everybody, and exact to the token."""

import json
from pathlib import Path

import pytest

from kvstore.model.errors import InvalidRequest
from kvstore_bench.demo.workload import Shape, Tokens, Turn, Workload, build, save, tokenizer_of

BOS = (2,)
SMALL = Shape(conversations=3, turns=3, fresh=2, first_tokens_min=200, first_tokens_max=300)


def encode(text: str) -> list[int]:
    return [3 + ord(letter) for letter in text]


def answers_to(workload: Workload) -> dict[Turn, Tokens]:
    turns = workload.turns(1, workload.shape.turns)
    return {turn: (turn.conversation, turn.number) * 16 for turn in turns}


def test_equal_seeds_give_equal_workloads() -> None:
    assert build(SMALL, encode, BOS) == build(SMALL, encode, BOS)


def test_another_seed_gives_other_prompts() -> None:
    other = Shape(conversations=3, turns=3, fresh=2, seed=SMALL.seed + 1)
    assert build(SMALL, encode, BOS).questions[0] != build(other, encode, BOS).questions[0]


def test_sizes_are_what_the_shape_says() -> None:
    workload = build(SMALL, encode, BOS)
    opening = [each[0] for each in workload.questions] + list(workload.fresh)
    assert all(200 <= len(question) <= 300 and question[:1] == BOS for question in opening)
    assert all(len(question) == 64 for each in workload.questions for question in each[1:])
    assert len(workload.fresh) == 2


def test_every_prompt_is_a_prefix_of_the_next_turns() -> None:
    workload = build(SMALL, encode, BOS)
    answers = answers_to(workload)
    for conversation in range(3):
        prompts = [workload.prompt(Turn(conversation, n), answers) for n in (1, 2, 3)]
        for earlier, later, turn in zip(prompts, prompts[1:], (1, 2), strict=False):
            told = earlier + list(answers[Turn(conversation, turn)])
            assert later[: len(told)] == told
            assert len(later) == len(told) + 64


def test_longest_prompt_and_answer_fit_the_engine() -> None:
    shape = Shape(conversations=1, turns=4, first_tokens_min=300, first_tokens_max=300)
    workload = build(shape, encode, BOS)
    last = workload.prompt(Turn(0, 4), answers_to(workload))
    assert len(last) + shape.answer_tokens <= shape.prompt_tokens_max


def test_no_two_prompts_share_more_than_the_opening() -> None:
    workload = build(SMALL, encode, BOS)
    openings = [each[0][:32] for each in workload.questions] + [
        each[:32] for each in workload.fresh
    ]
    assert len(set(openings)) == len(openings)


def test_turns_go_round_robin() -> None:
    workload = build(SMALL, encode, BOS)
    assert workload.turns(1, 2) == [Turn(c, n) for n in (1, 2) for c in (0, 1, 2)]


def test_a_workload_longer_than_the_text_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="tokens of text"):
        build(Shape(conversations=10_000), encode, BOS)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"tokenizer\.json"):
        tokenizer_of(tmp_path)


def test_the_saved_file_holds_every_token(tmp_path: Path) -> None:
    workload = build(SMALL, encode, BOS)
    save(workload, answers_to(workload), tmp_path / "workload.json")
    saved = json.loads((tmp_path / "workload.json").read_text())
    first = saved["conversations"][0]
    assert first["questions"] == [list(question) for question in workload.questions[0]]
    assert first["answers"][1] == [0, 2] * 16
    assert saved["shape"]["seed"] == SMALL.seed
