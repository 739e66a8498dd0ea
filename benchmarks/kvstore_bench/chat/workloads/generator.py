"""Synthetic conversations: the same seed gives the same bytes on every machine and release.

Text is drawn from a fixed word list in sentences. Sizes are words, a little below the number of
tokens (full stops count too); with a `Vocabulary` made from a tokenizer they are exact tokens of
the message's own text, without the chat template around it.

Each conversation starts with its own number spelled in words, so no two share a first block by
accident, and draws from its own random stream: more conversations, or more turns, leave the
earlier ones unchanged.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore.model.errors import InvalidRequest
from kvstore_bench.chat.workloads.words import WORDS
from kvstore_bench.chat.workloads.workload import Conversation, Message

SENTENCE_WORDS = (6, 14)
START_WORDS = 3
FIRST_TOKENS_MIN = 8
VOCABULARY_WORDS_MIN = 100


@dataclass(frozen=True, slots=True)
class SizeRange:
    """A size drawn uniformly from low..high, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> SizeRange:
        """Read `64` or `2000:3000`. Raises InvalidRequest for anything else."""
        low, _, high = text.partition(":")
        try:
            sizes = cls(int(low), int(high or low))
        except ValueError as error:
            raise InvalidRequest(f"{text!r} is no size: write 64 or 2000:3000") from error
        if not 1 <= sizes.low <= sizes.high:
            raise InvalidRequest(f"{text!r} is no size: 1 <= low <= high must hold")
        return sizes


@dataclass(frozen=True, slots=True)
class Shape:
    """What the generator makes; sizes in words, or in tokens with a tokenizer's vocabulary."""

    conversations: int = 8
    turns: int = 4
    first_tokens: SizeRange = SizeRange(1000, 1000)
    turn_tokens: SizeRange = SizeRange(64, 64)
    answer_tokens: SizeRange = SizeRange(32, 32)
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The words to draw from and how a text is measured.

    count: None counts words. sentences: write capitals and full stops between the words.
    """

    words: tuple[str, ...] = WORDS
    count: Callable[[str], int] | None = None
    sentences: bool = True

    def single_token_words(self) -> tuple[str, ...]:
        """Return the words that add just one token to a text, by this vocabulary's own count."""
        count = self.count
        if count is None:
            return self.words
        before = count(self.words[0])
        single = [word for word in self.words if count(f"{self.words[0]} {word}") == before + 1]
        if len(single) < VOCABULARY_WORDS_MIN:
            raise InvalidRequest("this tokenizer has too few words of one token to draw from")
        return tuple(single)


def vocabulary_of(directory: Path) -> Vocabulary:
    """Measure in the tokens of a local tokenizer (needs transformers).

    A tokenizer that does not know the English words (a test model's) lends its own: otherwise
    all conversations would be the same run of unknown tokens and share their prefixes.
    Raises InvalidRequest where no tokenizer can be loaded.
    """
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    except (ImportError, OSError, ValueError) as error:
        raise InvalidRequest(f"no tokenizer could be loaded from {directory}: {error}") from error

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    def count(text: str) -> int:
        return len(encode(text))

    unknown = tokenizer.unk_token_id
    known = tuple(word for word in WORDS if unknown is None or unknown not in encode(word))
    if len(known) >= VOCABULARY_WORDS_MIN:
        return Vocabulary(known, count)
    own = sorted(word for word in tokenizer.get_vocab() if word.isalnum() and count(word) == 1)
    if len(own) < VOCABULARY_WORDS_MIN:
        raise InvalidRequest(f"the tokenizer in {directory} has too few words to draw from")
    return Vocabulary(tuple(own), count, sentences=False)


def generate(shape: Shape, vocabulary: Vocabulary | None = None) -> list[Conversation]:
    """Make the conversations of a shape, recorded answers included. Same shape, same result."""
    vocabulary = vocabulary or Vocabulary()
    if shape.conversations < 1 or shape.turns < 1:
        raise InvalidRequest("at least one conversation with one turn is needed")
    if shape.first_tokens.low < FIRST_TOKENS_MIN:
        raise InvalidRequest(f"a first turn needs at least {FIRST_TOKENS_MIN} tokens to be unique")
    if shape.conversations > len(vocabulary.words) ** START_WORDS:
        raise InvalidRequest("too many conversations for unique starts")
    return [_conversation(shape, vocabulary, number) for number in range(shape.conversations)]


def _conversation(shape: Shape, vocabulary: Vocabulary, number: int) -> Conversation:
    # A string seed is hashed with SHA-512 and random() is specified to stay the same in all
    # Python releases; choice() and randrange() are not, so only random() is used.
    stream = random.Random(f"kvstore-bench/{shape.seed}/{number}")
    messages = []
    for turn in range(shape.turns):
        size = _draw(stream, shape.turn_tokens if turn else shape.first_tokens)
        start = [] if turn else spell(number, vocabulary.words, START_WORDS)
        messages.append(Message("user", draw_text(stream, vocabulary, size, start)))
        size = _draw(stream, shape.answer_tokens)
        messages.append(Message("assistant", draw_text(stream, vocabulary, size)))
    return Conversation(f"s{shape.seed}-c{number:04d}", tuple(messages))


def _draw(stream: random.Random, sizes: SizeRange) -> int:
    return sizes.low + int(stream.random() * (sizes.high - sizes.low + 1))


def spell(number: int, words: tuple[str, ...], digits_count: int) -> list[str]:
    """Write a number in base len(words), lowest digit first: neighbours differ at once."""
    digits = []
    for _ in range(digits_count):
        number, digit = divmod(number, len(words))
        digits.append(words[digit])
    return digits


def draw_text(
    stream: random.Random, vocabulary: Vocabulary, size: int, start: Sequence[str] = ()
) -> str:
    """Draw words to `size` (words, or tokens of the vocabulary); `start` are the first of them."""
    words = vocabulary.words
    drawn = list(start[:size])
    drawn += [words[int(stream.random() * len(words))] for _ in range(size - len(drawn))]
    if vocabulary.sentences:
        drawn = _punctuate(stream, drawn)
    return fit(drawn, size, vocabulary)


def _punctuate(stream: random.Random, words: list[str]) -> list[str]:
    words = list(words)
    low, high = SENTENCE_WORDS
    first = 0
    while first < len(words):
        last = min(first + low + int(stream.random() * (high - low + 1)), len(words)) - 1
        words[first] = words[first].capitalize()
        words[last] += "."
        first = last + 1
    return words


def fit(words: Sequence[str], size: int, vocabulary: Vocabulary) -> str:
    """Join words and cut to `size`; with a tokenizer, fill up with words that add just one."""
    count = vocabulary.count
    if count is None:
        return " ".join(words[:size])

    def measure(number: int) -> int:
        return count(" ".join(words[:number]))

    text = " ".join(words[: bisect_right(range(1, len(words) + 1), size, key=measure)])
    while (missing := size - count(text)) > 0:
        candidates = (f"{text} {word}".lstrip() for word in vocabulary.words)
        longer = next((item for item in candidates if size - count(item) == missing - 1), None)
        if longer is None:
            raise InvalidRequest(f"this tokenizer has no word to reach exactly {size} tokens")
        text = longer
    return text
