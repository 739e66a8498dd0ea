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

from kvstore.block import BlockKey
from kvstore.policy.ghosts import Ghosts
from kvstore.policy.hazard import CLASSES, Hazard, block_class, ended_class, gap_class, score
from kvstore.policy.prefix_tree import Node, PrefixTree, link, unlink

REFIT_REQUESTS = 200
FIRST_REFITS = (25, 50, 100)
PATHS_MAX = 1 << 16  # requests of which it is known where they ended
BRANCHES_MAX = 2  # what more requests begin with is no conversation: a system prompt
ROOTS_MAX = 1 << 12  # requests whose first block may still come
SCORES_S = 0.25  # for so long a score is good
STALE_S = 300.0  # a block put so long after its parent was used is used now
STEPS_MAX = 64  # in search of the place of a parent that has become a leaf

_FOUND = CLASSES  # the ring of what an earlier life has left
_RINGS = CLASSES + 1


class _Request:
    """A use. session: the same object in all requests of a conversation. gap: its class.
    branches: how many requests went on from it."""

    __slots__ = ("at", "branches", "gap", "session", "turn")

    def __init__(self, at: float, turn: int, gap: int, session: object) -> None:
        self.at = at
        self.turn = turn
        self.gap = gap
        self.session = session
        self.branches = 0


class _Block(Node):
    """shared: used by two sessions. ended: its session is over. found: of an earlier life."""

    __slots__ = ("ended", "found", "gap", "request", "shared", "uses")

    request: _Request

    def __init__(self, key: BlockKey) -> None:
        super().__init__(key)
        self.uses = 0
        self.gap = 0
        self.shared = False
        self.ended = False
        self.found = False


class HazardDensity:
    """O(1) a block, and a few milliseconds every 200 requests."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._tree = PrefixTree(_Block)
        self._rings = [Node(BlockKey(b"")) for _ in range(_RINGS)]
        self._hazard = Hazard()
        self._ghosts = Ghosts()
        self._requests = 0
        self._paths: dict[BlockKey, _Request] = {}  # by the last block; oldest first
        self._roots: dict[BlockKey, _Request] = {}  # by the first block; oldest first
        self._before = _Request(now(), 1, 0, object())  # the use of what is found
        self._heads: list[Node | None] = [None] * _RINGS
        self._scores = [0.0] * _RINGS
        self._scored_at = float("-inf")

    def __len__(self) -> int:
        return self._tree.blocks

    # ---- use ---------------------------------------------------------------------------------

    def touch(self, prefix: Sequence[BlockKey]) -> None:
        if not prefix:
            return
        request = self._begin(prefix)
        self._hazard.watch(prefix, request.turn, request.gap, request.at)
        nodes = self._tree.nodes
        before, gap, shared = None, 0, False
        for key in prefix:
            node = nodes.get(key)
            if node is None or not node.here:
                continue
            if node.request is not before:  # once for all blocks that were last used together
                before = node.request
                gap = gap_class(request.at - before.at)
                shared = before.session is not request.session
            node.request = request
            node.uses += 1
            node.gap = gap
            node.ended = node.found = False
            if shared:
                node.shared = True
            if not node.children:
                unlink(node)
                link(node, self._ring_of(node))

    def alone(self, prefix: Sequence[BlockKey]) -> Sequence[BlockKey]:
        found = map(self._tree.find, prefix)
        return [node.key for node in found if node is not None and not node.shared]

    def end(self, keys: Sequence[BlockKey]) -> None:
        self._hazard.end(keys)
        for key in keys:
            node = self._tree.find(key)
            if node is not None:
                node.ended = True
                if not node.children:
                    unlink(node)
                    self._link_by_use(node)

    def _begin(self, prefix: Sequence[BlockKey]) -> _Request:
        """Return the request for a prefix, with its turn and session."""
        at = self._now()
        paths = self._paths
        last = None
        for key in reversed(prefix):
            last = paths.get(key)
            if last is not None and last.branches < BRANCHES_MAX:
                break
        else:
            last = None
        if last is None:
            request = _Request(at, 1, 0, object())
        else:
            last.branches += key != prefix[-1]  # the same prompt again is no branch
            request = _Request(at, last.turn + 1, gap_class(at - last.at), last.session)
        if (known := paths.get(prefix[-1])) is None or known.branches < BRANCHES_MAX:
            _put_last(paths, prefix[-1], request, PATHS_MAX)
        _put_last(self._roots, prefix[0], request, ROOTS_MAX)
        self._requests += 1
        if self._requests % REFIT_REQUESTS == 0 or self._requests in FIRST_REFITS:
            self._hazard.refit(at)
            self._scored_at = float("-inf")
        return request

    # ---- come and go -------------------------------------------------------------------------

    def insert(self, key: BlockKey, parent: BlockKey | None) -> None:
        node = self._enter(key, parent)
        if node is None:
            return
        node.found = False
        node.request = request = self._request_of(node)
        ghost = self._ghosts.find(key)
        if ghost is None:
            node.uses, node.gap = 1, request.gap
        else:
            node.uses, node.gap = ghost.uses + 1, gap_class(request.at - ghost.used_at)
        if not node.children:
            link(node, self._ring_of(node))

    def adopt(self, key: BlockKey, parent: BlockKey | None) -> None:
        node = self._enter(key, parent)
        if node is not None:
            node.found = True
            node.request, node.uses, node.gap = self._before, 1, 0
            if not node.children:
                link(node, self._ring_of(node))

    def remove(self, key: BlockKey) -> None:
        left = self._tree.leave(key)
        if left is None:
            return
        node, above = left
        if not node.children:
            unlink(node)
        self._ghosts.put(key, node.uses, node.request.at, blocks=self._tree.blocks)
        if above is not None and above.here and not above.children:
            self._link_by_use(above)

    def _enter(self, key: BlockKey, parent: BlockKey | None) -> _Block | None:
        node = self._tree.enter(key, parent)
        if node is not None:
            node.shared = node.ended = False
            above = node.parent
            if above is not None and above.here and above.children == 1:
                unlink(above)  # it is a leaf no longer
        return node

    def _request_of(self, node: _Block) -> _Request:
        """Return the request that a block was computed for."""
        above: _Block | None = node.parent
        if above is not None and above.here:
            request = above.request
        else:
            request = self._roots.get(node.key, self._before)
        at = self._now()
        if at - request.at < STALE_S and request is not self._before:
            return request
        return _Request(at, request.turn, request.gap, request.session)

    # ---- who leaves --------------------------------------------------------------------------

    def victims(self) -> Iterator[BlockKey]:
        passed: dict[int, Node] = {}  # ring -> the newest of its blocks that were passed over
        while True:
            number = self._lowest(passed)
            if number is None:
                return
            node = _next_leaf(passed.get(number, self._rings[number]))
            yield node.key
            if node.here:
                passed[number] = node

    def _lowest(self, passed: dict[int, Node]) -> int | None:
        """Return the ring whose oldest block, of those not passed over, has the lowest score."""
        now = self._now()
        if now - self._scored_at > SCORES_S:
            self._heads = [None] * _RINGS
            self._scored_at = now
        best, lowest = None, float("inf")
        heads, scores = self._heads, self._scores
        for number, ring in enumerate(self._rings):
            head = _next_leaf(passed[number]) if number in passed else ring.newer
            if head is ring:
                continue
            if head is not heads[number]:
                heads[number] = head
                scores[number] = self._score(number, head, now)
            if scores[number] < lowest:
                best, lowest = number, scores[number]
        return best

    def _score(self, number: int, head: Node, now: float) -> float:
        assert isinstance(head, _Block)
        row = self._hazard.index[number if number < CLASSES else block_class(1, 1, 0)]
        return score(row, now - head.request.at)

    def _ring_of(self, node: _Block) -> Node:
        if node.found:
            return self._rings[_FOUND]
        if node.ended:
            return self._rings[ended_class(node.uses)]
        return self._rings[block_class(node.request.turn, node.uses, node.gap)]

    def _link_by_use(self, node: _Block) -> None:
        """Put a parent that has become a leaf where its last use says, or nearly there.

        Most were last used with the child that left, which was the oldest: so is the parent.
        """
        ring = self._ring_of(node)
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


def _next_leaf(node: Node) -> Node:
    """Return what comes after a node of a ring, the ring itself at its end.

    The node may have left while somebody walked there; it still points to newer ones.
    """
    node = node.newer
    while not node.here and node.key:
        node = node.newer
    return node


def _put_last(
    requests: dict[BlockKey, _Request], key: BlockKey, request: _Request, count_max: int
) -> None:
    requests.pop(key, None)
    requests[key] = request
    if len(requests) > count_max:
        del requests[next(iter(requests))]
