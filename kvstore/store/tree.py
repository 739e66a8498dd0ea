"""What is stored, as a tree of prefixes that somebody looks at now and then.

The index is looked at a few blocks at a turn, so that no call waits for it, and the tree is drawn
in a thread. It is drawn when somebody asks and the last one is old: the longer it took, the more
rarely. Who asks again soon gets the same one. It is forgotten when nobody asks any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from kvstore.decide.index import Index
from kvstore.decide.runs import Blocks, Run, Runs
from kvstore.decide.uses import Uses
from kvstore.model.block import BlockKey, NamespaceId
from kvstore.model.errors import Unavailable

BLOCKS_MAX = 1 << 20  # in the tree; it takes some 100 bytes for each while it is drawn
STEP_BLOCKS = 128  # 0.2 ms
AGE_S_MIN = 1.0  # it is drawn at most so often,
AGE_COSTS = 50  # and at most a part of the time
SOON_S = 0.5  # one that took longer is drawn while the old one is shown
DRAW_S = 60.0  # for the first one
FORGET_S = 60.0
LOOK_STEP_RUNS = 100


class Found(NamedTuple):
    """Runs, level by level, and where the one before each is among them (None: it is not). more:
    where to go on, empty at the end. left_out: blocks that are stored and not in the tree."""

    runs: list[Run]
    parents: list[int | None]
    namespaces: list[NamespaceId]
    more: bytes
    age_s: float
    blocks: int
    left_out: int


class _Drawn(NamedTuple):
    runs: Runs
    at: float
    took_s: float
    left_out: int


class Tree:
    """The tree of one node. Times are seconds of `now`."""

    def __init__(self, index: Index, uses: Uses, now: Callable[[], float]) -> None:
        self._index = index
        self._uses = uses
        self._now = now
        self._drawn: _Drawn | None = None
        self._drawing: asyncio.Task[None] | None = None
        self._forget: asyncio.TimerHandle | None = None

    async def look(
        self,
        *,
        namespace_id: NamespaceId | None,
        prefix: BlockKey | None,
        through: BlockKey | None,
        depth: int,
        limit: int,
        after: bytes = b"",
    ) -> Found:
        """Return what goes on from a block, None: the starts of all prefixes. Raises Unavailable.

        through: instead, the runs from the start of a prefix to this block, and what goes on from
        there. depth: levels of runs. limit: of runs. after: where an answer had `more`.
        """
        drawn = await self._recent()
        runs = drawn.runs
        path: list[int] = []
        found: list[tuple[int, int | None]] = []
        if through is not None or prefix is not None:
            number = runs.find(through or prefix or b"")
            if number is None:
                return self._answer(drawn, [], [], b"")
            path = runs.path(number)[-limit:] if through is not None else []
            found = [(each, place - 1 if place else None) for place, each in enumerate(path)]
            first = number
        else:
            first = -1
        space = None
        if namespace_id is not None:
            if namespace_id not in runs.namespaces:
                return self._answer(drawn, [], [], b"")
            space = runs.namespaces.index(namespace_id)
        level, more = runs.children(first, limit - len(found), after=after, space=space)
        above = len(path) - 1 if path else None
        begin = len(found)
        found += [(each, above) for each in level]
        for _ in range(depth - 1):
            end = len(found)
            begin = await self._add_level(runs, found, begin, limit)
            if begin == end == len(found):
                break
        seen: list[Run] = []
        for at in range(0, len(found), LOOK_STEP_RUNS):
            seen += runs.look([each for each, _ in found[at : at + LOOK_STEP_RUNS]])
            await asyncio.sleep(0)
        return self._answer(drawn, seen, [parent for _, parent in found], more)

    async def _add_level(
        self, runs: Runs, found: list[tuple[int, int | None]], begin: int, limit: int
    ) -> int:
        """Add what goes on from the runs found last, the same room for each; return where that
        begins."""
        end = len(found)
        for place in range(begin, end):
            room = (limit - len(found)) // (end - place)
            if room:
                below, _ = runs.children(found[place][0], room)
                found += [(each, place) for each in below]
            if place % LOOK_STEP_RUNS == 0:
                await asyncio.sleep(0)
        return end

    def close(self) -> None:
        """Draw no more, and forget."""
        if self._drawing is not None:
            self._drawing.cancel()
        self._forget_it()

    def _answer(
        self, drawn: _Drawn, runs: list[Run], parents: list[int | None], more: bytes
    ) -> Found:
        age_s = self._now() - drawn.at
        namespaces = drawn.runs.namespaces
        return Found(runs, parents, namespaces, more, age_s, drawn.runs.blocks, drawn.left_out)

    async def _recent(self) -> _Drawn:
        """Return a tree that is not older than it has to be."""
        drawn = self._drawn
        if drawn is None or self._now() - drawn.at > max(AGE_S_MIN, AGE_COSTS * drawn.took_s):
            if self._drawing is None:
                self._drawing = asyncio.create_task(self._draw())
            if drawn is None or drawn.took_s < SOON_S:
                await asyncio.wait({self._drawing}, timeout=DRAW_S)
        if self._forget is not None:
            self._forget.cancel()
        self._forget = asyncio.get_running_loop().call_later(FORGET_S, self._forget_it)
        if self._drawn is None:
            raise Unavailable("the tree of what is stored is not drawn yet: ask again in a while")
        return self._drawn

    async def _draw(self) -> None:
        began = self._now()
        try:
            blocks = Blocks()
            for keys in self._index.walks.steps(most=STEP_BLOCKS):
                found = map(self._index.by_key, keys[: BLOCKS_MAX - len(blocks)])
                blocks.add(block for block in found if block is not None)
                if len(blocks) == BLOCKS_MAX:
                    break
                await asyncio.sleep(0)
            left_out = max(0, len(self._index) - len(blocks))
            runs = await asyncio.to_thread(Runs, blocks, self._uses.all())
            self._drawn = _Drawn(runs, began, self._now() - began, left_out)
        finally:
            self._drawing = None

    def _forget_it(self) -> None:
        self._drawn = self._forget = None
