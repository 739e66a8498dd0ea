"""Caches of the bucket's listings and footers, both bounded. Pure.

Objects never change, so a footer is valid until its object is gone. A listing is valid for
`believed_s`. The absence of objects, or of longer ones, is valid for ABSENT_S at most: another
daemon's new object may be missed for so long. Objects that this daemon writes, or finds to be gone,
are entered at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple, TypeAlias

from kvstore.model.block import BlockKey, NamespaceId
from kvstore.tier.object.layout import Run
from kvstore.tier.object.names import RunName

ABSENT_S = 5.0  # a prefix that is looked up repeatedly costs one request in this time
DIRECTORIES_MAX = 1 << 16
RECORDS_MAX = 1 << 17  # about 300 bytes each
Directory: TypeAlias = tuple[NamespaceId, BlockKey]


class Entry(NamedTuple):
    """An object in a listing."""

    name: RunName
    nbytes: int
    modified: float

    @property
    def directory(self) -> Directory:
        return self.name.namespace_id, self.name.first


class _Listing(NamedTuple):
    """listed_at: when the bucket answered. ended_walk: a lookup wanted more than it has."""

    listed_at: float
    entries: tuple[Entry, ...] = ()
    ended_walk: bool = False


class Catalog:
    """Both caches. None always means that the bucket has to be asked."""

    def __init__(
        self,
        now: Callable[[], float],
        believed_s: float,
        *,
        directories_max: int = DIRECTORIES_MAX,
        records_max: int = RECORDS_MAX,
    ) -> None:
        self._now = now
        self._believed_s = believed_s
        self._directories_max = directories_max
        self._records_max = records_max
        self._records = 0
        self._listings: OrderedDict[Directory, _Listing] = OrderedDict()
        self._runs: OrderedDict[RunName, Run | None] = OrderedDict()

    def listing(self, directory: Directory) -> tuple[Entry, ...] | None:
        """Return the objects that begin with a block; () if there are none."""
        found = self._listings.get(directory)
        if found is None:
            return None
        says_no_more = found.ended_walk or not found.entries
        believed_s = min(self._believed_s, ABSENT_S) if says_no_more else self._believed_s
        if found.listed_at + believed_s <= self._now():
            return None
        self._listings.move_to_end(directory)
        return found.entries

    def ended_walk(self, directory: Directory) -> None:
        """Note that a lookup wanted more than a listing has."""
        found = self._listings.get(directory)
        if found is not None:
            self._listings[directory] = found._replace(ended_walk=True)

    def listed(
        self, directory: Directory, entries: Iterable[Entry], listed_at: float | None = None
    ) -> None:
        """Note what the bucket answered just now."""
        if listed_at is None:
            listed_at = self._now()
        self._listings[directory] = _Listing(listed_at, tuple(entries))
        self._listings.move_to_end(directory)
        while len(self._listings) > self._directories_max:
            self._listings.popitem(last=False)

    def has(self, name: RunName) -> bool:
        """Say whether an object is known to be there."""
        entries = self.listing((name.namespace_id, name.first)) or ()
        return any(entry.name == name for entry in entries)

    def has_read(self, name: RunName) -> bool:
        """Say whether the footer was read, whether or not it is good."""
        return name in self._runs

    def run(self, name: RunName) -> Run | None:
        """Return the run in an object; None if its footer was not read, or is corrupt."""
        found = self._runs.get(name)
        if found is not None:
            self._runs.move_to_end(name)
        return found

    def read(self, name: RunName, run: Run | None) -> None:
        """Note a footer; None: it is corrupt and need not be read again."""
        self._drop(name)
        self._runs[name] = run
        self._records += run.records if run else 1
        while self._records > self._records_max and len(self._runs) > 1:
            self._drop(next(iter(self._runs)))

    def written(self, run: Run, modified: float) -> None:
        """Note an object that this daemon has written."""
        self._change(run.name, [Entry(run.name, run.nbytes, modified)])
        self.read(run.name, run)

    def gone(self, name: RunName) -> None:
        """Note that an object does not exist any more."""
        self._drop(name)
        self._change(name, [])

    def _change(self, name: RunName, entries: Sequence[Entry]) -> None:
        """Set the `entries` of a listing for `name`. It expires when it would have before."""
        directory = (name.namespace_id, name.first)
        others = self.listing(directory)
        if others is not None or entries:
            listed_at = self._listings[directory].listed_at if others is not None else None
            left = [entry for entry in others or () if entry.name != name]
            self.listed(directory, [*left, *entries], listed_at)

    def holding(self, namespace_id: NamespaceId, keys: Collection[BlockKey] | None) -> list[Run]:
        """Return the known objects with any of `keys`, or (None) of the namespace."""
        wanted = None if keys is None else set(keys)
        known = [run for run in self._runs.values() if run is not None]
        return [run for run in known if run.holds(namespace_id, wanted)]

    def _drop(self, name: RunName) -> None:
        if name in self._runs:
            run = self._runs.pop(name)
            self._records -= run.records if run else 1
