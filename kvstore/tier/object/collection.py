"""Which objects are deleted for room or age, from one listing of the bucket. Pure.

Every daemon may collect at any time, also together with others. All delete the oldest objects
first, by the store's own times and in one order. So two daemons that count at once choose the same
victims, and deleting an object twice does no harm. Objects younger than the grace period are never
deleted: they may be another daemon's newest upload.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from kvstore.model.block import NamespaceId
from kvstore.tier.object.catalog import Entry
from kvstore.tier.object.names import Listed, Names, TombstoneName

LOW_WATER = 0.9  # over the cap, collect down to here, so that the next objects have room
VICTIMS_MAX = 10_000
SUSPECTS_MAX = 10_000  # looked at in one count; each costs a request
NAMESPACES_MAX = 65_536


class Victim(NamedTuple):
    entry: Entry
    reason: str  # age or capacity


class Sweep(NamedTuple):
    """One look at every object that may hold deleted blocks: of a large bucket in several counts,
    in the order of names.

    ripe: the tombstones that have nothing left to kill after it. after: the name of the last object
    that was looked at.
    """

    ripe: tuple[TombstoneName, ...]
    after: str = ""


class Survey:
    """A listing of the whole bucket, summed up page by page in bounded memory.

    is_suspect: says which objects may hold deleted blocks. after: those with names up to this one
    were looked at. suspects: the first SUSPECTS_MAX of the others, by their names.
    """

    def __init__(
        self,
        is_suspect: Callable[[Entry], bool] = lambda _: False,
        names: Names | None = None,
        *,
        after: str = "",
    ) -> None:
        self._names = names or Names()
        self._after = after
        self.nbytes = 0
        self.objects = 0
        self.suspects: list[Entry] = []
        self._all_suspects = True
        # Of runs, up to NAMESPACES_MAX, by their ids in names: one object of each.
        self.namespaces: dict[NamespaceId, Entry] = {}
        self.tombstones: dict[TombstoneName, Listed] = {}
        self._is_suspect = is_suspect
        self._oldest: list[tuple[float, str, Entry]] = []  # ascending: by age, then by name

    def add(self, page: Iterable[Listed]) -> None:
        """Count a page. Objects whose names are not ours are neither touched nor counted."""
        entries = []
        for listed in page:
            name = self._names.parse_run(listed.name)
            tombstone = self._names.parse_tombstone(listed.name)
            if name is not None:
                entries.append(Entry(name, listed.nbytes, listed.modified))
                self._keep_if_old(listed, entries[-1])
                if len(self.namespaces) < NAMESPACES_MAX:
                    self.namespaces.setdefault(name.namespace_id, entries[-1])
            elif tombstone is not None:
                self.tombstones[tombstone] = listed
            elif listed.name != self._names.clock:
                continue
            self.nbytes += listed.nbytes
        self.objects += len(entries)
        for entry in filter(self._is_suspect, entries):
            if _name(entry) > self._after:
                self._suspect(entry)

    def swept(self, sweep: Sweep) -> Sweep | None:
        """Return what is left of a sweep once all suspects were looked at; None: it is over."""
        return None if self._all_suspects else sweep._replace(after=_name(self.suspects[-1]))

    def victims(
        self,
        now: float,
        *,
        capacity_bytes: int,
        max_age_s: float,
        grace_s: float,
        room_nbytes: int = 0,
    ) -> Iterator[Victim]:
        """Yield the objects to delete. now: on the store's clock. max_age_s: 0 is no limit.
        room_nbytes: of refused writes, which should fit afterwards."""
        left = target = self.nbytes
        if left + room_nbytes > capacity_bytes:
            target = min(int(capacity_bytes * LOW_WATER), capacity_bytes - room_nbytes)
        for _, _, entry in self._oldest:
            age_s = now - entry.modified
            too_old = bool(max_age_s) and age_s > max_age_s
            if age_s < grace_s or not (too_old or left > target):
                return
            left -= entry.nbytes
            yield Victim(entry, "age" if too_old else "capacity")

    def _suspect(self, entry: Entry) -> None:
        if len(self.suspects) == SUSPECTS_MAX:
            self._all_suspects = False
            if _name(entry) > _name(self.suspects[-1]):
                return
            self.suspects.pop()
        insort(self.suspects, entry, key=_name)

    def _keep_if_old(self, listed: Listed, entry: Entry) -> None:
        aged = (listed.modified, listed.name, entry)
        if len(self._oldest) < VICTIMS_MAX or aged < self._oldest[-1]:
            insort(self._oldest, aged)
            del self._oldest[VICTIMS_MAX:]


def _name(entry: Entry) -> str:
    return str(entry.name)
