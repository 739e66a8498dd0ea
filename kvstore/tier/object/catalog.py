"""Caches of the bucket's listings and footers, both bounded. Pure.

Objects in clear never change, so a footer is valid until its object is gone. An encrypted object
of which something was deleted may be stored again, with another key: its footer is valid until a
listing has another time for it. So is the note that an object is corrupt, or that some of its
records are wrong. A listing is valid for
`believed_s`. The absence of objects, or of longer ones, is valid for ABSENT_S at most: another
daemon's new object may be missed for so long. Objects that this daemon writes, or finds to be gone,
are entered at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from typing import NamedTuple, TypeAlias

from kvstore.model.block import BlockKey, NamespaceId, Part
from kvstore.tier.object.layout import Run
from kvstore.tier.object.names import RunName

ABSENT_S = 5.0  # a prefix that is looked up repeatedly costs one request in this time
DIRECTORIES_MAX = 1 << 16
RECORDS_MAX = 1 << 17  # about 300 bytes each
UNKNOWN_TIME = 0.0  # of an object: it counts as old
Directory: TypeAlias = tuple[NamespaceId, BlockKey]
Record: TypeAlias = tuple[Part, BlockKey]  # of an object


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


class _Footer(NamedTuple):
    """run: None if it is corrupt. modified: of the object when it was read. wrong: records whose
    bytes were not what was stored."""

    run: Run | None
    modified: float
    wrong: frozenset[Record] = frozenset()

    @property
    def records(self) -> int:
        return self.run.records if self.run is not None else 1

    def is_of(self, entry: Entry) -> bool:
        """Say whether it is the footer of an object as it was listed."""
        unchanging = self.run is not None and self.run.key is None and not self.wrong
        return unchanging or self.modified == entry.modified


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
        self._footers: OrderedDict[RunName, _Footer] = OrderedDict()

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
        listing = self._listings[directory] = _Listing(listed_at, tuple(entries))
        for entry in listing.entries:
            footer = self._footers.get(entry.name)
            if footer is not None and not footer.is_of(entry):
                self._drop(entry.name)
        self._listings.move_to_end(directory)
        while len(self._listings) > self._directories_max:
            self._listings.popitem(last=False)

    def entry(self, name: RunName) -> Entry | None:
        """Return an object that is known to be there."""
        entries = self.listing((name.namespace_id, name.first)) or ()
        return next((entry for entry in entries if entry.name == name), None)

    def has_read(self, name: RunName) -> bool:
        """Say whether the footer was read, whether or not it is good."""
        return name in self._footers

    def run(self, name: RunName) -> Run | None:
        """Return the run in an object; None if its footer was not read, or is corrupt."""
        found = self._footers.get(name)
        if found is None or found.run is None:
            return None
        self._footers.move_to_end(name)
        return found.run

    def read(self, entry: Entry, run: Run | None) -> None:
        """Note the footer of an object as it was listed; None: it is corrupt and need not be read
        again."""
        self._drop(entry.name)
        footer = self._footers[entry.name] = _Footer(run, entry.modified)
        self._records += footer.records
        while self._records > self._records_max and len(self._footers) > 1:
            self._drop(next(iter(self._footers)))

    def spoil(self, name: RunName, records: Iterable[Record]) -> None:
        """Note that records of an object are not what was stored, until it is stored anew."""
        footer = self._footers.get(name)
        if footer is not None and footer.run is not None:
            entry = self.entry(name)
            modified = footer.modified if entry is None else entry.modified
            self._footers[name] = _Footer(footer.run, modified, footer.wrong.union(records))

    def wrong(self, name: RunName, modified: float | None = None) -> Set[Record]:
        """Return the records of an object that are known to be wrong. modified: unless it was
        stored anew then; of one that this daemon wrote, the time may not be known."""
        footer = self._footers.get(name)
        if footer is None:
            return frozenset()
        is_anew = modified is not None and footer.modified not in (UNKNOWN_TIME, modified)
        return frozenset() if is_anew else footer.wrong

    def written(self, run: Run, modified: float) -> None:
        """Note an object that this daemon has written."""
        entry = Entry(run.name, run.nbytes, modified)
        self._change(run.name, [entry])
        self.read(entry, run)

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
        known = [footer.run for footer in self._footers.values() if footer.run is not None]
        return [run for run in known if run.holds(namespace_id, wanted)]

    def _drop(self, name: RunName) -> None:
        if name in self._footers:
            self._records -= self._footers.pop(name).records
