"""Prompts made of named blocks: two share a prefix exactly as far as their names agree.

A block's text is a hash of its name spelled in words, then words from a place in a fixed bank that
the hash picks. So different blocks part within their first SPELL_WORDS words, the same name makes
the same text in any order and on any machine, and a block costs a hash and a slice: long prompts
are made between requests, on the thread that takes the times.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from hashlib import blake2b

from kvstore_bench.chat.workloads.generator import Vocabulary, spell

SPELL_WORDS = 5  # of 293 words: 2 * 10^12 different beginnings
BANK_WORDS = 1 << 16
PIECE_WORDS = 512  # of text that the trace names no blocks for


class BlockText:
    """Text for the blocks of one workload; a word is a token. Another seed shares no block."""

    def __init__(self, vocabulary: Vocabulary, *, seed: str) -> None:
        self._words = vocabulary.single_token_words()
        self._seed = seed
        draw = random.Random("kvstore-bench/blocks")
        bank = [self._words[int(draw.random() * len(self._words))] for _ in range(BANK_WORDS)]
        self._bank = " ".join(bank)
        self._starts = [0]
        for word in bank:
            self._starts.append(self._starts[-1] + len(word) + 1)

    def prompt(
        self, blocks: Sequence[int | str], *, scope: str, block_tokens: int, tokens: int, own: str
    ) -> str:
        """Join blocks to `tokens` words: the last one is cut, and what no block covers is filled.

        blocks: names of block_tokens words each, in order; they mean the same within a scope.
        own: names the filling, which only equal prompts share.
        """
        names = [f"{scope}/{block}" for block in blocks]
        pieces = []
        left = tokens
        for name in names[: -(-tokens // block_tokens)] if block_tokens else ():
            pieces.append(self._block(name, min(block_tokens, left)))
            left -= block_tokens
        for number in range(-(-left // PIECE_WORDS)):
            pieces.append(self._block(f"{own}//{number}", min(PIECE_WORDS, left)))
            left -= PIECE_WORDS
        return " ".join(pieces)

    def _block(self, name: str, words: int) -> str:
        digest = blake2b(f"{self._seed}/{name}".encode(), digest_size=8).digest()
        number = int.from_bytes(digest, "little")
        spelled = spell(number, self._words, SPELL_WORDS)[:words]
        rest = words - len(spelled)
        if not rest:
            return " ".join(spelled)
        first = number % (BANK_WORDS - rest)
        return " ".join(
            (*spelled, self._bank[self._starts[first] : self._starts[first + rest] - 1])
        )
