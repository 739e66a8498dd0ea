"""Hazard density (`hz`): the block leaves whose room is least likely to turn into a hit soon.

LRU asks how long ago a block was used. This asks what became of blocks like it (`hazard.py`): a
first turn that was not continued within a minute is probably over, the tenth turn of an agent that
paused for a minute probably is not. A conversation need not be named: a request continues the
newest one whose whole prefix is the start of its own.

No such guess is right of all traffic. So two small models of the tier (`shadow.py`) say what it
would hit by hazard, and what by last use alone, and it follows whichever hits more lately. Both
orders are kept in the same place (`leaves.py`). What sessions that have ended leave behind is a
class of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvstore.decide.policy.ghosts import Ghosts
from kvstore.decide.policy.hazard import ENDED_CLASS, Hazard, gap_class, turn_and_gap
from kvstore.decide.policy.hazard_nodes import (
    ENDED,
    FOUND,
    GAP,
    SHARED,
    Request,
    Requests,
    put_last,
)
from kvstore.decide.policy.leaves import Leaves
from kvstore.decide.policy.shadow import SHADOW_BLOCKS, Choice, Shadows
from kvstore.decide.rows import Rows
from kvstore.model.block import BlockKey

REFIT_REQUESTS = 200
FIRST_REFITS = (25, 50, 100)
PATHS_MAX = 1 << 16  # requests of which it is known where they ended
BRANCHES_MAX = 2  # what more requests begin with is no conversation: a system prompt
ROOTS_MAX = 1 << 12  # requests whose first block may still come
STALE_S = 300.0  # a block put so long after its parent was used is used now
_FOUND_ORDER = float("-inf")


class HazardDensity:
    """O(1) a block, O(log n) a leaf, and a few milliseconds every 200 requests.

    shadow_blocks: in each model of the tier; 0: it goes by hazard alone. rows: shared with whoever
    else keeps columns; None: its own.
    """

    def __init__(
        self,
        now: Callable[[], float],
        *,
        shadow_blocks: int = SHADOW_BLOCKS,
        rows: Rows | None = None,
    ) -> None:
        self._now = now
        self._began = now()
        self._hazard = Hazard()
        requests = Requests()
        self._leaves = Leaves(self._hazard, requests, rows)
        self._tree = self._leaves.tree
        self._shadows = Shadows(self._hazard, requests, shadow_blocks) if shadow_blocks else None
        if self._shadows is not None:
            self._leaves.by_use = self._shadows.by_use
        self._ghosts = Ghosts()
        self._requests = 0
        self._orders = 0
        self._paths: dict[BlockKey, Request] = {}  # by the last block; oldest first
        self._roots: dict[BlockKey, Request] = {}  # by the first block; oldest first
        # The use of what is found.
        self._before = Request(self._began, 1, 0, object(), order=_FOUND_ORDER)
        self._knows_found = False  # from its last life
        self._adopted: set[Request] = set()  # what it knows of
        self._last_adopted = self._before

    def __len__(self) -> int:
        return self._tree.blocks

    @property
    def choice(self) -> Choice | None:
        """Which order is followed, and why; None: there is no other."""
        return self._shadows.choice if self._shadows is not None else None

    # ---- use ---------------------------------------------------------------------------------

    def touch(self, prefix: Sequence[BlockKey], level: int = 0) -> None:
        if not prefix:
            return
        request = self._begin(prefix, level)
        self._hazard.watch(prefix, request.turn, request.gap, request.at)
        self._leaves.use(prefix, request, self._before.session)
        if self._shadows is not None and self._shadows.ask(prefix, request):
            self._leaves.by_use = self._shadows.by_use
            self._leaves.rescore()

    def alone(self, prefix: Sequence[BlockKey]) -> Sequence[BlockKey]:
        tree = self._tree
        found = [(tree.find(key), key) for key in prefix]
        return [key for row, key in found if row and not tree.marks[row] & SHARED]

    def end(self, keys: Sequence[BlockKey]) -> None:
        self._hazard.end(keys)
        if self._shadows is not None:
            self._shadows.end(keys)
        if self._leaves.expected.times:
            self._leaves.expected.discard(keys)
        self._leaves.end(keys)

    def expect(self, keys: Sequence[BlockKey], at: float) -> None:
        for key in keys:
            row = self._tree.find(key)
            if row and self._leaves.expected.add(key, at) and not self._tree.children[row]:
                self._leaves.link(row)

    def hold(self, prefix: Sequence[BlockKey]) -> None:
        for key in prefix:
            self._leaves.unlink(self._tree.hold(key))

    def let_go(self, prefix: Sequence[BlockKey]) -> None:
        for key in reversed(prefix):
            row = self._tree.let_go(key)
            if self._tree.here[row] and not self._tree.children[row]:
                self._leaves.link(row)

    def is_leaf(self, key: BlockKey) -> bool:
        row = self._tree.find(key)
        return bool(row) and not self._tree.children[row]

    def _begin(self, prefix: Sequence[BlockKey], level: int = 0) -> Request:
        """Return the request for a prefix, with its turn and session."""
        at = self._now()
        paths = self._paths
        last = None
        for key in reversed(prefix):
            last = paths.get(key)
            if last is not None and last.branches < BRANCHES_MAX:
                break
        else:
            last, key = self._last_life(prefix)
        if last is None:
            turn, gap, session = 1, 0, object()
        else:
            last.branches += key != prefix[-1]  # the same prompt again is no branch
            turn, gap, session = last.turn + 1, gap_class(at - last.at), last.session
        request = Request(at, turn, gap, session, order=self._next_order(), level=level)
        if (known := paths.get(prefix[-1])) is None or known.branches < BRANCHES_MAX:
            put_last(paths, prefix[-1], request, PATHS_MAX)
        put_last(self._roots, prefix[0], request, ROOTS_MAX)
        self._requests += 1
        if self._requests % REFIT_REQUESTS == 0 or self._requests in FIRST_REFITS:
            self._hazard.refit(at)
            self._leaves.rescore()
            if self._shadows is not None:
                self._shadows.rescore()
        return request

    def _next_order(self) -> int:
        self._orders += 1
        return self._orders

    def _last_life(self, prefix: Sequence[BlockKey]) -> tuple[Request | None, BlockKey]:
        """Return the request that a prefix goes on from if that was before a restart, and where."""
        if self._adopted:
            for key in reversed(prefix):
                row = self._tree.find(key)
                if row:
                    request = self._tree.request(row)
                    return (request if request in self._adopted else None), key
        return None, prefix[-1]

    # ---- come and go -------------------------------------------------------------------------

    def insert(self, key: BlockKey, parent: BlockKey | None) -> None:
        tree = self._tree
        row = self._leaves.enter(key, parent)
        if not row:
            return
        request = self._request_of(row, key)
        tree.give(row, request)
        ghost = self._ghosts.find(key)
        if ghost is None:
            tree.uses[row] = 1
            tree.marks[row] = request.gap
        else:
            tree.uses[row] = ghost.uses + 1
            tree.marks[row] = gap_class(request.at - ghost.used_at)
        if not tree.children[row]:
            self._leaves.link(row)

    def adopt(self, key: BlockKey, parent: BlockKey | None) -> None:
        """A block is what its last life knew of it, or what is known of the block before it."""
        tree = self._tree
        row = self._leaves.enter(key, parent)
        if not row:
            return
        above = tree.parents[row]
        known = self._hazard.last_use(key) if self._knows_found else None
        if known is not None:
            at, number, tree.uses[row] = known
            request = self._adopted_request(at, number)
            tree.give(row, request)
            tree.marks[row] = request.gap | (ENDED if number >= ENDED_CLASS else 0)
        elif tree.here[above] and not tree.marks[above] & FOUND and self._adopted:
            tree.give(row, tree.request(above))
            tree.uses[row], tree.marks[row] = tree.uses[above], tree.marks[above] & GAP
        else:
            tree.give(row, self._before)
            tree.uses[row], tree.marks[row] = 1, FOUND
        if not tree.children[row]:
            self._leaves.link(row)

    def adopt_run(self, keys: Sequence[BlockKey], parent: BlockKey | None) -> None:
        self.adopt(keys[0], parent)
        tree, rest, rows = self._tree, list(keys[1:]), None
        first = tree.find(keys[0])
        last_use = self._hazard.last_use
        if rest and not (self._knows_found and any(map(last_use, keys))):
            rows = tree.enter_after(first, rest)
        if rows is None:
            for key, above in zip(rest, keys, strict=False):
                self.adopt(key, above)
        elif tree.marks[first] & FOUND or not self._adopted:
            self._leaves.came_after(first, rows, self._before, uses=1, marks=FOUND)
        else:
            request, marks = tree.request(first), tree.marks[first] & GAP
            self._leaves.came_after(first, rows, request, uses=tree.uses[first], marks=marks)

    def _adopted_request(self, at: float, number: int) -> Request:
        """Return the request of an earlier life that used blocks then."""
        last, (turn, gap) = self._last_adopted, turn_and_gap(number)
        if (last.at, last.turn, last.gap) != (at, turn, gap):
            order = min(0.0, at - self._began)  # before those of this life
            last = self._last_adopted = Request(at, turn, gap, object(), order=order)
            self._adopted.add(last)
        return last

    def save(self) -> bytes:
        learned = self._hazard.save(self._now())
        return (self._shadows.save() if self._shadows is not None else b"") + learned

    def load(self, saved: bytes) -> None:
        chosen, learned = Shadows.split(saved)
        if self._hazard.load(learned, self._now()):
            self._knows_found = True
            self._leaves.rescore()
            if self._shadows is not None and chosen:
                self._shadows.load(chosen)
                self._leaves.by_use = self._shadows.by_use

    def remove(self, key: BlockKey) -> None:
        tree = self._tree
        row = tree.find(key)
        if row:
            uses, used_at = tree.uses[row], tree.request(row).at
            self._leaves.leave(row)
            self._ghosts.put(key, uses, used_at, blocks=tree.blocks)

    def retire(self) -> None:
        """Give all rows back: another policy takes over."""
        self._tree.retire()

    def _request_of(self, row: int, key: BlockKey) -> Request:
        """Return the request that a block was computed for."""
        above = self._tree.parents[row]
        if self._tree.here[above]:
            request = self._tree.request(above)
        else:
            request = self._roots.get(key, self._before)
        at = self._now()
        if at - request.at < STALE_S and request is not self._before:
            return request
        return Request(
            at,
            request.turn,
            request.gap,
            request.session,
            order=self._next_order(),
            level=request.level,
        )

    # ---- who leaves --------------------------------------------------------------------------

    def victims(self) -> Iterator[BlockKey]:
        if self._shadows is not None:
            self._shadows.room(self._tree.blocks)
        keys = self._tree.rows.keys
        for row in self._leaves.victims(self._now()):
            yield keys[row]
