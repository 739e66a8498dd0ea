"""What routers have been told, and what they are to be told next.

Owned by the publisher's thread. A block is announced when three things are known: its tokens, which
its engine has sent; that it is somewhere, which the event loop has seen; and that its parent is
announced, because routers drop what follows nothing. What is taken from here counts as told.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.decide.changed import IN_DRAM, IN_FILES
from kvstore.events.order import Line, chains, in_line, tops
from kvstore.events.table import Hashes, Rows, Table, going_up, hashes_of, joined
from kvstore.events.wire import CPU, STORAGE, Event, removed, stored
from kvstore.model.block import KEY_NBYTES, NamespaceId

MEDIUMS = ((IN_DRAM, CPU), (IN_FILES, STORAGE))
BATCH_BLOCKS = 16_384
BATCH_TOKENS = 1 << 18  # 1.3 MB
SPACES_MAX = 1024
LABELS_MAX = 4096  # LoRA adapters of a namespace
FRESH_MAX = 1 << 16  # rows of what was reserved, and is not committed yet
HELD_MAX = 1 << 16  # blocks whose parent is not announced
GONE_MAX = 1 << 16  # blocks that left lately: who joins, or joins again, is told
TOKEN = np.dtype("<u4")


class Space:
    """A namespace. model: the name that routers know it by. gone: blocks that are to be taken back
    from whoever joins, unless they are there again."""

    def __init__(self, model: str, block_tokens: int) -> None:
        self.model = model
        self.table = Table(block_tokens)
        self.labels: list[str] = []
        self.dirty: list[Rows] = []
        self.held: dict[int, set[int]] = {}  # parent -> blocks that wait for it, with rows
        self.held_count = 0
        self.fresh: deque[Hashes] = deque()
        self.fresh_count = 0
        self.gone: deque[Hashes] = deque()
        self.gone_count = 0

    @property
    def batch_blocks(self) -> int:
        return max(1, min(BATCH_BLOCKS, BATCH_TOKENS // self.table.block_tokens))

    def label(self, name: str) -> int | None:
        """Return the number of an adapter's name; None: there are too many."""
        if name in self.labels:
            return self.labels.index(name)
        if len(self.labels) >= LABELS_MAX:
            return None
        self.labels.append(name)
        return len(self.labels) - 1

    def left(self, hashes: Hashes, most: int = GONE_MAX) -> None:
        """Keep in mind what left, of the last ones."""
        if not len(hashes):
            return
        self.gone.append(hashes)
        self.gone_count += len(hashes)
        while self.gone_count > most and len(self.gone) > 1:
            self.gone_count -= len(self.gone.popleft())


class Told(NamedTuple):
    """The tokens of consecutive blocks, as their engine sent them. keys: back to back. tokens: u32
    in the order of bytes of `TOKEN`. parent: of the first one, 0 if there is none."""

    keys: bytes
    tokens: bytes
    parent: int


class Step(NamedTuple):
    """Blocks that came to a medium, parents first, or left it. bit: of `MEDIUMS`."""

    space: Space
    hashes: Hashes
    bit: int
    came: bool


class Book:
    """All namespaces."""

    def __init__(self) -> None:
        self._spaces: dict[NamespaceId, Space] = {}
        self.dropped: Counter[str] = Counter()
        """Blocks that are not announced, by why: adapters (too many), uncommitted and parent
        (they waited for their commit, or for their parent, and too many came after them)."""

    @property
    def announced(self) -> int:
        """How many blocks have tokens here."""
        return sum(len(space.table) for space in self.spaces)

    @property
    def nbytes(self) -> int:
        return sum(space.table.nbytes for space in self.spaces)

    @property
    def spaces(self) -> Sequence[Space]:
        return list(self._spaces.values())

    @property
    def dirty(self) -> bool:
        """Whether there may be something to tell."""
        return any(space.dirty for space in self._spaces.values())

    def space(self, namespace_id: NamespaceId, model: str, block_tokens: int) -> Space | None:
        """Return a namespace, made if there is none; None: there are too many."""
        space = self._spaces.get(namespace_id)
        if space is not None:
            return space
        if len(self._spaces) >= SPACES_MAX:
            empty = next((i for i, each in self._spaces.items() if not len(each.table)), None)
            if empty is None:
                return None
            del self._spaces[empty]
        space = self._spaces[namespace_id] = Space(model, block_tokens)
        return space

    def know(self, space: Space, told: Sequence[Told], lora_name: str) -> NDArray[np.intp]:
        """Learn the tokens of blocks; returns which of all the blocks were not known."""
        table, label = space.table, space.label(lora_name)
        hashes = hashes_of(b"".join([each.keys for each in told]), KEY_NBYTES)
        new = _new(table, hashes)
        if label is None or not len(new):
            self.dropped["adapters"] += len(new)
            return new[:0]
        counts = np.array([len(each.keys) // KEY_NBYTES for each in told])
        begins = np.cumsum(counts) - counts
        parents = np.empty_like(hashes)
        parents[1:] = hashes[:-1]
        parents[begins] = np.array([each.parent for each in told], np.uint64)
        words = np.frombuffer(b"".join([each.tokens for each in told]), TOKEN)
        words = words.reshape(-1, table.block_tokens)
        if len(new) < len(hashes):
            hashes, parents, words = hashes[new], parents[new], words[new]
        table.add(hashes, parents, words, label)
        self._keep_fresh(space, hashes)
        return new

    def _keep_fresh(self, space: Space, hashes: Hashes) -> None:
        """Bound what was reserved and never committed."""
        space.fresh.append(hashes)
        space.fresh_count += len(hashes)
        while space.fresh_count > FRESH_MAX and len(space.fresh) > 1:
            old = space.fresh.popleft()
            space.fresh_count -= len(old)
            table = space.table
            rows = table.find(old)
            rows = rows[rows >= 0]
            rows = rows[(table.now[rows] == 0) & (table.told[rows] == 0)]
            self.dropped["uncommitted"] += len(rows)
            self._remove(space, rows)

    def changed(self, space: Space, hashes: Hashes, places: NDArray[np.uint8], found: bool) -> None:
        """Note where blocks are now, each named once. found: some of them may be what another life
        of this daemon announced, and nobody here can name their tokens."""
        table = space.table
        rows = table.find(hashes)
        known = rows >= 0
        if found:
            space.left(hashes[~known & (places > 0)], most=1 << 24)
        rows, places = rows[known], places[known]
        table.now[rows] = places
        table.fresh[rows[places > 0]] = 0
        if len(rows):
            space.dirty.append(rows)

    def take(self) -> list[Step]:
        """Return what is to be told next, a batch at most for each namespace: what comes before
        what leaves. It counts as told."""
        return [
            step for space in self._spaces.values() if space.dirty for step in self._tell(space)
        ]

    def _tell(self, space: Space) -> list[Step]:
        table = space.table
        rows = going_up(joined(space.dirty))
        space.dirty = [rows[space.batch_blocks :]] if len(rows) > space.batch_blocks else []
        rows = rows[: space.batch_blocks]
        now, told = table.now[rows], table.told[rows]
        came = self._come(space, rows[(now & ~told) != 0])
        left = self._leave(space, rows[(told & ~now) != 0])
        gone = rows[now == 0]
        self._remove(space, gone[(table.told[gone] == 0) & (table.fresh[gone] == 0)])
        return came + left

    def _come(self, space: Space, rows: Rows) -> list[Step]:
        """Tell that rows, which go up, are where they were not."""
        if not len(rows):
            return []
        table, line = space.table, in_line(space.table, rows)
        follows = self._follow(space, line)
        rows, above = line.rows, line.above
        if not follows.all():
            rows, above = rows[follows], above[follows]
        now, told = table.now[rows], table.told[rows]
        steps = _steps(space, rows, now & ~told, came=True)
        table.tell(rows, told | now, above)
        if space.held:
            self._release(space, table.hashes[rows[told == 0]])
        return steps

    def _leave(self, space: Space, rows: Rows) -> list[Step]:
        """Tell that rows are not any more where they were."""
        if not len(rows):
            return []
        table = space.table
        now, told = table.now[rows], table.told[rows]
        steps = _steps(space, rows, told & ~now, came=False)
        table.tell(rows, told & now)
        space.left(table.hashes[rows])
        return steps + self._take_back(space, rows[(told & now) == 0])

    def _take_back(self, space: Space, gone: Rows) -> list[Step]:
        """Take back what follows blocks that left, and wait for them: a prefix with a hole is no
        hit. The end of a prefix is evicted first, so there is seldom anything."""
        table = space.table
        gone = gone[table.children[gone] > 0]
        if not len(gone):
            return []
        rows = table.followers(gone)
        steps = _steps(space, rows, table.told[rows], came=False)
        table.tell(rows, np.zeros(len(rows), np.uint8))
        space.left(table.hashes[rows])
        self._hold(space, rows)
        return steps

    def _hold(self, space: Space, rows: Rows) -> None:
        """Look at rows again when their parent is told."""
        table = space.table
        parents, hashes = table.parents[rows].tolist(), table.hashes[rows].tolist()
        for parent, each in zip(parents, hashes, strict=True):
            waiting = space.held.get(parent, ())
            if each in waiting:
                continue
            if space.held_count >= HELD_MAX:
                self.dropped["parent"] += 1
                continue
            space.held.setdefault(parent, set()).add(each)
            space.held_count += 1

    def _remove(self, space: Space, rows: Rows) -> None:
        """Forget rows, and that they wait for their parents."""
        table, held = space.table, space.held
        if held:
            parents, hashes = table.parents[rows].tolist(), table.hashes[rows].tolist()
            for parent, each in zip(parents, hashes, strict=True):
                waiting = held.get(parent)
                if waiting is None or each not in waiting:
                    continue
                waiting.remove(each)
                space.held_count -= 1
                if not waiting:
                    del held[parent]
        table.remove(rows)

    def _follow(self, space: Space, line: Line) -> NDArray[np.bool_]:
        """Say which of the rows can be told: they, or what they follow, follow something that was.
        The others are held until their parent is told."""
        table, (rows, above, at) = space.table, line
        is_told = (table.told[above] != 0) & (above >= 0)
        may = is_told | (table.told[rows] != 0) | (table.parents[rows] == 0)
        if may[0] and (may | (at == np.arange(-1, len(at) - 1))).all():
            return np.ones(len(at), np.bool_)  # each other one follows the one before it
        follows: NDArray[np.bool_] = may[tops(np.where(may, -1, at))]
        self._hold(space, rows[~follows])
        return follows

    def _release(self, space: Space, parents: Hashes) -> None:
        """Look again at blocks whose parent was told just now, and at those that wait for these."""
        found, held = list[int](), space.held
        above: list[int] = parents.tolist()
        while above:
            above = [each for parent in above for each in held.pop(parent, ())]
            found += above
        if not found:
            return
        space.held_count -= len(found)
        rows = space.table.find(np.array(found, np.uint64))
        space.dirty.append(rows[rows >= 0])

    def whole(self, model: str | None, *, cleared: bool) -> Iterator[list[Step]]:
        """Yield all that was told of a model, or of all, in batches, parents first.

        cleared: the asker forgets everything before; else it is told what left lately as well.
        It may be read while things change: what has left meanwhile is left out by `events_of`.
        """
        for space in self.spaces:
            if model is not None and space.model != model:
                continue
            table = space.table
            if not cleared:
                for hashes in list(space.gone):
                    yield [Step(space, hashes, bit, False) for bit, _ in MEDIUMS]
            hashes = table.hashes[in_line(table, table.told_rows()).rows]
            for at in range(0, len(hashes), space.batch_blocks):
                part = hashes[at : at + space.batch_blocks]
                yield [Step(space, part, bit, True) for bit, _ in MEDIUMS]


def _new(table: Table, hashes: Hashes) -> NDArray[np.intp]:
    """Return which hashes are to be added, each once; of the others, note that they came again."""
    rows = table.find(hashes)
    new = np.flatnonzero(rows < 0)
    if len(new) < len(hashes):
        table.fresh[rows[rows >= 0]] = 1
    wanted = hashes[new]
    ordered = np.sort(wanted)
    if (ordered[1:] == ordered[:-1]).any():
        _, first = np.unique(wanted, return_index=True)
        new = new[np.sort(first)]
    return new if hashes.all() else new[hashes[new] != 0]  # 0 is no block's: it means no parent


def _steps(space: Space, rows: Rows, places: NDArray[np.uint8], *, came: bool) -> list[Step]:
    """Return a step for each medium in which rows came or left. places: of each row."""
    table = space.table
    found = [(bit, rows[(places & bit) != 0]) for bit, _ in MEDIUMS]
    return [Step(space, table.hashes[these], bit, came) for bit, these in found if len(these)]


def events_of(steps: Sequence[Step]) -> list[Event]:
    """Return the events of steps, now or later: without blocks that are told otherwise by now."""
    events: list[Event] = []
    for space, hashes, bit, came in steps:
        table = space.table
        medium = CPU if bit == IN_DRAM else STORAGE
        rows = table.find(hashes)
        there = (rows >= 0) & ((table.told[rows] & bit) != 0) if len(table) else rows >= 0
        if not came:
            if len(gone := hashes[~there]):
                events.append(removed(gone, medium))
            continue
        for chain in chains(table, rows[there]):
            parent = int(table.parents[chain[0]])
            events.append(
                stored(
                    table.hashes[chain],
                    parent or None,
                    table.tokens[chain],
                    block_size=table.block_tokens,
                    medium=medium,
                    lora_name=space.labels[int(table.labels[chain[0]])],
                )
            )
    return events
