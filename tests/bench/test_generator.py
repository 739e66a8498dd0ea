"""Synthetic conversations: reproducible, of the asked sizes, sharing no prefix."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from kvstore.model.errors import InvalidRequest
from kvstore_bench.chat.workloads.generator import (
    Shape,
    SizeRange,
    Vocabulary,
    generate,
    vocabulary_of,
)
from kvstore_bench.chat.workloads.words import WORDS
from kvstore_bench.chat.workloads.workload import dump, parse

GOLDEN = "204e3f32f83a493ed999ff9346be71da42bb89c56b5c0312e74e9eacfb7ea7ba"


def test_the_same_seed_gives_the_same_bytes_for_ever() -> None:
    shape = Shape(conversations=3, turns=2, first_tokens=SizeRange(40, 60), seed=7)
    assert hashlib.sha256(dump(generate(shape))).hexdigest() == GOLDEN


def test_more_conversations_or_turns_leave_the_others_unchanged() -> None:
    small = generate(Shape(conversations=2, turns=2))
    large = generate(Shape(conversations=5, turns=4))
    assert [item.first_turns(2) for item in large[:2]] == small


def test_another_seed_gives_other_text() -> None:
    one, two = (generate(Shape(conversations=1, seed=seed)) for seed in (1, 2))
    assert one[0].messages[0] != two[0].messages[0]


def test_sizes_are_words_within_their_range() -> None:
    shape = Shape(conversations=20, first_tokens=SizeRange(20, 30), turn_tokens=SizeRange(5, 7))
    sizes = {
        turn: {len(item.question(turn).content.split()) for item in generate(shape)}
        for turn in (1, 2)
    }
    assert sizes[1] <= set(range(20, 31))
    assert len(sizes[1]) > 1
    assert sizes[2] == {5, 6, 7}


def test_no_two_conversations_start_with_the_same_words() -> None:
    conversations = generate(Shape(conversations=1000, turns=1, first_tokens=SizeRange(8, 8)))
    starts = {tuple(item.messages[0].content.lower().split()[:3]) for item in conversations}
    assert len(starts) == 1000
    assert len(set(WORDS)) == len(WORDS)


def test_generated_conversations_are_valid_vllm_input_with_all_answers() -> None:
    (conversation,) = parse(dump(generate(Shape(conversations=1, turns=3))))
    assert [message.role for message in conversation.messages] == ["user", "assistant"] * 3


def test_a_tokenizer_makes_sizes_exact() -> None:
    def count(text: str) -> int:  # long words are two tokens, each full stop is one
        return sum(1 + (len(word) > 6) for word in text.split()) + text.count(".")

    shape = Shape(conversations=5, first_tokens=SizeRange(50, 99), turn_tokens=SizeRange(9, 9))
    for conversation in generate(shape, Vocabulary(count=count)):
        assert 50 <= count(conversation.question(1).content) <= 99
        assert count(conversation.question(2).content) == 9


def test_a_tokenizer_without_english_lends_its_own_words(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    words = {"<unk>": 0} | {f"t{number}": number for number in range(1, 200)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>")
    fast.save_pretrained(tmp_path)
    (conversation,) = generate(Shape(conversations=1), vocabulary_of(tmp_path))
    text = conversation.question(1).content.split()
    assert len(text) == 1000
    assert set(text) <= set(words)


def test_a_missing_tokenizer_is_an_invalid_request(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(InvalidRequest, match="no tokenizer could be loaded"):
        vocabulary_of(tmp_path)


@pytest.mark.parametrize("text", ["", "x", "3:2", "0", "1:2:3", "-4"])
def test_sizes_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="is no size"):
        SizeRange.parse(text)


@pytest.mark.parametrize(
    "shape", [Shape(conversations=0), Shape(turns=0), Shape(first_tokens=SizeRange(2, 9))]
)
def test_shapes_that_cannot_be_made_are_refused(shape: Shape) -> None:
    with pytest.raises(InvalidRequest):
        generate(shape)
