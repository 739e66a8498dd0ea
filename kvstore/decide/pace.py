"""Never slower than recompute: what is worth bringing up, and until when to wait for it.

A load races the engine, which could compute the same blocks at a pace it tells. `Pace` remembers
how long loads of about this size took, and refuses those that would lose. A prediction may be
wrong, so a `Race` bounds what is lost then: what has come of the prefix, without a gap, buys the
time that computing it would have taken, and nothing else does.

    loss so far = time waited - what computing the start that came would have taken <= patience

So an answer comes at most `patience_s` later than recomputing would have. What another engine is
still computing (`elsewhere_s`) has to be computed there before it can come, so a load of that may
lose as much more. A hybrid model cannot use a prefix that was cut: the windows that it would need
there were not asked for. Of such a load only the whole counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

PATIENCE = 0.07
"""Of the time that computing the whole prompt would take: what a load may lose at most, while
nothing is known of the tier. Once its pace is known, what it usually takes may be waited for. With
what saving costs then, a prompt that has to be computed after all takes up to a tenth more."""
PATIENCE_SAVED_MAX = 0.5
"""Of what the load would save: even a tier that is known to be slow to begin gets no more."""
FIRST_DEVIATION = 0.25
"""Of the first sample: what is usual is twice as much then, until there are more."""
FORGET_S = 30.0
"""A tier that was too slow this long ago is tried again, by one load. What that one tells is
believed in the place of all before it."""
SIZES = 48  # powers of two, in bytes


@dataclass(frozen=True, slots=True)
class Stakes:
    """What the engine would do instead. saved_s: computing what is to be promoted; prompt_s:
    computing all it asked for; began: when it asked, on the clock of `Pace`."""

    saved_s: float
    prompt_s: float
    began: float


@dataclass(frozen=True, slots=True)
class Race:
    """One load under way. predicted_s: None if nothing is known, or trusted any more. elsewhere_s:
    what computing takes of it that another engine is computing now. whole: nothing of it can be
    used before all of it has come."""

    stakes: Stakes
    patience_s: float
    predicted_s: float | None
    elsewhere_s: float = 0.0
    whole: bool = False

    def until(self, share: float) -> float:
        """Return how long to wait on, when `share` (0 to 1) of the prefix has come, from its start
        on and without a gap."""
        patience_s = self.patience_s + self.elsewhere_s
        usable = 0.0 if self.whole and share < 1.0 else share
        return self.stakes.began + patience_s + usable * self.stakes.saved_s


class Average:
    """A moving mean and mean deviation, as TCP keeps them of round trips (RFC 6298), but for the
    deviation of the first."""

    __slots__ = ("at", "deviation", "mean")

    def __init__(self, sample: float, at: float) -> None:
        self.mean, self.deviation, self.at = sample, FIRST_DEVIATION * sample, at

    def add(self, sample: float, at: float) -> None:
        self.deviation += (abs(sample - self.mean) - self.deviation) / 4
        self.mean += (sample - self.mean) / 8
        self.at = at

    @property
    def usual(self) -> float:
        """What few samples exceed."""
        return self.mean + 4 * self.deviation


class Pace:
    """How long loads from one tier take: seconds per byte, by the power of two of their size.

    By size, because a load of one block is all latency and one of a thousand all bandwidth. While a
    load that was given up is still under way, the tier is slow, whatever it was before.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._by_size: list[Average | None] = [None] * SIZES
        self._tried_again: set[int] = set()  # sizes whose next sample replaces what is known
        self._behind = 0
        self._behind_at = 0.0

    def note(self, nbytes: int, seconds: float) -> None:
        """Learn from a load that brought all its bytes."""
        size = _size(nbytes)
        known = self._by_size[size]
        if known is None or size in self._tried_again:
            self._by_size[size] = Average(seconds / nbytes, self._now())
            self._tried_again.discard(size)
        else:
            known.add(seconds / nbytes, self._now())

    def fell_behind(self) -> None:
        """Note that a load is not waited for any more; `caught_up` when it has ended."""
        self._behind += 1
        self._behind_at = self._now()

    def caught_up(self) -> None:
        self._behind -= 1

    def predict(self, nbytes: int) -> float | None:
        """Return the seconds that a load would take, None if there was none of its size."""
        known = self._by_size[_size(nbytes)]
        return known.mean * nbytes if known else None

    def loses(self, nbytes: int, saved_s: float, *, whole: bool = False) -> bool:
        """Return whether computing takes less than loading, as far as is known. whole: or the load
        might be given up before it has come, when all the time waited is lost: see `Race`."""
        known = self._by_size[_size(nbytes)]
        if known is None or self._behind:
            return bool(self._behind)
        if whole:
            return known.usual * nbytes > PATIENCE_SAVED_MAX * saved_s
        return known.mean * nbytes > saved_s

    def race(
        self, nbytes: int, stakes: Stakes, *, elsewhere_s: float = 0.0, whole: bool = False
    ) -> Race | None:
        """Return the terms on which to bring `nbytes` up; None: computing them is faster."""
        known, now = self._by_size[_size(nbytes)], self._now()
        patience_s = PATIENCE * stakes.prompt_s
        if self.loses(nbytes, stakes.saved_s, whole=whole):
            if now - max(known.at if known else 0.0, self._behind_at) < FORGET_S:
                return None
            self._behind_at = now
            self._tried_again.add(_size(nbytes))
            known = None
        if known is None:
            return Race(stakes, patience_s, None, elsewhere_s, whole)
        usual_s = known.usual * nbytes
        patience_s = max(patience_s, min(usual_s, PATIENCE_SAVED_MAX * stakes.saved_s))
        return Race(stakes, patience_s, known.mean * nbytes, elsewhere_s, whole)


def _size(nbytes: int) -> int:
    return min(nbytes.bit_length(), SIZES - 1)
