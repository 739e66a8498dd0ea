"""Which of those that seem to have a prefix are asked."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

ASKED_MAX = 3  # hosts that are asked about one prefix, and that may give parts of it
LOOKED_AT_MAX = 16  # holders among which to choose

T = TypeVar("T")


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
