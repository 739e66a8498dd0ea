"""How often will a block be asked for again, once the arena has forgotten it? Learned online.

A block's *class* is where it was in a prompt: how many blocks of that were known before, how many
were new, and how deep it was, each to an octave. So a short question in a long conversation is told
from a long document after a prompt that many share, and the start of a document from its end; what
was used again is less deep than what was new. Nothing depends on who evicts, or on what is stored.

A table of 8 bytes a block remembers its class and when it was used last. A use that is later than
LATE_S is a *return* for that class, and gives a block the class it has in the new prompt; sooner
ones are the arena's. What a class is expected to return is what it has returned, shrunk towards
what its prompts have, at any depth, and they towards all.

Measured on traces, this finds more of the returns than the classes by which `hazard.py` tells who
is to leave: these say when somebody comes back, and of most of what is new they know nothing.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Sequence
from math import isfinite

from kvstore.model.block import BlockKey

LATE_S = 120.0
BELIEF = 50.0  # blocks' worth of belief that a class is like its prompts, and these like all
FIRST_RETURNS = 0.2  # of a block, as long as nothing is known
SEEN_MAX = 1 << 18  # blocks, and then the past counts half
PLACES_MIN = 1 << 12
PLACES_MAX = 1 << 20  # 8 MiB
OCTAVES = 16
CLASSES = OCTAVES**3
_CLASS_BITS = 12
_TICK_BITS = 32
_TICKS_PER_S = 8
_TICKS_MAX = (1 << _TICK_BITS) - 1
_TAG_SHIFT = _CLASS_BITS + _TICK_BITS
_CELL = struct.Struct("<Hff")

from_bytes = int.from_bytes


class Returns:
    """O(1) a block. A direct-mapped table, as in `ghosts.py`: newer blocks take older ones' places,
    and one in a million is taken for another."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._words = array("Q", bytes(8 * PLACES_MIN))
        self._new = 0  # blocks, ever
        self._seen = _Counts()
        self._returned = _Counts()

    def asked(self, prefix: Sequence[BlockKey]) -> None:
        """Note that a request asks for a prefix, before any of it is stored for it."""
        known = self._known(prefix)
        self._make_room(len(prefix) - known)
        prompts = _octave(known) * OCTAVES + _octave(len(prefix) - known)
        ticks = min(_TICKS_MAX, max(0, int(self._now() * _TICKS_PER_S)))
        before = ticks - int(LATE_S * _TICKS_PER_S)
        words, mask = self._words, len(self._words) - 1
        for depth, key in enumerate(prefix):
            number = from_bytes(key[-8:], "little")
            word, tag = words[number & mask], number >> _TAG_SHIFT
            each = prompts * OCTAVES + _octave(depth)
            waits = bool(word) and word >> _TAG_SHIFT == tag
            if waits and (word >> _CLASS_BITS & _TICKS_MAX) > before:
                each = word & (CLASSES - 1)
            else:
                self._seen.count(each)
                if waits:
                    self._returned.count(word & (CLASSES - 1))
            words[number & mask] = tag << _TAG_SHIFT | ticks << _CLASS_BITS | each
        if self._seen.all > SEEN_MAX:
            self._seen.halve()
            self._returned.halve()

    def class_of(self, key: BlockKey, parent: BlockKey | None) -> int:
        """Return the class of a block, or else that of its parent: answers come after their prompt.
        CLASSES: neither is known."""
        found = self._find(key)
        if found is None and parent is not None:
            found = self._find(parent)
        return CLASSES if found is None else found

    def expected(self, number: int) -> float:
        """Return how many late uses a block of a class is expected to have."""
        seen, returned = self._seen, self._returned
        expected = (returned.all + BELIEF * FIRST_RETURNS) / (seen.all + BELIEF)
        if number == CLASSES:
            return expected
        prompts = number // OCTAVES
        expected = (returned.of_prompts[prompts] + BELIEF * expected) / (
            seen.of_prompts[prompts] + BELIEF
        )
        return (returned.of[number] + BELIEF * expected) / (seen.of[number] + BELIEF)

    def _known(self, prefix: Sequence[BlockKey]) -> int:
        """Return how many blocks come before the end of what was asked for before."""
        for at in range(len(prefix), 0, -1):
            if self._find(prefix[at - 1]) is not None:
                return at
        return 0

    def _find(self, key: BlockKey) -> int | None:
        number = from_bytes(key[-8:], "little")
        word = self._words[number & (len(self._words) - 1)]
        if not word or word >> _TAG_SHIFT != number >> _TAG_SHIFT:
            return None
        return word & (CLASSES - 1)

    def _make_room(self, blocks: int) -> None:
        self._new += blocks
        while 2 * self._new > len(self._words) < PLACES_MAX:
            self._words += self._words  # a place's low bits stay: each word is in both halves

    def save(self) -> bytes:
        """Return what was learned, for `load`: at most 40 KiB."""
        cells = enumerate(zip(self._seen.of, self._returned.of, strict=True))
        return b"".join(_CELL.pack(each, *counts) for each, counts in cells if any(counts))

    def load(self, saved: bytes) -> None:
        """Take what another life has learned; what cannot be read is ignored."""
        if len(saved) % _CELL.size:
            return
        cells = list(_CELL.iter_unpack(saved))
        if all(
            each < CLASSES and isfinite(seen + returned) and min(seen, returned) >= 0
            for each, seen, returned in cells
        ):
            for each, seen, returned in cells:
                self._seen.count(each, seen)
                self._returned.count(each, returned)


class _Counts:
    """Blocks by class, by prompt at any depth, and all."""

    def __init__(self) -> None:
        self.of = [0.0] * CLASSES
        self.of_prompts = [0.0] * OCTAVES**2
        self.all = 0.0

    def count(self, each: int, blocks: float = 1.0) -> None:
        self.of[each] += blocks
        self.of_prompts[each // OCTAVES] += blocks
        self.all += blocks

    def halve(self) -> None:
        self.of = [count / 2 for count in self.of]
        self.of_prompts = [count / 2 for count in self.of_prompts]
        self.all /= 2


def _octave(number: int) -> int:
    return min(OCTAVES - 1, number.bit_length())
