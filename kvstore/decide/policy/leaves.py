"""The blocks of a tier, or of a shadow of it, in two orders at once: by hazard and by last use.

The blocks without children here (leaves) are kept in one ring per class and worth, by their last
use. Only the oldest of each ring are compared: a few dozen numbers per eviction, however many
blocks there are. By hazard, the lowest index leaves; by use, the oldest does, which is leaf LRU.
So a tier that follows another order from now on moves nothing.
"""

from __future__ import annotations

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
from kvstore.decide.policy.hazard_nodes import Block, Entry, Request, Ring, are_alike
from kvstore.decide.policy.prefix_tree import PrefixTree
from kvstore.model.block import BlockKey

SCORES_S = 0.25  # for so long a score is good
AGE_MIN_S = 1.0
_LAST = 1e30  # by use, what is expected leaves after all else
ENDED_LEVELS = 6  # so much less an ended session's block is worth, by use: see ENDED_RATIO
_FOUND = CLASSES  # the ring of what an earlier life has left
_EXPECTED = CLASSES + 1  # of what somebody will come back for: the latest leaves first
_RINGS = CLASSES + 2
_FOUND_FIRST = -float(1 << 52)  # the rank of the first block found; all are before what was used


class Leaves:
    """O(log n) a leaf, O(1) any other block. by_use: the order of LRU."""

    def __init__(self, hazard: Hazard) -> None:
        self.tree = PrefixTree(Block)
        self.expected = Expected()
        self.by_use = False
        self._hazard = hazard
        self._rings: dict[int, Ring] = {}
        self._filled: dict[Ring, None] = {}  # those that may have leaves
        self._fresh: Block | None = None  # a leaf that is not in its ring yet: it may get a child
        self._aside: list[tuple[Ring, Entry]] = []  # passed over in a walk
        self._ticks = 0
        self._scored_at = float("-inf")
        self._best: Ring | None = None  # what was lowest, until a leaf comes
        self._second = 0.0  # the lowest score of the other rings, or less
        self._is_plain = True  # there is one level, and no session has said that it is over
        self._found_rank = _FOUND_FIRST

    # ---- use ---------------------------------------------------------------------------------

    def use(self, prefix: Sequence[BlockKey], request: Request, nobody: object) -> None:
        """Note that a request has used what is here of a prefix. nobody: the session of what was
        not asked for yet."""
        nodes = self.tree.nodes
        if self.expected.times:
            self.expected.discard(prefix)
        before, gap, shared = None, 0, False
        own = (request.session, nobody)
        for key in prefix:
            node = nodes.get(key)
            if node is None or not node.here:
                continue
            if node.request is not before:  # once for all blocks that were last used together
                before = node.request
                gap = gap_class(request.at - before.at)
                shared = before.session not in own
            node.request = request
            node.uses += 1
            node.gap = gap
            node.ended = node.found = False
            if shared:
                node.shared = True
            if not node.children:
                self.link(node)

    def enter(self, key: BlockKey, parent: BlockKey | None) -> Block | None:
        """Add a block; None: it is here. Set what is known of it, and `link` it if it is a leaf."""
        node = self.tree.enter(key, parent)
        if node is not None:
            node.shared = node.ended = node.found = False
            above: Block | None = node.parent
            if above is not None and above.children == 1:
                self.unlink(above)  # it is a leaf no longer
        return node

    def leave(self, node: Block) -> None:
        """Remove a block that is here. Its parent may be a leaf then."""
        left = self.tree.leave(node.key)
        assert left is not None
        _, above = left
        ring = node.ring
        self.unlink(node)
        any_expected = bool(self.expected.times)
        if any_expected:
            self.expected.discard((node.key,))
        if above is None or above.children or not above.here:
            return
        if ring is not None and not any_expected and are_alike(node, above):
            self._push(above, ring)  # the next of its ring, and as low as its child was
        else:
            self.link(above)

    def link(self, node: Block) -> None:
        """Put a leaf where its class and last use say."""
        node.ring = None
        if self._fresh is not None and self._fresh is not node:
            self._push(self._fresh, self._ring_of(self._fresh))
            self._best = None
        self._fresh = node

    def unlink(self, node: Block) -> None:
        """Take what is no leaf any more out."""
        node.ring = None
        if self._fresh is node:
            self._fresh = None

    def _settle(self, now: float) -> None:
        """Put the fresh leaf into its ring."""
        node, self._fresh = self._fresh, None
        if node is None:
            return
        ring = self._ring_of(node)
        self._push(node, ring)
        best = self._best
        if best is None or self._head(ring) is not node:
            return  # as far as is known, what leaves first is another
        if ring is best:
            return
        found = self._scored(ring, node, now)
        if found < best.score:
            self._best, self._second = ring, best.score
        elif found < self._second:
            self._second = found

    def _push(self, node: Block, ring: Ring) -> None:
        node.ring = ring
        if ring.number == _EXPECTED:
            rank = -self.expected.times[node.key]
        elif ring.number == _FOUND:
            rank = self._found_rank = self._found_rank + 1.0
        else:
            rank = node.request.order
        self._ticks += 1
        heap = ring.heap
        heappush(heap, (rank, self._ticks, node))
        self._filled[ring] = None
        if len(heap) > ring.room:
            ring.drop_stale([each for each in heap if self._is_good(ring, each)])

    def _ring_of(self, node: Block) -> Ring:
        level = node.request.level
        if node.key in self.expected.times:
            number = _EXPECTED
        elif node.found:
            number = _FOUND
        elif node.ended:
            number = ended_class(node.uses)
        else:
            number = block_class(node.request.turn, node.uses, node.gap)
        place = level * _RINGS + number
        ring = self._rings.get(place)
        if ring is None:
            ring = self._rings[place] = Ring(number, level)
            if level != 0 or ENDED_CLASS <= number < CLASSES:
                self._is_plain = False
                self.rescore()
        return ring

    # ---- who leaves --------------------------------------------------------------------------

    def victims(self, now: float) -> Iterator[Block]:
        """Yield leaves, the first to leave first. Those that stay are passed over."""
        self._restore()
        passed: set[Block] = set()
        try:
            while (node := self.lowest(now)) is not None:
                if node not in passed:
                    yield node
                if node.here:
                    passed.add(node)
                    self._pass_over(node)
        finally:
            self._restore()

    def lowest(self, now: float) -> Block | None:
        """Return the leaf that is to leave first."""
        if self._fresh is not None:
            self._settle(now)
        if now - self._scored_at > SCORES_S:
            self._scored_at, self._best = now, None
            for ring in self._filled:
                ring.request = None
            self._give_up_overdue(now)
        best = self._best
        if best is not None:
            head = self._head(best)
            if head is not None and self._scored(best, head, now) <= self._second:
                return head
        best = self._best = self._search(now)
        return best.heap[0][2] if best is not None else None

    def rescore(self) -> None:
        """Forget what was scored: the hazard, or the order, is another one now."""
        self._scored_at = float("-inf")

    def _search(self, now: float) -> Ring | None:
        """Return the ring whose oldest leaf has the lowest score, and note the second lowest."""
        best, lowest, second, empty = None, float("inf"), float("inf"), None
        for ring in self._filled:
            head = self._head(ring)
            if head is None:
                empty = ring
                continue
            found = ring.score if head.request is ring.request else self._scored(ring, head, now)
            if found < lowest:
                best, lowest, second = ring, found, lowest
            elif found < second:
                second = found
        if empty is not None:
            del self._filled[empty]
        self._second = second
        return best

    def _scored(self, ring: Ring, head: Block, now: float) -> float:
        """Return the score of the oldest leaf of a ring: the lowest leaves first."""
        request = head.request
        if request is ring.request:
            return ring.score
        number = ring.number
        if number == _EXPECTED:  # the next one may be expected at another time
            at = self.expected.times[head.key]
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

    def _head(self, ring: Ring) -> Block | None:
        """Return the oldest leaf of a ring, dropping what is none any more."""
        heap = ring.heap
        while heap:
            entry = heap[0]
            if self._is_good(ring, entry):
                return entry[2]
            heappop(heap)
        return None

    def _is_good(self, ring: Ring, entry: Entry) -> bool:
        rank, _, node = entry
        if node.ring is not ring or node.children or not node.here:
            return False
        if rank == node.request.order or ring.number == _FOUND:
            return True
        return ring.number == _EXPECTED and rank == -self.expected.times.get(node.key, 0.0)

    def _pass_over(self, node: Block) -> None:
        ring = node.ring
        if ring is not None and self._head(ring) is node:
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
            node = self.tree.find(key)
            if node is not None and not node.children:
                self._push(node, self._ring_of(node))
