"""What would the tier hit if it followed another order? Two small models of it say so.

Both see the same sample of the traffic. A block is sampled by its key, which is a hash of its whole
prefix; so a sample has the same share of every prompt, however many share a system prompt, and a
model of `share` of the blocks in `share` of the room hits what the tier would (SHARDS, Waldspurger
et al., FAST'15). One model evicts by hazard, the other by last use. What one of them has hit
more than the other is summed up, and what was longer ago counts for less. The tier follows the
other order once the sum is larger than chance would make it: as a random walk of the same steps.
Where neither order is better the sum is such a walk, and each change loses what the walk takes back
until the next. So who followed hazard and lost by it asks for more of a sum the next time.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Collection, Sequence
from math import exp, sqrt
from typing import Any, NamedTuple

from kvstore.decide.policy.ghosts import Ghosts
from kvstore.decide.policy.hazard import Hazard, gap_class
from kvstore.decide.policy.hazard_nodes import Blocks, Request, Requests
from kvstore.decide.policy.leaves import Leaves
from kvstore.decide.rows import Rows
from kvstore.model.block import BlockKey

SHADOW_BLOCKS = 4096
ALL = 1 << 16  # a share of the keys is so many of these
MEMORY = 16.0
"""What was asked for so many times the room ago counts a third."""
DOUBT = 1.5  # standard deviations of chance, before the tier goes by hazard again
DOUBT_BACK = 1.0  # the same, before it goes by last use
DOUBT_GROWS = 1.5  # times DOUBT, for each time that it went by hazard again and hit less for it
LOST_MAX = 3  # of those times count
STAYS = 0.5  # of its room is asked of a shadow, at least, between two changes of the order
EVIDENCE_MIN = 16.0  # blocks of difference, squared and summed, before anything is believed
ROOM_STAYS = 1.0 - 1.0 / 512  # of the tier's room, until as much of it is seen to be used again

_SAVED = struct.Struct("<8s?")
_SAVED_MAGIC = b"kvshad\0\1"  # the last byte is the version


class Choice(NamedTuple):
    """Which order a tier follows, and what its shadows hit lately of what they were asked for.

    share: of the blocks that are sampled. blocks: that the shadows hold. switches: ever.
    """

    follows: str
    share: float
    blocks: int
    hit_ratios: dict[str, float]
    switches: int

    def to_dict(self) -> dict[str, Any]:
        """Return the same as plain numbers."""
        return {
            "follows": self.follows,
            "shadow_share": self.share,
            "shadow_blocks": self.blocks,
            "shadow_hit_ratios": self.hit_ratios,
            "switches": self.switches,
        }


class Shadows:
    """Bounded: at most `blocks_max` blocks in each shadow. O(1) a block that is sampled."""

    def __init__(self, hazard: Hazard, requests: Requests, blocks_max: int = SHADOW_BLOCKS) -> None:
        self._blocks_max = blocks_max
        self._hazard = hazard
        self._requests = requests
        self._by_hazard = self._new()
        self._ghosts = Ghosts()
        self._by_use: OrderedDict[BlockKey, None] = OrderedDict()
        self._sampled = ALL
        self._tier_blocks = 0.0
        self._asked = 0.0
        self._hits = 0.0, 0.0  # by hazard, by use
        self._ahead = 0.0  # what hazard hit more, in blocks times their worth
        self._squares = 0.0
        self._since = float("inf")  # the last change, what was asked for
        self._gain = 0.0  # since then, what hazard hit more
        self._lost = 0
        self.by_use = False
        self.switches = 0

    def room(self, blocks: int) -> None:
        """Note that the tier is full with so many blocks, or a few more."""
        self._tier_blocks = max(self._tier_blocks * ROOM_STAYS, float(blocks))

    def ask(self, prefix: Sequence[BlockKey], request: Request) -> bool:
        """Note a request for a prefix; returns whether the tier is to follow the other order."""
        keys = self._sample(prefix)
        if not keys:
            return False
        room = self._room()
        hazard = self._ask_by_hazard(keys, request, room)
        use = self._ask_by_use(keys, room)
        if max(len(self._by_use), self._by_hazard.tree.blocks) > self._blocks_max:
            self._sample_fewer()
        if room is None:
            return False
        stays = exp(-len(keys) / (MEMORY * max(1, room)))
        ahead = (hazard - use) * 2.0**request.level
        self._since += len(keys)
        self._asked = self._asked * stays + len(keys)
        self._hits = self._hits[0] * stays + hazard, self._hits[1] * stays + use
        self._ahead = self._ahead * stays + ahead
        self._squares = self._squares * stays**2 + ahead**2
        self._gain += ahead
        return ahead != 0.0 and self._since >= STAYS * room and self._is_time_to_switch()

    def end(self, prefix: Sequence[BlockKey]) -> None:
        """Note that the session that used these blocks last is over."""
        self._by_hazard.end(self._sample(prefix))

    def rescore(self) -> None:
        """Judge anew: the hazard was learned anew."""
        self._by_hazard.rescore()

    @property
    def choice(self) -> Choice:
        """What is followed, and why."""
        asked = max(1.0, self._asked)
        return Choice(
            "lru" if self.by_use else "hz",
            self._sampled / ALL,
            max(len(self._by_use), self._by_hazard.tree.blocks),
            {"hz": self._hits[0] / asked, "lru": self._hits[1] / asked},
            self.switches,
        )

    def _is_time_to_switch(self) -> bool:
        ahead, doubt = -self._ahead, DOUBT_BACK
        if self.by_use:
            ahead, doubt = self._ahead, DOUBT * DOUBT_GROWS**self._lost
        if self._squares < EVIDENCE_MIN or ahead <= doubt * sqrt(self._squares):
            return False
        if not self.by_use and self.switches:
            lost = self._lost + (1 if self._gain < 0.0 else -1)
            self._lost = min(max(0, lost), LOST_MAX)
        self.by_use = not self.by_use
        self.switches += 1
        self._since = self._gain = 0.0
        return True

    # ---- the sample --------------------------------------------------------------------------

    def _sample(self, prefix: Sequence[BlockKey]) -> Sequence[BlockKey]:
        sampled = self._sampled
        if sampled == ALL:
            return prefix
        high = sampled >> 8
        if not sampled & 0xFF:
            return [key for key in prefix if key[8] < high]
        return [key for key in prefix if key[8] <= high and key[8] << 8 | key[9] < sampled]

    def _sample_fewer(self) -> None:
        """Take half of the sample, and forget the other half."""
        if self._sampled == 1:
            return
        self._sampled //= 2
        before, self._by_hazard = self._by_hazard.tree, self._new()
        here = [before.rows.keys[row] for row in before]
        stay = dict.fromkeys(self._sample(here))
        for key in stay:
            self._move(before, key, stay)
        for row in before:
            before.ungive(row)
        self._by_use = OrderedDict.fromkeys(self._sample(list(self._by_use)))
        for sum_ in ("_ahead", "_asked", "_gain"):
            setattr(self, sum_, getattr(self, sum_) / 2)
        self._hits = self._hits[0] / 2, self._hits[1] / 2
        self._squares /= 2

    def _new(self) -> Leaves:
        return Leaves(self._hazard, self._requests, Rows(with_order=True))

    def _move(self, old: Blocks, key: BlockKey, stay: Collection[BlockKey]) -> None:
        """Add a block that stays; what comes before it is the nearest of those that stay."""
        keys, row = old.rows.keys, old.find(key)
        above = old.parents[row]
        while above and keys[above] not in stay:
            above = old.parents[above]
        tree = self._by_hazard.tree
        new = self._by_hazard.enter(key, keys[above] if above else None)
        tree.give(new, old.request(row))
        tree.uses[new], tree.marks[new] = old.uses[row], old.marks[row]
        if not tree.children[new]:
            self._by_hazard.link(new)

    def _room(self) -> int | None:
        """Return how many blocks a shadow may hold; None: the tier was never full."""
        if not self._tier_blocks:
            return None
        return max(1, round(self._tier_blocks * self._sampled / ALL))

    # ---- the two models ----------------------------------------------------------------------

    def _ask_by_use(self, keys: Sequence[BlockKey], room: int | None) -> int:
        order = self._by_use
        hits = 0
        for key in keys:
            if key not in order:
                break
            hits += 1
        for key in reversed(keys):
            order[key] = None
            order.move_to_end(key)
        if room is not None:
            while len(order) > room:
                order.popitem(last=False)
        return hits

    def _ask_by_hazard(self, keys: Sequence[BlockKey], request: Request, room: int | None) -> int:
        leaves, tree = self._by_hazard, self._by_hazard.tree
        here, rows = tree.here, tree.rows.find_all(keys)
        missing = [place for place, row in enumerate(rows) if not here[row]]
        hits = missing[0] if missing else len(keys)
        leaves.use(keys, request, None)
        if room is not None:
            self._evict(tree.blocks + len(missing) - room, request)
            missing = missing[: max(0, room - tree.blocks)]
        for place in missing:
            key = keys[place]
            row = leaves.enter(key, keys[place - 1] if place else None)
            tree.give(row, request)
            ghost = self._ghosts.find(key)
            tree.uses[row] = 1 if ghost is None else ghost.uses + 1
            tree.marks[row] = (
                request.gap if ghost is None else gap_class(request.at - ghost.used_at)
            )
            if not tree.children[row]:
                leaves.link(row)
        return hits

    def _evict(self, blocks: int, request: Request) -> None:
        """Evict so many blocks by hazard, none that the request has just used."""
        if blocks <= 0:
            return
        leaves, tree, put = self._by_hazard, self._by_hazard.tree, self._ghosts.put
        for row in leaves.victims(request.at):
            last = tree.request(row)
            if last is not request:
                put(tree.rows.keys[row], tree.uses[row], last.at, blocks=tree.blocks)
                leaves.leave(row)
                blocks -= 1
            if not blocks:
                break

    # ---- another life ------------------------------------------------------------------------

    def save(self) -> bytes:
        """Return which order was followed, for `split` and `load`."""
        return _SAVED.pack(_SAVED_MAGIC, self.by_use)

    @staticmethod
    def split(saved: bytes) -> tuple[bytes, bytes]:
        """Cut what `save` returned, if it is there, from what follows it."""
        if saved.startswith(_SAVED_MAGIC) and len(saved) >= _SAVED.size:
            return saved[: _SAVED.size], saved[_SAVED.size :]
        return b"", saved

    def load(self, saved: bytes) -> None:
        """Begin with the order that another life has followed; what cannot be read is ignored."""
        if len(saved) == _SAVED.size:
            _, self.by_use = _SAVED.unpack(saved)
