"""What is asked: long prompts, each again and again, and conversations that take turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from kvstore import InvalidRequest
from kvstore_bench.codec.texts import code, prose


@dataclass(frozen=True, slots=True)
class Shape:
    """rounds: prompts of `prompt_tokens`, each measured in every phase.

    conversations: of `turns` turns each. They begin with `shared_tokens` that all have in common,
    and `first_tokens` of their own; each further turn brings `turn_tokens`.
    """

    prompt_tokens: int = 2000
    rounds: int = 3
    answer_tokens: int = 16
    conversations: int = 8
    turns: int = 4
    shared_tokens: int = 512
    first_tokens: int = 512
    turn_tokens: int = 64


@dataclass(frozen=True, slots=True)
class Workload:
    """prompts, and for each conversation what its user says in each turn; all of token ids."""

    prompts: list[list[int]]
    conversations: list[list[list[int]]]


def build(shape: Shape, tokens: Sequence[int], first: Sequence[int]) -> Workload:
    """Cut a text of `tokens` into a workload. first: what every prompt begins with."""
    pieces = _cutter(tokens)
    prompts = [[*first, *pieces(shape.prompt_tokens - len(first))] for _ in range(shape.rounds)]
    shared = [*first, *pieces(shape.shared_tokens - len(first))]
    conversations = [
        [
            [*shared, *pieces(shape.first_tokens)],
            *(pieces(shape.turn_tokens) for _ in range(shape.turns - 1)),
        ]
        for _ in range(shape.conversations)
    ]
    return Workload(prompts, conversations)


def text() -> str:
    """Return enough running text."""
    return prose() + code()


def _cutter(tokens: Sequence[int]) -> Callable[[int], list[int]]:
    """Return what cuts a text into pieces that follow each other. Raises InvalidRequest at its
    end."""
    left = iter(tokens)

    def cut(count: int) -> list[int]:
        piece = list(islice(left, count))
        if len(piece) < count:
            raise InvalidRequest(f"a text of {len(tokens)} tokens is too short: ask for less")
        return piece

    return cut


def turns(conversations: Sequence[Sequence[Sequence[int]]]) -> Iterator[tuple[int, list[int]]]:
    """Yield (conversation, what its user says), one turn of each after the other."""
    for number in range(len(conversations[0])):
        for index, conversation in enumerate(conversations):
            yield index, list(conversation[number])
