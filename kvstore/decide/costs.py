"""What a byte of each namespace is worth: the seconds of prefill that a hit on it saves.

Engines tell what computing a block takes them, with every request. A block of a 70B model is a few
times larger than one of a 1B model, and takes many times as long. So each namespace has a *level*:
the binary logarithm of its seconds per byte over those of the median, by what was asked for lately.

Engines are believed only so far. No level is beyond LEVEL_MAX: whatever a namespace claims, its
blocks are kept for at most 16 times as long as those of the median. Who asks for little does not
move the median, so what it claims changes no level but its own. And one claim moves what is known
of its namespace by less than a factor of 1.4.

What is known outlasts the daemon. An engine that has just started does not know its pace yet: its
first requests go by what was told of its namespace before, so they are not slower than computing
either.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from math import exp2, isfinite, log2

from kvstore.model.block import Namespace, NamespaceId, Part

LEVEL_MAX = 4
TELLERS_MAX = 256  # namespaces; who has not asked for the longest time is forgotten
TOLD_WEIGHT = 0.1  # of what is told, against what was told before
JUDGED_ASKS = 32  # between two looks at all levels
STAYS = 0.9  # of what was asked for, from one look to the next
STEP_MAX = 4.0  # octaves: a claim further off counts as one that is so far off
S_PER_BLOCK_MIN, S_PER_BLOCK_MAX = 1e-7, 1e4  # no engine is outside of these
LOOSE = 0.75  # octaves between a cost and its level, before it gets another: it does not flap
_SAVED = struct.Struct("<8sI")  # how many tellers follow
_SAVED_MAGIC = b"kvcosts\1"  # the last byte is the version
_TELLER = struct.Struct("<32sdd")  # namespace, log_cost, asked
_LOG_COST_MAX = 128.0  # of any time within the bounds, over any size


class _Teller:
    """log_cost: of the seconds per byte. asked: blocks, lately."""

    __slots__ = ("asked", "level", "log_cost")

    def __init__(self, log_cost: float) -> None:
        self.log_cost = log_cost
        self.asked = 0.0
        self.level = 0

    def judge(self, median: float) -> None:
        """Take a level that fits, unless the present one does about."""
        octaves = self.log_cost - median
        if abs(octaves - self.level) > LOOSE:
            self.level = max(-LEVEL_MAX, min(LEVEL_MAX, round(octaves)))


class Costs:
    """Bounded: TELLERS_MAX namespaces. O(1) a request."""

    def __init__(self) -> None:
        self._tellers: OrderedDict[NamespaceId, _Teller] = OrderedDict()  # who asked last is last
        self._median = 0.0  # of log_cost, when last judged
        self.newcomers = 0  # namespaces that have told for the first time, ever
        self._asks = 0

    def told(self, namespace: Namespace, s_per_block: float, blocks: int) -> None:
        """Note that somebody who asks for so many blocks says what computing one takes. What is no
        time is ignored."""
        if not isfinite(s_per_block) or s_per_block <= 0.0:
            return
        log_cost = log2(_bounded(s_per_block)) - log2(block_nbytes(namespace))
        teller = self._tellers.get(namespace.id)
        if teller is None:
            teller = self._tellers[namespace.id] = _Teller(log_cost)
            teller.judge(self._median)
            self.newcomers += 1
            if len(self._tellers) > TELLERS_MAX:
                self._tellers.popitem(last=False)
        self._tellers.move_to_end(namespace.id)
        off = max(-STEP_MAX, min(STEP_MAX, log_cost - teller.log_cost))
        teller.log_cost += TOLD_WEIGHT * off
        teller.asked += blocks
        if self._asks % JUDGED_ASKS == 0:
            self._judge()
        self._asks += 1

    def s_per_block(self, namespace: Namespace) -> float:
        """Return what computing a block takes, as was told lately; 0 if nobody has told."""
        teller = self._tellers.get(namespace.id)
        if teller is None:
            return 0.0
        return _bounded(exp2(teller.log_cost + log2(block_nbytes(namespace))))

    def level(self, namespace_id: NamespaceId) -> int:
        """Return the level of a namespace, 0 if nobody has told what it costs."""
        teller = self._tellers.get(namespace_id)
        return teller.level if teller is not None else 0

    @property
    def levels(self) -> dict[NamespaceId, int]:
        """Return the levels of all whose cost is known."""
        return {namespace_id: teller.level for namespace_id, teller in self._tellers.items()}

    def save(self) -> bytes:
        """Return what another life should know, for `load`: 12 KiB at most; nothing of nobody."""
        if not self._tellers:
            return b""
        saved = [_TELLER.pack(name, t.log_cost, t.asked) for name, t in self._tellers.items()]
        return _SAVED.pack(_SAVED_MAGIC, len(saved)) + b"".join(saved)

    def load(self, saved: bytes) -> bytes:
        """Take what `save` returned, if it is there; returns the bytes that follow it. What cannot
        be is ignored, and who has told meanwhile is believed."""
        if not saved.startswith(_SAVED_MAGIC) or len(saved) < _SAVED.size:
            return saved
        end = _SAVED.size + _SAVED.unpack_from(saved)[1] * _TELLER.size
        if len(saved) < end:
            return b""
        for name, log_cost, asked in _TELLER.iter_unpack(saved[_SAVED.size : end]):
            known = NamespaceId(name)
            sound = abs(log_cost) <= _LOG_COST_MAX and 0.0 <= asked < float("inf")
            if sound and known not in self._tellers and len(self._tellers) < TELLERS_MAX:
                teller = self._tellers[known] = _Teller(log_cost)
                teller.asked = asked
        self._judge()
        return saved[end:]

    def _judge(self) -> None:
        """Compare all with the median, and let what was asked for longer ago count for less."""
        tellers = sorted(self._tellers.values(), key=lambda teller: teller.log_cost)
        half = sum(teller.asked for teller in tellers) / 2
        for teller in tellers:
            half -= teller.asked
            if half <= 0.0:
                self._median = teller.log_cost
                break
        for teller in tellers:
            teller.judge(self._median)
            teller.asked *= STAYS


def _bounded(s_per_block: float) -> float:
    return max(S_PER_BLOCK_MIN, min(S_PER_BLOCK_MAX, s_per_block))


def block_nbytes(namespace: Namespace) -> int:
    """Return the bytes of most blocks, all groups and shards, without their fine parts."""
    return sum(
        usual_nbytes(namespace, Part(index, 0)) * each.shards
        for index, each in enumerate(namespace.groups)
        if each.refines == -1
    )


def usual_nbytes(namespace: Namespace, part: Part) -> int:
    """Return the bytes that most records of `part` have, the most where nothing else is known: in a
    lossy namespace few bases are exact."""
    refining = (namespace.groups[index] for index in namespace.fine)
    sizes = (group.base_nbytes for group in refining if group.refines == part.group)
    return next(sizes, namespace.record_nbytes(part))
