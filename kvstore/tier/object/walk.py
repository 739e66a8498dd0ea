"""Find a prefix, run after run: what to request next, and what was found. Pure.

The walk begins at a block where a run may begin. It takes an object that begins there and goes on
after the last block that object and prefix share, where the next object begins. So a run costs one
listing and one footer, and a prefix that was never stored costs one listing. Once an object was
found, the next ones are requested ahead, more each time: most objects begin at multiples of
`run_blocks`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from kvstore.format.frame import FrameHeader
from kvstore.model.block import BlockKey, NamespaceId, Part
from kvstore.tier.object.catalog import Catalog, Directory, Entry
from kvstore.tier.object.layout import OBJECT_BLOCKS_MAX, ObjectExtent, Run
from kvstore.tier.object.names import Names
from kvstore.tier.object.tombstones import Tombstones

CANDIDATES_MAX = 4  # objects that begin with the same block and are read at most
AHEAD_MIN, AHEAD_MAX = 2, 16


class FoundFrame(NamedTuple):
    """A frame with blocks of the prefix. live: their positions in it, ascending. The file tier has
    `kvstore.tier.file.FrameRecord` for this.
    """

    location: ObjectExtent
    header: FrameHeader
    live: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """blocks: how many of the keys, from the first on, have any record. complete: the bucket has no
    more; otherwise the deadline or an error ended the walk."""

    blocks: int
    frames: tuple[FoundFrame, ...]
    complete: bool


class Wanted(NamedTuple):
    """Requests that a walk needs to go on, and (ahead) those it will probably need then."""

    now: tuple[Directory | Entry, ...] = ()
    ahead: tuple[Directory | Entry, ...] = ()


class Walk:
    """One lookup. Call `step` until it has `ended`. position: the block it has reached."""

    def __init__(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        run_blocks: int,
        catalog: Catalog,
        tombstones: Tombstones,
        *,
        names: Names | None = None,
        copies: bool = False,
    ) -> None:
        """copies: take a record from every object that has it, not from the first alone."""
        self._copies = copies
        self._names = names or Names()
        self._named_id = self._names.namespace(namespace_id) if keys else namespace_id
        self._keys = keys
        self._at: dict[BlockKey, int] = {}  # by the key in names
        self._ranked = 0  # of the keys, how many are in it
        self._run_blocks = run_blocks
        self._catalog = catalog
        self._tombstones = tombstones
        self.ended = not keys
        self.position = self._before = 0
        self._ahead = AHEAD_MIN
        self._frames: list[FoundFrame] = []
        self._seen: set[tuple[Part, BlockKey]] = set()

    def found(self, *, complete: bool) -> Found:
        """Return what the walk has found so far."""
        return Found(self.position, tuple(self._frames), complete)

    def step(self) -> Wanted:
        """Go past one run, if it is known; otherwise return the requests needed to go on."""
        now = self._unknown(self.position)
        if now:
            ahead = chain.from_iterable(map(self._unknown, self._boundaries(now)))
            return Wanted(now, tuple(ahead))
        reached = self._take(self.position)
        self.ended = reached in (self.position, len(self._keys))
        if reached == self.position:
            self._doubt()
        self._before = self.position
        self.position, self._ahead = reached, min(AHEAD_MAX, 2 * self._ahead)
        return Wanted()

    def _doubt(self) -> None:
        """Note the listings that may change before the next walk: the one of this position, and
        that of a short run before it, which its writer stores again once it has grown."""
        at = [self.position]
        if self.position % self._run_blocks:
            at.append(self._before)
        for position in at:
            self._catalog.ended_walk(self._directory(position))

    def _directory(self, position: int) -> Directory:
        return self._named_id, self._names.key(self._keys[position])

    def _unknown(self, position: int) -> tuple[Directory | Entry, ...]:
        directory = self._directory(position)
        entries = self._catalog.listing(directory)
        if entries is None:
            return (directory,)
        candidates = self._candidates(entries, position)
        return tuple(e for e in candidates if not self._catalog.has_read(e.name))

    def _boundaries(self, now: tuple[Directory | Entry, ...]) -> range:
        """Return the next positions at which runs usually begin; none, until something was
        found."""
        if not self.position and not isinstance(now[0], Entry):
            return range(0)
        first = (self.position // self._run_blocks + 1) * self._run_blocks
        end = min(len(self._keys), first + self._ahead * self._run_blocks)
        return range(first, end, self._run_blocks)

    def _candidates(self, entries: Sequence[Entry], position: int) -> list[Entry]:
        """Return the objects worth reading: those whose last key is in the prefix, the longest
        first, then the newest."""
        if len(entries) < 2:
            return list(entries)
        end = min(len(self._keys), position + OBJECT_BLOCKS_MAX)
        for index in range(self._ranked, end):
            self._at[self._names.key(self._keys[index])] = index
        self._ranked = max(self._ranked, end)
        ranked = sorted(
            entries, key=lambda entry: (self._at.get(entry.name.last, -1), entry.modified)
        )
        return ranked[: -CANDIDATES_MAX - 1 : -1]

    def _take(self, position: int) -> int:
        """Take the frames of the runs that begin at `position`; return where they end."""
        reached = position
        entries = self._catalog.listing(self._directory(position)) or ()
        for entry in self._candidates(entries, position):
            run = self._catalog.run(entry.name)
            if run is not None:
                shared = self._shared(run, position)
                self._frames += self._live_frames(run, shared, entry.modified)
                reached = max(reached, position + shared)
        return reached

    def _shared(self, run: Run, position: int) -> int:
        ours = self._keys[position : position + len(run.keys)]
        pairs = zip(run.keys, ours, strict=False)
        differ = (index for index, (theirs, our) in enumerate(pairs) if theirs != our)
        return next(differ, len(ours))

    def _live_frames(self, run: Run, shared: int, modified: float) -> Iterator[FoundFrame]:
        may_be_dead = self._tombstones.may_kill(self._named_id, modified)
        wrong = self._catalog.wrong(run.name)
        for frame in run.frames:
            header = frame.header
            live = []
            for position, block in enumerate(header.blocks):
                if header.first_block + position - run.first_block >= shared:
                    break
                record = (header.part, block.key)
                dead = may_be_dead and self._tombstones.kills(self._named_id, block.key, modified)
                useless = dead or record in wrong
                if not useless and (self._copies or record not in self._seen):
                    self._seen.add(record)
                    live.append(position)
            if live:
                yield FoundFrame(run.extent(frame), header, tuple(live))
