"""Hazard density (`hz`): the block leaves whose room is least likely to turn into a hit soon.

LRU asks how long ago a block was used. This asks what became of blocks like it (`hazard.py`): a
first turn that was not continued within a minute is probably over, the tenth turn of an agent that
paused for a minute probably is not. A conversation need not be named: a request continues the
newest one whose whole prefix is the start of its own.

The blocks without children here (leaves) are kept in one ring per class, in order of their last
use, and only the oldest of each ring are compared: a few dozen numbers per eviction, however many
blocks there are. What sessions that have ended leave behind is in rings of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvstore.decide.policy.expected import Expected
from kvstore.decide.policy.ghosts import Ghosts
from kvstore.decide.policy.hazard import (
    CLASSES,
    ENDED_CLASS,
    Hazard,
    block_class,
    ended_class,
    gap_class,
    score,
    turn_and_gap,
)
from kvstore.decide.policy.hazard_nodes import (
    Block,
    Request,
    Ring,
    are_alike,
    next_leaf,
    put_last,
)
from kvstore.decide.policy.prefix_tree import Node, PrefixTree, link, unlink
from kvstore.model.block import BlockKey

REFIT_REQUESTS = 200
FIRST_REFITS = (25, 50, 100)
PATHS_MAX = 1 << 16  # requests of which it is known where they ended
BRANCHES_MAX = 2  # what more requests begin with is no conversation: a system prompt
ROOTS_MAX = 1 << 12  # requests whose first block may still come
SCORES_S = 0.25  # for so long a score is good
STALE_S = 300.0  # a block put so long after its parent was used is used now
STEPS_MAX = 64  # in search of the place of a parent that has become a leaf

_FOUND = CLASSES  # the ring of what an earlier life has left
_EXPECTED = CLASSES + 1  # of what somebody will come back for: the latest leaves first
_RINGS = CLASSES + 2


class HazardDensity:
    """O(1) a block, and a few milliseconds every 200 requests."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._tree = PrefixTree(Block)
        self._rings = [Ring(number) for number in range(_RINGS)]
        self._filled: dict[Ring, None] = {}  # those that may have blocks
        self._hazard = Hazard()
        self._ghosts = Ghosts()
        self._requests = 0
        self._paths: dict[BlockKey, Request] = {}  # by the last block; oldest first
        self._roots: dict[BlockKey, Request] = {}  # by the first block; oldest first
        self._before = Request(now(), 1, 0, object())  # the use of what is found
        self._scored_at = float("-inf")
        self._expected = Expected()
        self._knows_found = False  # from its last life
        self._adopted: set[Request] = set()  # what it knows of
        self._last_adopted = self._before

    def __len__(self) -> int:
        return self._tree.blocks

    # ---- use ---------------------------------------------------------------------------------

    def touch(self, prefix: Sequence[BlockKey]) -> None:
        if not prefix:
            return
        request = self._begin(prefix)
        self._hazard.watch(prefix, request.turn, request.gap, request.at)
        nodes = self._tree.nodes
        if self._expected.times:
            self._expected.discard(prefix)
        before, gap, shared = None, 0, False
        own = (request.session, self._before.session)  # what nobody asked for yet is the asker's
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
                unlink(node)
                self._link(node)

    def alone(self, prefix: Sequence[BlockKey]) -> Sequence[BlockKey]:
        found = map(self._tree.find, prefix)
        return [node.key for node in found if node is not None and not node.shared]

    def end(self, keys: Sequence[BlockKey]) -> None:
        self._hazard.end(keys)
        if self._expected.times:
            self._expected.discard(keys)
        for key in keys:
            node = self._tree.find(key)
            if node is not None:
                node.ended = True
                if not node.children:
                    unlink(node)
                    self._link_by_use(node)

    def expect(self, keys: Sequence[BlockKey], at: float) -> None:
        for key in keys:
            node = self._tree.find(key)
            if node is not None and self._expected.add(key, at) and not node.children:
                unlink(node)
                self._link_by_use(node)

    def hold(self, prefix: Sequence[BlockKey]) -> None:
        for key in prefix:
            node = self._tree.hold(key)
            if node.here and node.children == 1:
                unlink(node)

    def let_go(self, prefix: Sequence[BlockKey]) -> None:
        for key in reversed(prefix):
            node = self._tree.let_go(key)
            if node.here and not node.children:
                self._link_by_use(node)

    def is_leaf(self, key: BlockKey) -> bool:
        node = self._tree.find(key)
        return node is not None and not node.children

    def _begin(self, prefix: Sequence[BlockKey]) -> Request:
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
            request = Request(at, 1, 0, object())
        else:
            last.branches += key != prefix[-1]  # the same prompt again is no branch
            request = Request(at, last.turn + 1, gap_class(at - last.at), last.session)
        if (known := paths.get(prefix[-1])) is None or known.branches < BRANCHES_MAX:
            put_last(paths, prefix[-1], request, PATHS_MAX)
        put_last(self._roots, prefix[0], request, ROOTS_MAX)
        self._requests += 1
        if self._requests % REFIT_REQUESTS == 0 or self._requests in FIRST_REFITS:
            self._hazard.refit(at)
            self._scored_at = float("-inf")
        return request

    def _last_life(self, prefix: Sequence[BlockKey]) -> tuple[Request | None, BlockKey]:
        """Return the request that a prefix goes on from if that was before a restart, and where."""
        if self._adopted:
            for key in reversed(prefix):
                node = self._tree.find(key)
                if node is not None:
                    return (node.request if node.request in self._adopted else None), key
        return None, prefix[-1]

    # ---- come and go -------------------------------------------------------------------------

    def insert(self, key: BlockKey, parent: BlockKey | None) -> None:
        node = self._enter(key, parent)
        if node is None:
            return
        node.found = False
        node.request = request = self._request_of(node)
        ghost = self._ghosts.find(key)
        if ghost is None:
            node.uses = 1
            node.gap = request.gap
        else:
            node.uses = ghost.uses + 1
            node.gap = gap_class(request.at - ghost.used_at)
        if not node.children:
            ring = self._rings[block_class(request.turn, node.uses, node.gap)]
            self._filled[ring] = None
            link(node, ring)

    def adopt(self, key: BlockKey, parent: BlockKey | None) -> None:
        """A block is what its last life knew of it, or what is known of the block before it."""
        node = self._enter(key, parent)
        if node is None:
            return
        above: Block | None = node.parent
        known = self._hazard.last_use(key) if self._knows_found else None
        node.found = False
        if known is not None:
            at, number, node.uses = known
            node.request = self._adopted_request(at, number)
            node.ended = number >= ENDED_CLASS
            node.gap = node.request.gap
        elif above is not None and above.here and not above.found and self._adopted:
            node.request, node.uses, node.gap = above.request, above.uses, above.gap
        else:
            node.found = True
            node.request, node.uses, node.gap = self._before, 1, 0
        if not node.children:
            self._link_adopted(node)

    def _adopted_request(self, at: float, number: int) -> Request:
        """Return the request of an earlier life that used blocks then."""
        last, (turn, gap) = self._last_adopted, turn_and_gap(number)
        if (last.at, last.turn, last.gap) != (at, turn, gap):
            last = self._last_adopted = Request(at, turn, gap, object())
            self._adopted.add(last)
        return last

    def _link_adopted(self, node: Block) -> None:
        """Put a leaf before those of its class that were used later, or nearly there: most come
        in the order in which they were used."""
        ring = self._ring_of(node)
        self._filled[ring] = None
        at, older = node.request.at, ring.older
        for _ in range(STEPS_MAX):
            if older is ring or older.request.at <= at:
                break
            older = older.older
        link(node, older.newer)

    def save(self) -> bytes:
        return self._hazard.save(self._now())

    def load(self, saved: bytes) -> None:
        if self._hazard.load(saved, self._now()):
            self._knows_found = True

    def remove(self, key: BlockKey) -> None:
        left = self._tree.leave(key)
        if left is None:
            return
        node, above = left
        place = node.newer
        if not node.children:
            unlink(node)
        any_expected = bool(self._expected.times)
        if any_expected:
            self._expected.discard((key,))
        self._ghosts.put(key, node.uses, node.request.at, blocks=self._tree.blocks)
        if above is None or above.children or not above.here:
            return
        if not node.children and are_alike(node, above) and not any_expected:
            link(above, place)  # where its child was
        else:
            self._link_by_use(above)

    def _enter(self, key: BlockKey, parent: BlockKey | None) -> Block | None:
        node = self._tree.enter(key, parent)
        if node is not None:
            node.shared = node.ended = False
            above = node.parent
            if above is not None and above.children == 1 and above.here:
                unlink(above)  # it is a leaf no longer
        return node

    def _request_of(self, node: Block) -> Request:
        """Return the request that a block was computed for."""
        above: Block | None = node.parent
        if above is not None and above.here:
            request = above.request
        else:
            request = self._roots.get(node.key, self._before)
        at = self._now()
        if at - request.at < STALE_S and request is not self._before:
            return request
        return Request(at, request.turn, request.gap, request.session)

    # ---- who leaves --------------------------------------------------------------------------

    def victims(self) -> Iterator[BlockKey]:
        passed: dict[Ring, Node] = {}  # the newest of its blocks that were passed over
        kept: set[Node] = set()
        removed = False  # since the first was passed over
        while True:
            ring = self._lowest(passed)
            if ring is None:
                if not removed:
                    return
                passed, removed = {}, False  # a new leaf may be older than what was passed over
                continue
            node = next_leaf(passed.get(ring, ring))
            if node not in kept:
                yield node.key
            if node.here:
                passed[ring] = node
                kept.add(node)
            else:
                removed = bool(passed)

    def _lowest(self, passed: dict[Ring, Node]) -> Ring | None:
        """Return the ring whose oldest block, of those not passed over, has the lowest score."""
        now = self._now()
        if now - self._scored_at > SCORES_S:
            self._scored_at = now
            for ring in self._rings:
                ring.request = None
            if not passed:
                self._give_up_overdue(now)
        best, lowest, empty = None, float("inf"), None
        for ring in self._filled:
            head: Any = ring.newer if ring not in passed else next_leaf(passed[ring])
            if head is ring:
                empty = ring if ring.newer is ring else empty
                continue
            if head.request is not ring.request:
                ring.request = head.request
                ring.score = self._score(ring, head, now)
            if ring.score < lowest:
                best, lowest = ring, ring.score
        if empty is not None:
            del self._filled[empty]
        return best

    def _score(self, ring: Ring, head: Block, now: float) -> float:
        number = ring.number
        if number == _EXPECTED:
            ring.request = None  # the next one may be expected at another time
            return self._expected.rate(self._expected.times[head.key], now)
        row = self._hazard.index[number if number < CLASSES else block_class(1, 1, 0)]
        return score(row, now - head.request.at)

    def _give_up_overdue(self, now: float) -> None:
        """Judge what nobody came back for like any other block."""
        for key in self._expected.overdue(now):
            node = self._tree.find(key)
            if node is not None and not node.children:
                unlink(node)
                self._link_by_use(node)

    def _link(self, node: Block) -> None:
        """Make a leaf the newest of its class."""
        ring = self._ring_of(node)
        self._filled[ring] = None
        link(node, ring)

    def _ring_of(self, node: Block) -> Ring:
        if node.key in self._expected.times:
            return self._rings[_EXPECTED]
        if node.found:
            return self._rings[_FOUND]
        if node.ended:
            return self._rings[ended_class(node.uses)]
        return self._rings[block_class(node.request.turn, node.uses, node.gap)]

    def _link_by_use(self, node: Block) -> None:
        """Put a parent that has become a leaf where its last use says, or nearly there.

        Most were last used with the child that left, which was the oldest: so is the parent.
        """
        ring = self._ring_of(node)
        self._filled[ring] = None
        if ring.number == _EXPECTED:
            self._link_by_expectation(node, ring)
            return
        at = node.request.at
        if ring.older is ring or ring.older.request.at < at:
            link(node, ring)
            return
        newer = ring.newer
        for _ in range(STEPS_MAX):
            if newer is ring or newer.request.at >= at:
                break
            newer = newer.newer
        link(node, newer)

    def _link_by_expectation(self, node: Block, ring: Ring) -> None:
        """Put a leaf behind those that are expected later, or nearly there."""
        times = self._expected.times
        mine, newer = times[node.key], ring.newer
        for _ in range(STEPS_MAX):
            if newer is ring or times[newer.key] <= mine:
                break
            newer = newer.newer
        link(node, newer)
