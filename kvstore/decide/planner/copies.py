"""Copies of what another host has: written to files only when they are used here a second time.

Else copies of copies would fill the disks of a fleet, and wear them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstore.model.block import BlockKey


class Copies:
    """The blocks in the arena that came from another host and were used once at most. Bounded by
    the blocks there."""

    def __init__(self) -> None:
        self._used: dict[BlockKey, bool] = {}

    def __len__(self) -> int:
        return len(self._used)

    def __contains__(self, key: object) -> bool:
        return key in self._used

    def came(self, key: BlockKey) -> None:
        """Note a block that was just brought."""
        self._used[key] = False

    def left(self, key: BlockKey) -> None:
        """Forget a block that is not in the arena any more."""
        self._used.pop(key, None)

    def use(
        self, prefix: Sequence[BlockKey], is_here: Callable[[BlockKey], object]
    ) -> tuple[Sequence[BlockKey], bool]:
        """Note that a prefix was used, as far as `is_here` says of each block: what lies behind a
        gap is asked for and not used. Returns the start of it that is of this host, or is from now
        on, and whether some of it was a copy until now."""
        if not self._used:
            return prefix, False
        first, again = len(prefix), False
        for i, key in enumerate(prefix):
            if not is_here(key):
                break
            was_used = self._used.get(key)
            if was_used is None:
                continue
            if not was_used:
                self._used[key] = True
                first = min(first, i)
            elif first == len(prefix):  # else it is written with the copy before it, not sooner
                del self._used[key]
                again = True
        return prefix[:first], again
