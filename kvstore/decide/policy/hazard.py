"""How likely is a block used again, by how it was used and how long ago? Learned online.

A block's *class* is how it was last used: the turn of the request that used it (1, 2, 3-5, 6+), how
many requests have used it (1, 2, 3-5, 6+), and the gap between its last two uses (none, < 20 s,
< 150 s, longer). A *sample* of the blocks, in the cache or not, is watched: when one is used again
after a gap, that is an event in the age bin of the gap; every second that one waits is exposure in
the bin of its age. So blocks that still wait count (they are censored, not ignored), and

    hazard(class, bin) = events / exposure

is unbiased. It is shrunk towards the hazard of all classes, times what the class's group (turn and
uses) differs from it, because most cells of the table are nearly empty. Beyond the data the hazard
decays: a block is not held for ages on the strength of no evidence. Blocks whose session has said
that it is over are classes of their own, because others may still come for the same prefix.

What eviction needs is the *index* of a block at age a, the best rate of hits for the room it takes
(the Gittins index of its remaining life):

    index(a) = max over b > a of  P(used between a and b) / E[time held until used or b]
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from functools import cache
from math import log2
from typing import Any

import numpy as np

from kvstore.model.block import KEY_NBYTES, BlockKey, split_keys

GAP_CLASSES = 4
ENDED_CLASS = 64  # from here on one for each number of uses: of sessions that said they are over
CLASSES = 68
BINS = 40
FIRST_BIN_S = 0.25
"""Bins are half octaves from here: bin j > 0 begins at 0.25 s * 2^(j/2), bin 0 at once."""
WAIT_MAX_S = 72 * 3600.0
SAMPLES_MAX = 1 << 15
SAMPLED_OF_256 = 64  # at first; halved whenever SAMPLES_MAX are waiting
DECAY = 0.8  # of the hazard, per bin without evidence
FIRST_HAZARD = 0.1  # per second, as long as nothing is known
GROUP_WEIGHT = 3.0  # events' worth of belief that a group is like all, and a class like its group
CLASS_WEIGHT = 6.0
ENDED_RATIO = 0.02  # of the hazard of all, until ended sessions have shown theirs

_COUNT_CLASS = (0, 0, 1, 2, 2, 2, 3)
COUNT_MAX = len(_COUNT_CLASS) - 1
_FIRST_CLASS = [[(turn * 4 + uses) * GAP_CLASSES for uses in _COUNT_CLASS] for turn in _COUNT_CLASS]
GAPS_S = (20.0, 150.0)

_SAVED = struct.Struct("<8sII")
_SAVED_MAGIC = b"kvhaz\0\0\1"  # the last byte is the version
_TURNS = (1, 2, 3, 6)  # the first of each class
_starts = FIRST_BIN_S * 2.0 ** (np.arange(BINS + 1) / 2)
_starts[0] = 0.0
_widths = np.diff(_starts)
_SLOTS = tuple(range(SAMPLES_MAX - 1, -1, -1))  # numbers that many policies of a process share


def gap_class(gap_s: float) -> int:
    """Return the class of a gap between two uses; 0 is for blocks that were used once."""
    if gap_s < GAPS_S[0]:
        return 1
    return 2 if gap_s < GAPS_S[1] else 3


def ended_class(uses: int) -> int:
    """Return the class of a block whose session has ended."""
    return ENDED_CLASS + _COUNT_CLASS[uses if uses < COUNT_MAX else COUNT_MAX]


def block_class(turn: int, uses: int, gap: int) -> int:
    """Return the class of a block. turn, uses: from 1, those beyond COUNT_MAX are alike."""
    turns = turn if turn < COUNT_MAX else COUNT_MAX
    return _FIRST_CLASS[turns][uses if uses < COUNT_MAX else COUNT_MAX] + gap


def turn_and_gap(number: int) -> tuple[int, int]:
    """Return the turn, or the least it may have been, and the gap that make a class."""
    if number >= ENDED_CLASS:
        return 1, 0
    return _TURNS[number // 16], number % GAP_CLASSES


def _bins(ages: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.clip(np.searchsorted(_starts, ages, side="right") - 1, 0, BINS - 1)


class Hazard:
    """Watches a sample of blocks; `refit` turns what was seen into `index`.

    Memory is bounded: at most SAMPLES_MAX blocks wait, for at most WAIT_MAX_S. When there are too
    many, half of them are watched no longer; what they have told stays true.
    """

    def __init__(self) -> None:
        self._sampled = SAMPLED_OF_256
        self._slot: dict[BlockKey, int] = {}
        self._free = list(_SLOTS[-SAMPLES_MAX:])
        self._used_at = array("d", bytes(8 * SAMPLES_MAX))
        self._class = array("B", bytes(SAMPLES_MAX))
        self._uses = array("B", bytes(SAMPLES_MAX))
        self._ended_class = array("B")  # of what waits no longer, since the last refit
        self._ended_age = array("d")
        self._ended_used = array("B")
        self._events = np.zeros((CLASSES, BINS))
        self._exposure = np.zeros((CLASSES, BINS))
        self.index: list[list[float]]
        """index[class][bin], at the start of the bin, hits per second; one bin more than BINS."""
        self.index = _first_index()

    def watch(self, prefix: Sequence[BlockKey], turn: int, gap: int, at: float) -> None:
        """Note that a request used these blocks. gap: class of the time since its predecessor."""
        limit = self._sampled
        for key in [key for key in prefix if key[-1] < limit]:
            slot = self._slot.get(key)
            if slot is None:
                if not self._free:
                    self._sample_fewer()
                    if key[-1] >= self._sampled:
                        continue
                slot = self._slot[key] = self._free.pop()
                uses, age = 1, 0.0
            else:
                age = at - self._used_at[slot]
                self._note_end(slot, age, used=True)
                uses = min(self._uses[slot] + 1, COUNT_MAX)
            self._used_at[slot] = at
            self._uses[slot] = uses
            self._class[slot] = block_class(turn, uses, gap if uses == 1 else gap_class(age))

    def end(self, prefix: Sequence[BlockKey]) -> None:
        """Note that the session that used these blocks last is over."""
        for key in prefix:
            slot = self._slot.get(key)
            if slot is not None:
                self._class[slot] = ended_class(self._uses[slot])

    def last_use(self, key: BlockKey) -> tuple[float, int, int] | None:
        """Return when a block that is watched was used last, its class and uses then."""
        slot = self._slot.get(key)
        if slot is None:
            return None
        return self._used_at[slot], self._class[slot], self._uses[slot]

    def save(self, now: float) -> bytes:
        """Return what was learned and who is watched: at most 1.4 MiB, for `load`."""
        self.refit(now)
        slots = np.fromiter(self._slot.values(), np.int64, len(self._slot))
        keys = [key for key in self._slot if len(key) == KEY_NBYTES]
        if len(keys) < len(slots):  # keys that were not made by a hash
            return b""
        return b"".join(
            (
                _SAVED.pack(_SAVED_MAGIC, self._sampled, len(keys)),
                self._events.astype("<f8").tobytes(),
                self._exposure.astype("<f8").tobytes(),
                (now - np.frombuffer(self._used_at)[slots]).astype("<f8").tobytes(),
                np.frombuffer(self._class, np.uint8)[slots].tobytes(),
                np.frombuffer(self._uses, np.uint8)[slots].tobytes(),
                b"".join(keys),
            )
        )

    def load(self, saved: bytes, now: float) -> bool:
        """Go on where another life was when it saved; False if that cannot be read."""
        if len(saved) < _SAVED.size:
            return False
        magic, sampled, count = _SAVED.unpack_from(saved)
        cells = CLASSES * BINS
        nbytes = _SAVED.size + 16 * cells + (8 + 1 + 1 + KEY_NBYTES) * count
        if magic != _SAVED_MAGIC or count > SAMPLES_MAX or len(saved) != nbytes:
            return False
        at = _SAVED.size
        tables = np.frombuffer(saved, "<f8", 2 * cells, at).reshape(2, CLASSES, BINS)
        at += 16 * cells
        ages = np.frombuffer(saved, "<f8", count, at)
        classes = saved[at + 8 * count : at + 9 * count]
        uses = saved[at + 9 * count : at + 10 * count]
        sane = np.isfinite(tables).all() and np.isfinite(ages).all() and (tables >= 0).all()
        if not sane or max(classes, default=0) >= CLASSES or not 1 <= sampled <= SAMPLED_OF_256:
            return False
        self._events, self._exposure = tables[0].copy(), tables[1].copy()
        self._sampled = sampled
        keys = split_keys(saved[at + 10 * count :], keys_max=SAMPLES_MAX)
        for i, (key, age) in enumerate(zip(keys, ages.tolist(), strict=True)):
            slot = self._slot[key] = self._free.pop()
            self._used_at[slot] = now - max(0.0, age)
            self._class[slot] = classes[i]
            self._uses[slot] = min(max(1, uses[i]), COUNT_MAX)
        self.refit(now)
        return True

    def refit(self, now: float) -> None:
        """Learn from what was seen until `now`. Takes a few milliseconds."""
        slots = np.fromiter(self._slot.values(), np.int64, len(self._slot))
        ages = now - np.frombuffer(self._used_at)[slots]
        if np.any(ages > WAIT_MAX_S):
            for key, age in zip(list(self._slot), ages.tolist(), strict=True):
                if age > WAIT_MAX_S:
                    self._give_up(key, now)
            slots = np.fromiter(self._slot.values(), np.int64, len(self._slot))
            ages = now - np.frombuffer(self._used_at)[slots]
        if self._ended_class:
            classes = np.array(self._ended_class)
            ended = np.array(self._ended_age)
            used = np.array(self._ended_used, dtype=bool)
            self._exposure += _exposure(classes, ended)
            np.add.at(self._events, (classes[used], _bins(ended[used])), 1.0)
            del self._ended_class[:], self._ended_age[:], self._ended_used[:]
        waiting = _exposure(np.frombuffer(self._class, np.uint8)[slots], ages)
        self.index = _index(_hazard(self._events, self._exposure + waiting)).tolist()

    def _sample_fewer(self) -> None:
        """Watch half of what is watched, as often as it takes to have room."""
        now = max(self._used_at)
        while not self._free and self._sampled > 1:
            self._sampled //= 2
            for key in [key for key in self._slot if key[-1] >= self._sampled]:
                self._give_up(key, now)
        if not self._free:  # keys that were not made by a hash
            self._give_up(next(iter(self._slot)), now)

    def _give_up(self, key: BlockKey, now: float) -> None:
        slot = self._slot.pop(key)
        self._free.append(slot)
        self._note_end(slot, now - self._used_at[slot], used=False)

    def _note_end(self, slot: int, age: float, *, used: bool) -> None:
        self._ended_class.append(self._class[slot])
        self._ended_age.append(age)
        self._ended_used.append(used)


@cache
def _first_index() -> list[list[float]]:
    """Return what is believed before anything was seen."""
    nothing = np.zeros((CLASSES, BINS))
    return _index(_hazard(nothing, nothing)).tolist()  # type: ignore[no-any-return]


def score(row: Sequence[float], age: float) -> float:
    """Return the index at `age` seconds, between those at the ends of its bin."""
    if age <= FIRST_BIN_S:
        return row[0]
    at = 2.0 * log2(age / FIRST_BIN_S)
    j = int(at)
    if j >= BINS:
        return row[BINS]
    low = row[j]
    return low + (row[j + 1] - low) * (at - j)


def _exposure(classes: np.ndarray[Any, Any], ages: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the seconds that blocks which waited from 0 to `ages` were in each bin."""
    reached = _bins(ages)
    count = np.zeros((CLASSES, BINS))
    seconds = np.zeros((CLASSES, BINS))
    np.add.at(count, (classes, reached), 1.0)
    np.add.at(seconds, (classes, reached), np.minimum(ages - _starts[reached], _widths[reached]))
    beyond = np.cumsum(count[:, ::-1], axis=1)[:, ::-1] - count
    return seconds + beyond * _widths


def _hazard(events: np.ndarray[Any, Any], exposure: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return hazards per second, (CLASSES, BINS), all positive."""
    pooled = np.empty(BINS)
    believed = FIRST_HAZARD
    for j, (seen, waited) in enumerate(zip(events.sum(axis=0), exposure.sum(axis=0), strict=True)):
        pooled[j] = believed = (seen + 1.0) / (waited + 1.0 / believed)
        believed *= DECAY
    groups = (-1, GAP_CLASSES, BINS)
    expected = exposure * pooled
    group_events = _smooth(events.reshape(groups).sum(axis=1))
    group_expected = _smooth(expected.reshape(groups).sum(axis=1))
    class_events, class_expected = _smooth(events), _smooth(expected)
    hazard = np.empty((CLASSES, BINS))
    group, own = np.ones(len(group_events)), np.ones(CLASSES)  # ratios, of the bin before
    group[ENDED_CLASS // GAP_CLASSES] = ENDED_RATIO
    for j in range(BINS):
        group = (group_events[:, j] + GROUP_WEIGHT * group) / (group_expected[:, j] + GROUP_WEIGHT)
        believed_ratio = np.repeat(group, GAP_CLASSES) * own
        ratio = (class_events[:, j] + CLASS_WEIGHT * believed_ratio) / (
            class_expected[:, j] + CLASS_WEIGHT
        )
        own = ratio / np.repeat(group, GAP_CLASSES)
        hazard[:, j] = pooled[j] * ratio
    return hazard


def _smooth(cells: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Add to every bin what its two neighbours have."""
    out = cells.copy()
    out[:, 1:] += cells[:, :-1]
    out[:, :-1] += cells[:, 1:]
    return out


def _index(hazard: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the index at the start of every bin, and once more beyond the last one."""
    used = -np.expm1(-hazard * _widths)  # in a bin, by what is alive at its start
    held = used / hazard  # expected seconds in it
    index = np.empty((CLASSES, BINS + 1))
    for j in range(BINS):
        alive = np.ones((CLASSES, BINS - j))
        np.cumprod(1.0 - used[:, j:-1], axis=1, out=alive[:, 1:])
        hits = np.cumsum(alive * used[:, j:], axis=1)
        time = np.cumsum(alive * held[:, j:], axis=1)
        index[:, j] = np.max(hits / time, axis=1)
    index[:, BINS] = index[:, BINS - 1] * DECAY
    return index
