"""How long a prefix of SGLang's may be, given which pages of which pools are stored.

A pool says by its policy which of its pages a prefix needs: all of them, or those of its last
window. A prefix whose length suits one pool need not suit another: so all lengths are told.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvstore.client.lookup_lease import leading


class Needs(NamedTuple):
    """What a prefix needs of one pool. window: of its last so many pages only; 0: all."""

    window: int
    present: Sequence[bool]


def lengths(needs: Needs, pages: int) -> list[int]:
    """Return the lengths, up to `pages`, of the prefixes that one pool can serve."""
    if not needs.window:
        return list(range(1, min(pages, leading(needs.present)) + 1))
    found = []
    run = 0
    for length in range(1, pages + 1):
        run = run + 1 if needs.present[length - 1] else 0
        if run >= min(needs.window, length):
            found.append(length)
    return found
