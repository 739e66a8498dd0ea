"""vLLM's `generate_conversations` configuration: sizes drawn from distributions, text from files.

The JSON is that of vLLM's `benchmarks/multi_turn` (`generate_multi_turn.json`). As there: num_turns
counts both roles and is rounded up to an even number; all conversations share one common prefix;
a prefix of its own opens the first question; the common prefix counts into that question's
num_tokens, the own one does not; the answers' sizes are what the server is asked to generate.
Files named in `text_files` are looked for beside the configuration; an empty list draws the words
of the synthetic generator. Sizes are words, or exact tokens with a tokenizer.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.model.errors import InvalidRequest
from kvstore_bench.chat.workloads.distributions import Draw, distribution
from kvstore_bench.chat.workloads.generator import START_WORDS, Vocabulary, draw_text, fit, spell
from kvstore_bench.chat.workloads.workload import Conversation, Message, Workload

FILETYPE = "generate_conversations"
CONVERSATIONS_MAX = 1_000_000
TURNS_MAX = 10_000
TOKENS_MAX = 10_000_000

_SIZES = {
    "num_turns": ("prompt_input", "num_turns", True),
    "common_prefix": ("prompt_input", "common_prefix_num_tokens", False),
    "prefix": ("prompt_input", "prefix_num_tokens", True),
    "question": ("prompt_input", "num_tokens", True),
    "answer": ("prompt_output", "num_tokens", True),
}
_KEYS = {
    "filetype", "num_conversations", "text_files", "print_stats", "prompt_input", "prompt_output",
}  # fmt: skip


def generate_from(
    config: Mapping[str, Any], directory: Path, vocabulary: Vocabulary, *, seed: int
) -> Workload:
    """Make the conversations of a configuration. Raises InvalidRequest that says what is wrong."""
    if config.get("filetype") != FILETYPE:
        raise InvalidRequest(f'expected "filetype": "{FILETYPE}", found {config.get("filetype")!r}')
    if unknown := config.keys() - _KEYS:
        raise InvalidRequest(f"unknown keys: {', '.join(sorted(unknown))}")
    count = config.get("num_conversations")
    if not isinstance(count, int) or not 1 <= count <= CONVERSATIONS_MAX:
        raise InvalidRequest(f'"num_conversations" must be 1 to {CONVERSATIONS_MAX:,}')
    sizes = {name: _sizes(config, *place) for name, place in _SIZES.items()}
    text = _Text(_words(config.get("text_files", []), directory), vocabulary, seed)
    source = {"format": FILETYPE, "config": dict(config), "seed": seed}
    return Workload(
        _conversations(sizes, count, text, seed), source, {"answers": "live", "ignore_eos": True}
    )


def _sizes(config: Mapping[str, Any], section: str, name: str, needed: bool) -> Draw:
    found = config.get(section)
    if not isinstance(found, dict):
        raise InvalidRequest(f'"{section}" must be an object')
    if name not in found:
        if needed:
            raise InvalidRequest(f'"{section}" lacks "{name}"')
        return lambda random, size: np.zeros(size, dtype=np.int64)
    return distribution(f"{section}.{name}", found[name])


def _words(names: Any, directory: Path) -> list[str]:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InvalidRequest('"text_files" must be a list of file names')
    words: list[str] = []
    for name in names:
        try:
            words += (directory / name).read_text("utf-8", errors="replace").split()
        except OSError as error:
            raise InvalidRequest(
                f"text file {directory / name}: {error.strerror}. Put the file there, or leave"
                ' "text_files" empty to use built-in words'
            ) from error
    return words


class _Text:
    """Text in pieces that follow each other in the files, from the start again at the end."""

    def __init__(self, words: list[str], vocabulary: Vocabulary, seed: int) -> None:
        self._words = words
        self._vocabulary = vocabulary
        self._stream = random.Random(f"kvstore-bench/config/{seed}")
        self._next = 0

    def take(self, size: int, start: tuple[str, ...] = ()) -> str:
        if size <= 0:
            return ""
        if not self._words:
            return draw_text(self._stream, self._vocabulary, size, start)
        pieces = [*start]
        while len(pieces) < size:
            piece = self._words[self._next : self._next + size - len(pieces)]
            self._next = (self._next + len(piece)) % len(self._words)
            pieces += piece
        return fit(pieces, size, self._vocabulary)

    def name(self, number: int) -> tuple[str, ...]:
        """Return words that no other conversation starts with."""
        return tuple(spell(number, self._vocabulary.words, START_WORDS))


def _conversations(
    sizes: Mapping[str, Draw], count: int, text: _Text, seed: int
) -> list[Conversation]:
    draws = np.random.RandomState(seed % (1 << 32))
    messages = np.maximum(sizes["num_turns"](draws, count), 2)
    turns = np.minimum((messages + messages % 2) // 2, TURNS_MAX)
    prefixes = sizes["prefix"](draws, count)
    common_size = int(sizes["common_prefix"](draws, 1)[0])
    common = text.take(_checked(common_size))
    found = []
    for number in range(count):
        questions = sizes["question"](draws, int(turns[number]))
        answers = np.maximum(sizes["answer"](draws, int(turns[number])), 1)
        first = max(0, int(questions[0]) - common_size) + int(prefixes[number])
        asked = [_joined(common, text.take(max(START_WORDS, _checked(first)), text.name(number)))]
        asked += [text.take(max(1, _checked(int(size)))) for size in questions[1:]]
        said = [text.take(_checked(int(size))) for size in answers]
        pairs = zip(asked, said, strict=True)
        spoken = [
            message
            for question, answer in pairs
            for message in (Message("user", question), Message("assistant", answer))
        ]
        name = f"CONV_ID_{number}"
        found.append(Conversation(name, tuple(spoken), answers=tuple(int(n) for n in answers)))
    return found


def _joined(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def _checked(size: int) -> int:
    if size > TOKENS_MAX:
        raise InvalidRequest(f"a text of {size:,} tokens is above the limit of {TOKENS_MAX:,}")
    return size
