"""All the sources of a node, in the order in which they are asked: hosts of the fleet, then the
bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvstore.decide.ask import Ask
from kvstore.model.block import Match
from kvstore.move.fetch import Fetch
from kvstore.move.load_race import Ended
from kvstore.move.source import Source


@dataclass(slots=True)
class Brought:
    """What sources added to a hit. ended: how the last load went. blocks: by name of the source,
    how much longer the hit is by it."""

    ended: Ended = Ended.DONE
    blocks: dict[str, int] = field(default_factory=dict)


class Peers(Protocol):
    """The other hosts of the fleet."""

    def holders(self, ask: Ask, match: Match) -> Sequence[Source]:
        """Return those that seem to have more of a prefix than `match`, the best first."""


class Sources:
    """match: returns how long the prefix of an ask is now."""

    def __init__(
        self,
        fetch: Fetch,
        match: Callable[[Ask], Match],
        *,
        bucket: Source | None,
        peers: Peers | None,
    ) -> None:
        self._fetch = fetch
        self._match = match
        self._bucket = bucket
        self._peers = peers

    @property
    def any(self) -> bool:
        """Whether there are some."""
        return self._bucket is not None or self._peers is not None

    async def promote(self, ask: Ask, match: Match, deadline: float) -> Brought:
        """Make the hit of a prefix longer than `match`, as far as a source has more of it.

        A bucket costs money: it is asked for what no host has.
        """
        brought = Brought()
        holders = self._peers.holders(ask, match) if self._peers is not None else ()
        for source in (*holders, self._bucket):
            if source is None or match.hit_blocks == len(ask.keys):
                continue
            brought.ended = await self._fetch.promote(source, ask, match, deadline)
            if brought.ended is Ended.LATE:
                break
            longer = self._match(ask)
            more = longer.hit_blocks - max(ask.skip_blocks, match.hit_blocks)
            if more > 0:
                brought.blocks[source.name] = more
                match = longer
        return brought
