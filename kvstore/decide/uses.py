"""How often prefixes were used, and when last: counted where each use ended, not block by block.

A request that is served n blocks has used all of them, so one count at the last of them says it for
all: what a block was used is the sum over what is behind it. The block may leave before others of
its prefix do. So a few blocks before it are remembered with it, further and further apart, and the
nearest one that is still stored has the count then. Memory is bounded: of places that were not used
for long, the count moves to the start of their prefix.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvstore.model.block import BlockKey

ENDS_MAX = 1 << 14
STARTS_MAX = 1 << 12
NAME_NBYTES = 8  # of a key: it is a hash


class Use(NamedTuple):
    """hits: requests that were served up to here. at: of the last use, on the clock of `Uses`.
    before: names of blocks before it, the nearest first, the start of the prefix last."""

    hits: int
    at: float
    before: tuple[bytes, ...]


class Uses:
    """The last places to which prefixes were used. now: their clock."""

    def __init__(
        self,
        now: Callable[[], float],
        *,
        ends_max: int = ENDS_MAX,
        starts_max: int = STARTS_MAX,
    ) -> None:
        self._now = now
        self._ends_max = ends_max
        self._starts_max = starts_max
        self._ends: OrderedDict[bytes, Use] = OrderedDict()  # by name, those used last at the end
        self._starts: OrderedDict[bytes, Use] = OrderedDict()

    def served(self, prefix: Sequence[BlockKey]) -> None:
        """Note that a request was served these blocks, from the start of a prefix on."""
        if prefix:
            self._note(prefix, 1)

    def stored(self, keys: Sequence[BlockKey], parent: BlockKey | None) -> None:
        """Note that consecutive blocks after `parent` were put."""
        if keys:
            self._note(keys if parent is None else (parent, *keys), 0)

    def all(self) -> list[tuple[bytes, Use]]:
        """Return all there are, by the name of the block where they ended."""
        return [*self._starts.items(), *self._ends.items()]

    def _note(self, prefix: Sequence[BlockKey], hits: int) -> None:
        name = prefix[-1][:NAME_NBYTES]
        known = self._ends.pop(name, None)
        if known is not None:
            hits += known.hits
        self._ends[name] = Use(hits, self._now(), _before(prefix))
        if len(self._ends) > self._ends_max:
            self._fold(*self._ends.popitem(last=False))

    def _fold(self, name: bytes, use: Use) -> None:
        start = use.before[-1] if use.before else name
        known = self._starts.pop(start, None)
        hits, at = use.hits, use.at
        if known is not None:
            hits, at = hits + known.hits, max(at, known.at)
        self._starts[start] = Use(hits, at, ())
        if len(self._starts) > self._starts_max:
            self._starts.popitem(last=False)


def _before(prefix: Sequence[BlockKey]) -> tuple[bytes, ...]:
    """Return the names of blocks before the last: 1, 2, 4 and so on before it, and the first."""
    last, back = len(prefix) - 1, 1
    names = []
    while back < last:
        names.append(prefix[last - back][:NAME_NBYTES])
        back *= 2
    if last:
        names.append(prefix[0][:NAME_NBYTES])
    return tuple(names)
