"""Which of those that seem to have a prefix are asked, and which of those that have it gives it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

ASKED_MAX = 3  # hosts that are asked about one prefix, and that may give parts of it
LOOKED_AT_MAX = 16  # holders among which to choose

T = TypeVar("T")


class Offer(NamedTuple):
    """What one peer said that it has. blocks: of the prefix. expected_s: what reading them takes,
    by what such reads took; 0: nothing is known, inf: reads that were given up are under way, or
    have failed lately."""

    blocks: int
    is_near: bool = True
    expected_s: float = 0.0


def choose(
    found: Sequence[tuple[T, int]],
    *,
    is_near: Callable[[T], bool] = lambda peer: True,
    shuffle: Callable[[list[tuple[T, int]]], None] = random.shuffle,
) -> list[T]:
    """Return the peers to ask, of those found and how many heads of a prefix each has.

    The longest first. Of those within one head of it any may be first, so that not everybody asks
    the same one; near ones come before others.
    """
    there = list(found)
    most = max((heads for _, heads in there), default=0)
    shuffle(there)
    there.sort(key=lambda each: (max(0, most - 1 - each[1]), not is_near(each[0])))
    return [peer for peer, _ in there[:ASKED_MAX]]


def best_first(
    offers: Sequence[tuple[T, Offer]],
    *,
    step: int,
    shuffle: Callable[[list[tuple[T, Offer]]], None] = random.shuffle,
) -> list[T]:
    """Return the peers in the order in which to read from them: the next one gives what those
    before it did not.

    The longest first. Of those that have less than `step` blocks less, near ones come before
    others; of these, those that are faster by about a factor of two; of these, any may be first.
    """
    there = list(offers)
    most = max((offer.blocks for _, offer in there), default=0)
    shuffle(there)

    def rank(each: tuple[T, Offer]) -> tuple[int, bool, float]:
        _, offer = each
        return (most - offer.blocks) // step, not offer.is_near, _magnitude(offer.expected_s)

    return [peer for peer, _ in sorted(there, key=rank)]


def _magnitude(seconds: float) -> float:
    """Return the power of two below: a difference of a few percent is chance, and would send
    everybody to the same one."""
    if not seconds:
        return -math.inf
    return math.floor(math.log2(seconds)) if seconds < math.inf else math.inf
