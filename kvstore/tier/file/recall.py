"""The runs that a start found on disk, for the caller's index. Each run is returned once."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

from kvstore.format.frame import FrameHeader
from kvstore.model.block import BlockKey, NamespaceId
from kvstore.tier.file.found import Found, FrameRecord, Taken
from kvstore.tier.file.live import live_positions
from kvstore.tier.file.space import Space
from kvstore.tier.file.upkeep import Upkeep


class Recall:
    """The recalled runs are the caller's to index, and to free.

    A run of which nothing is live is not returned: it is freed. Call all methods on the event loop.
    """

    def __init__(self, space: Space, upkeep: Upkeep) -> None:
        self._space = space
        self._upkeep = upkeep
        self._found = Found()

    def begin(self, found: Found) -> None:
        """Take what a start has found."""
        self._found = found

    @property
    def unrecalled_runs(self) -> int:
        """How many of the runs found are not recalled yet."""
        return len(self._found)

    @property
    def oldest_sequence(self) -> int:
        """The sequence of the oldest run left. There must be one."""
        return self._found.oldest_sequence

    @property
    def found_namespaces(self) -> Set[NamespaceId]:
        """The namespaces of all runs found, recalled or not."""
        return self._found.namespaces

    def take(self, keys: Sequence[BlockKey]) -> list[FrameRecord]:
        """Return the runs left that hold any of `keys`, oldest first.

        Costs next to nothing when all are recalled.
        """
        return self._taken(self._found.take(keys))

    def take_oldest(self, count: int) -> list[FrameRecord]:
        """Return up to `count` runs by age, maybe none though some are left."""
        return self._taken(self._found.take_oldest(count))

    def take_all(self) -> list[FrameRecord]:
        """Return all runs found, by age, and free those with nothing live.

        For callers without an index.

        live: positions that no newer run holds either.
        """
        found: list[FrameRecord] = []
        while self.unrecalled_runs:
            found += self.take_oldest(self.unrecalled_runs)
        records, dead = [], []
        newest = live_positions([record.header for record in found])
        for record, positions in zip(found, newest, strict=True):
            live = tuple(position for position in positions if position in record.live)
            if live:
                records.append(replace(record, live=live))
            else:
                dead.append(record.location)
        self._taken(Taken([], dead))
        return records

    def kill(self, tombstones: Sequence[FrameHeader]) -> None:
        """Let tombstones that will be written kill the runs left, from now on."""
        for tombstone in tombstones:
            self._found.note(tombstone)

    def _taken(self, taken: Taken) -> list[FrameRecord]:
        for extent in taken.dead:
            self._space.free(extent)
        if taken.dead:
            self._upkeep.start()
        return taken.records
