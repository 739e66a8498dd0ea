"""The blocks of a tier, or of a shadow of it, in two orders at once: by hazard and by last use.

The blocks without children here (leaves) are kept in one ring per class and worth, by their last
use. Only the oldest of each ring are compared: a few dozen numbers per eviction, however many
blocks there are. By hazard, the lowest index leaves; by use, the oldest does, which is leaf LRU.
So a tier that follows another order from now on moves nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush

from kvstore.decide.policy.expected import Expected
from kvstore.decide.policy.hazard import (
    CLASSES,
    ENDED_CLASS,
    Hazard,
    block_class,
    ended_class,
    gap_class,
    score,
)
from kvstore.decide.policy.hazard_nodes import (
    ENDED,
    FOUND,
    GAP,
    LEAVES_MIN,
    SHARED,
    Blocks,
    Entry,
    Request,
    Requests,
    Ring,
)
from kvstore.decide.rows import Rows
from kvstore.model.block import BlockKey

SIFTED = 8  # entries of an old heap that are looked at for each leaf that comes
SCORES_S = 0.25  # for so long a score is good
AGE_MIN_S = 1.0
_LAST = 1e30  # by use, what is expected leaves after all else
ENDED_LEVELS = 6  # so much less an ended session's block is worth, by use: see ENDED_RATIO
_FOUND = CLASSES  # the ring of what an earlier life has left
_EXPECTED = CLASSES + 1  # of what somebody will come back for: the latest leaves first
_FOUND_FIRST = -float(1 << 52)  # the rank of the first block found; all are before what was used


class Leaves:
    """O(log n) a leaf, O(1) any other block. by_use: the order of LRU. rows: see `PrefixTree`."""

    def __init__(self, hazard: Hazard, requests: Requests, rows: Rows | None = None) -> None:
        self.tree = Blocks(requests, rows)
        self.expected = Expected()
        self.by_use = False
        self._hazard = hazard
        self._rings: dict[tuple[int, int], Ring] = {}
        self._by_place: list[Ring | None] = [None]
        self._filled: dict[Ring, None] = {}  # those that may have leaves
        self._fresh = 0  # a leaf that is not in its ring yet: it may get a child
        self._aside: list[tuple[Ring, Entry]] = []  # passed over in a walk
        self._scored_at = float("-inf")
        self._best: Ring | None = None  # what was lowest, until a leaf comes
        self._second = 0.0  # the lowest score of the other rings, or less
        self._is_plain = True  # there is one level, and no session has said that it is over
        self._found_rank = _FOUND_FIRST

    # ---- use ---------------------------------------------------------------------------------

    def use(self, prefix: Sequence[BlockKey], request: Request, nobody: object) -> None:
        """Note that a request has used what is here of a prefix. nobody: the session of what was
        not asked for yet."""
        tree = self.tree
        if self.expected.times:
            self.expected.discard(prefix)
        here, request_of = tree.here, tree.request_of
        uses, marks, children = tree.uses, tree.marks, tree.children
        number = tree.count(request, len(prefix))  # more than it will be of, for now
        before = last = 0
        gap, shared = 0, 0
        own = (request.session, nobody)
        left = len(prefix)
        for row in tree.rows.find_all(prefix):
            if not here[row]:
                continue
            if request_of[row] != before:  # once for all blocks that were last used together
                if last:
                    tree.uncount(before, last)
                    last = 0
                before = request_of[row]
                used_at, session = tree.request(row).at, tree.request(row).session
                gap = gap_class(request.at - used_at)
                shared = 0 if session in own else SHARED
            last += 1
            left -= 1
            request_of[row] = number
            uses[row] += 1
            marks[row] = marks[row] & SHARED | shared | gap
            if not children[row]:
                self.link(row)
        if last:
            tree.uncount(before, last)
        if left:
            tree.uncount(number, left)

    def enter(self, key: BlockKey, parent: BlockKey | None) -> int:
        """Add a block; 0: it is here. Set what is known of it, and `link` it if it is a leaf."""
        tree = self.tree
        row = tree.enter(key, parent)
        if row:
            tree.marks[row] = 0
            above = tree.parents[row]
            if above and tree.children[above] == 1:
                self.unlink(above)  # it is a leaf no longer
        return row

    def came_after(
        self, above: int, rows: range, request: Request, *, uses: int, marks: int
    ) -> None:
        """Set what is known of blocks that came by `enter_after`, alike all of them: the last of
        them is a leaf."""
        tree, at, count = self.tree, slice(rows.start, rows.stop), len(rows)
        if tree.children[above] == 1:
            self.unlink(above)  # it is a leaf no longer
        tree.request_of[at] = array("I", [tree.count(request, count)]) * count
        tree.uses[at] = array("I", [uses]) * count
        tree.marks[at] = bytes((marks,)) * count
        tree.ring_of[at] = array("H", bytes(2 * count))
        self.link(rows[-1])

    def leave(self, row: int) -> None:
        """Remove a block that is here. Its parent may be a leaf then."""
        tree = self.tree
        any_expected = bool(self.expected.times)
        if any_expected:
            self.expected.discard((tree.rows.keys[row],))
        ring = self._by_place[tree.ring_of[row]]
        self.unlink(row)
        above = tree.leave(row)
        if above and not tree.children[above] and tree.here[above]:
            if ring is not None and not any_expected and tree.are_alike(row, above):
                self._push(above, ring)  # the next of its ring, and as low as its child was
            else:
                self.link(above)
        tree.ungive(row)

    def end(self, keys: Sequence[BlockKey]) -> None:
        """Note that the session that used these blocks last is over."""
        for key in keys:
            row = self.tree.find(key)
            if row:
                self.tree.marks[row] |= ENDED
                if not self.tree.children[row]:
                    self.link(row)

    def link(self, row: int) -> None:
        """Put a leaf where its class and last use say."""
        self.tree.ring_of[row] = 0
        if self._fresh and self._fresh != row:
            self._push(self._fresh, self._ring_of(self._fresh))
            self._best = None
        self._fresh = row

    def unlink(self, row: int) -> None:
        """Take what is no leaf any more out."""
        self.tree.ring_of[row] = 0
        if self._fresh == row:
            self._fresh = 0

    def _settle(self, now: float) -> None:
        """Put the fresh leaf into its ring."""
        row, self._fresh = self._fresh, 0
        if not row:
            return
        ring = self._ring_of(row)
        self._push(row, ring)
        best = self._best
        if best is None or self._head(ring) != row:
            return  # as far as is known, what leaves first is another
        if ring is best:
            return
        found = self._scored(ring, row, now)
        if found < best.score:
            self._best, self._second = ring, best.score
        elif found < self._second:
            self._second = found

    def _push(self, row: int, ring: Ring) -> None:
        tree = self.tree
        tree.ring_of[row] = ring.place
        if ring.number == _EXPECTED:
            rank = -self.expected.times[tree.rows.keys[row]]
        elif ring.number == _FOUND:
            rank = self._found_rank = self._found_rank + 1.0
        else:
            rank = tree.requests[tree.request_of[row]].order
        tree.ticks += 1
        heappush(ring.heap, (rank, tree.ticks, row))
        self._filled[ring] = None
        if ring.old:
            self._sift(ring)
        elif len(ring.heap) > ring.room:
            ring.old, ring.heap = ring.heap, []

    def _sift(self, ring: Ring) -> None:
        """Take a few entries of the old heap into the new one, unless they are stale."""
        old, heap = ring.old, ring.heap
        for _ in range(min(SIFTED, len(old))):
            entry = old.pop()  # the last of a heap: what is left is one as well
            if self._is_good(ring, entry):
                heappush(heap, entry)
        if not old:
            ring.room = 2 * len(heap) + LEAVES_MIN

    def _ring_of(self, row: int) -> Ring:
        tree = self.tree
        request, marks, uses = tree.request(row), tree.marks[row], tree.uses[row]
        level = request.level
        if self.expected.times and tree.rows.keys[row] in self.expected.times:
            number = _EXPECTED
        elif marks & FOUND:
            number = _FOUND
        elif marks & ENDED:
            number = ended_class(uses)
        else:
            number = block_class(request.turn, uses, marks & GAP)
        ring = self._rings.get((number, level))
        if ring is None:
            ring = self._rings[number, level] = Ring(number, level, len(self._by_place))
            self._by_place.append(ring)
            if level != 0 or ENDED_CLASS <= number < CLASSES:
                self._is_plain = False
                self.rescore()
        return ring

    # ---- who leaves --------------------------------------------------------------------------

    def victims(self, now: float) -> Iterator[int]:
        """Yield leaves, the first to leave first. Those that stay are passed over."""
        self._restore()
        passed: set[int] = set()
        try:
            while row := self.lowest(now):
                if row not in passed:
                    yield row
                if self.tree.here[row]:
                    passed.add(row)
                    self._pass_over(row)
        finally:
            self._restore()

    def lowest(self, now: float) -> int:
        """Return the leaf that is to leave first, 0 if there is none."""
        if self._fresh:
            self._settle(now)
        if now - self._scored_at > SCORES_S:
            self._scored_at, self._best = now, None
            for ring in self._filled:
                ring.request = None
            self._give_up_overdue(now)
        best = self._best
        if best is not None:
            head = self._head(best)
            if head and self._scored(best, head, now) <= self._second:
                return head
        best = self._best = self._search(now)
        return best.heap[0][2] if best is not None else 0

    def rescore(self) -> None:
        """Forget what was scored: the hazard, or the order, is another one now."""
        self._scored_at = float("-inf")

    def _search(self, now: float) -> Ring | None:
        """Return the ring whose oldest leaf has the lowest score, and note the second lowest."""
        best, lowest, second, empty = None, float("inf"), float("inf"), None
        requests, request_of = self.tree.requests, self.tree.request_of
        for ring in self._filled:
            head = self._head(ring)
            if not head:
                empty = ring
                continue
            request = requests[request_of[head]]
            found = ring.score if request is ring.request else self._scored(ring, head, now)
            if found < lowest:
                best, lowest, second = ring, found, lowest
            elif found < second:
                second = found
        if empty is not None:
            del self._filled[empty]
        self._second = second
        return best

    def _scored(self, ring: Ring, head: int, now: float) -> float:
        """Return the score of the oldest leaf of a ring: the lowest leaves first."""
        request = self.tree.requests[self.tree.request_of[head]]
        if request is ring.request:
            return ring.score
        number = ring.number
        if number == _EXPECTED:  # the next one may be expected at another time
            at = self.expected.times[self.tree.rows.keys[head]]
            return self.expected.rate(at, now) * (_LAST if self.by_use else 1.0)
        if not self.by_use:
            row = self._hazard.index[number if number < CLASSES else block_class(1, 1, 0)]
            found = score(row, now - request.at) * 2.0**ring.level
        elif self._is_plain:
            found = ring.heap[0][0]
        else:  # what was not used for twice as long is half as likely to be
            level = ring.level - ENDED_LEVELS if ENDED_CLASS <= number < CLASSES else ring.level
            found = 2.0**level / (AGE_MIN_S + now - request.at)
        ring.request, ring.score = request, found
        return found

    def _head(self, ring: Ring) -> int:
        """Return the oldest leaf of a ring, now the first of its heap; 0 if there is none. What is
        no leaf any more is dropped."""
        heap, old = ring.heap, ring.old
        while heap or old:
            if old and (not heap or old[0] < heap[0]):
                heappush(heap, heappop(old))
            entry = heap[0]
            if self._is_good(ring, entry):
                return entry[2]
            heappop(heap)
        return 0

    def _is_good(self, ring: Ring, entry: Entry) -> bool:
        rank, tick, row = entry
        tree = self.tree
        if tree.ring_of[row] != ring.place or tick <= tree.gone[row]:
            return False
        if tree.children[row] or not tree.here[row]:
            return False
        if ring.number == _FOUND or rank == tree.requests[tree.request_of[row]].order:
            return True
        if ring.number != _EXPECTED:
            return False
        return rank == -self.expected.times.get(tree.rows.keys[row], 0.0)

    def _pass_over(self, row: int) -> None:
        ring = self._by_place[self.tree.ring_of[row]]
        if ring is not None and self._head(ring) == row:
            self._aside.append((ring, heappop(ring.heap)))
            self._best = None

    def _restore(self) -> None:
        """Put back what a walk has passed over."""
        if self._aside:
            for ring, entry in self._aside:
                heappush(ring.heap, entry)
                self._filled[ring] = None
            self._aside.clear()
            self._best = None

    def _give_up_overdue(self, now: float) -> None:
        """Judge what nobody came back for like any other block."""
        for key in self.expected.overdue(now):
            row = self.tree.find(key)
            if row and not self.tree.children[row]:
                self._push(row, self._ring_of(row))
