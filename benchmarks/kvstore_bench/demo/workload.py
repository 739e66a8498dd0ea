"""The fixed workload: prompts as token ids, so that a prefix is the same in every phase, exactly.

A prompt is the first question, then answers and further questions in turn. Answers in the history
are the recorded ones of the run's first pass, whatever an engine answers later; so every phase asks
identical prompts.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

from kvstore.model.errors import InvalidRequest

Tokens = tuple[int, ...]
Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the workload, in tokens but for the first three. fresh: prompts asked only once."""

    conversations: int = 8
    turns: int = 4
    fresh: int = 2
    first_tokens_min: int = 2000
    first_tokens_max: int = 3000
    new_tokens: int = 64
    answer_tokens: int = 32
    seed: int = 20

    @property
    def prompt_tokens_max(self) -> int:
        """The longest prompt, its answer included."""
        return self.first_tokens_max + self.turns * (self.new_tokens + self.answer_tokens)


@dataclass(frozen=True, slots=True)
class Turn:
    """One question: conversation from 0, number from 1."""

    conversation: int
    number: int


@dataclass(frozen=True, slots=True)
class Workload:
    """All questions. questions[c][t - 1] is what conversation c asks in turn t, <bos> included."""

    shape: Shape
    questions: tuple[tuple[Tokens, ...], ...]
    fresh: tuple[Tokens, ...]

    def turns(self, first: int, last: int) -> list[Turn]:
        """Return turns in the order they are asked: round robin over the conversations."""
        everyone = range(self.shape.conversations)
        return [Turn(c, number) for number in range(first, last + 1) for c in everyone]

    def prompt(self, turn: Turn, answers: Mapping[Turn, Tokens]) -> list[int]:
        """Return the whole prompt of a turn; needs the answers of the turns before it."""
        prompt = list(self.questions[turn.conversation][0])
        for number in range(2, turn.number + 1):
            prompt += answers[Turn(turn.conversation, number - 1)]
            prompt += self.questions[turn.conversation][number - 1]
        return prompt


def build(shape: Shape, encode: Encode, bos: Tokens) -> Workload:
    """Draw the workload; equal arguments give an equal one under the same Python version."""
    draw = random.Random(shape.seed)
    first = _spread(draw, shape.first_tokens_min, shape.first_tokens_max, shape.conversations)
    fresh = _spread(draw, shape.first_tokens_min, shape.first_tokens_max, shape.fresh)
    further = [shape.new_tokens] * (shape.turns - 1)
    sizes = [[size - len(bos), *further] for size in first] + [[size - len(bos)] for size in fresh]
    text = Text(draw, encode)
    asked = [tuple(text.take(size) for size in each) for each in sizes]
    opened = [(bos + each[0], *each[1:]) for each in asked]
    return Workload(
        shape=shape,
        questions=tuple(opened[: shape.conversations]),
        fresh=tuple(each[0] for each in opened[shape.conversations :]),
    )


def _spread(draw: random.Random, low: int, high: int, count: int) -> list[int]:
    """Draw sizes that cover low..high evenly, one from each of `count` equal parts, shuffled."""
    sizes = [low + int((high - low) * (part + draw.random()) / count) for part in range(count)]
    draw.shuffle(sizes)
    return sizes


class Text:
    """The prose of Python's own help topics, in random order, taken by the token.

    Answers to prose follow from the prompt; to random words a small model answers one word for
    ever, and a wrong prefix would go unnoticed.
    """

    def __init__(self, draw: random.Random, encode: Encode) -> None:
        names = sorted(topics)
        draw.shuffle(names)
        self._tokens = encode("\n".join(topics[name] for name in names))
        self._taken = 0

    def take(self, count: int) -> Tokens:
        """Return the next `count` tokens. Raises InvalidRequest at the end of the text."""
        first, self._taken = self._taken, self._taken + count
        if self._taken > len(self._tokens):
            raise InvalidRequest(f"the workload needs more than {len(self._tokens)} tokens of text")
        return tuple(self._tokens[first : self._taken])


def tokenizer_of(model: Path) -> tuple[Encode, Tokens]:
    """Return the encoder and the beginning-of-sequence tokens of a checkpoint.

    Raises InvalidRequest if it has no tokenizer.json.
    """
    from tokenizers import Tokenizer

    path = model / "tokenizer.json"
    if not path.exists():
        raise InvalidRequest(f"{model} is no checkpoint with a tokenizer.json")
    tokenizer = Tokenizer.from_file(str(path))
    bos = json.loads((model / "config.json").read_text()).get("bos_token_id")

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    return encode, () if bos is None else (int(bos),)


def save(workload: Workload, answers: Mapping[Turn, Tokens], target: Path) -> None:
    """Write every prompt token and recorded answer, so that a run can be repeated elsewhere."""
    shape = {name: getattr(workload.shape, name) for name in Shape.__dataclass_fields__}
    conversations = [
        {
            "questions": questions,
            "answers": [
                answers.get(Turn(number, turn), ()) for turn in range(1, len(questions) + 1)
            ],
        }
        for number, questions in enumerate(workload.questions)
    ]
    content = {"shape": shape, "conversations": conversations, "fresh": workload.fresh}
    target.write_text(json.dumps(content))
