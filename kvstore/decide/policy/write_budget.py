"""Which prefixes are written to flash when its endurance allows only so much a day.

Those that are most likely to be used again, as `returns.py` expects it. What is offered is counted
by its class, and what was offered longer ago counts for less: so it is known at what rate anything
likelier will come. A prefix is written if that leaves some of the budget for it:

    bytes/s offered of what is likelier  <  bytes/s of the budget * (1 + 2 * left / burst)

`left`, between minus and plus `burst`, is what was not spent so far, or overdrawn. It settles where
the budget is spent and no more: there, the least likely of what is written is written as far as
there is something left, and all that is likelier has credit. The last half of the credit is for
finishing what was begun.

No block is written unless the one before it is, and what follows a block that was just written, and
is as likely, goes with it: half of a prompt would be worth half as much.

Several budgets may lend each other what they do not use: see `spare_writes.py`. What one borrows
counts as its own, both for what is left and for the bytes/s of the budget.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from math import exp, isfinite
from typing import NamedTuple

from kvstore.decide.policy.returns import CLASSES, Returns
from kvstore.model.block import BlockKey

DAY_S = 86400.0
BURST_S = 1800.0
"""Of the budget: what may be saved up in a quiet time, and what may be overdrawn. Any span of time
sees at most its share of the budget, twice this, and a record: a day a 24th more than its own."""
MEMORY_S = 1800.0  # what was offered so long ago counts a third
MEMORY_MIN_S = 60.0  # of offers; before that, no rate is known
TICK_S = 1.0  # between two times that they fade, and that it is looked at which are likelier
AS_LIKELY = 0.9  # of what is expected of the block before
VERDICT_S = 10.0  # for so long what follows a block goes with it
VERDICTS_MAX = 1 << 12

_SAVED = struct.Struct("<8sIIdd")  # how long the two parts are that follow, left, seconds
_SAVED_MAGIC = b"kvbudge\1"  # the last byte is the version
_OFFERED = struct.Struct("<Hd")


class _Verdict(NamedTuple):
    """What was decided of a block, and what was expected of it then."""

    expected: float
    admitted: bool
    at: float


class WriteBudget:
    """Asked block by block, from the start of a prefix to its end. O(1), and once a second a sort
    of the classes that were offered: a few hundred."""

    def __init__(
        self, nbytes_per_day: int, now: Callable[[], float], returns: Returns | None = None
    ) -> None:
        """returns: what is expected of blocks, None: what is learned of them."""
        self._rate = nbytes_per_day / DAY_S
        self._burst = self._rate * BURST_S
        self._left = 0.0
        self._spare = 0.0  # earned since it was last asked for, and no room to save it up
        self._borrowed = 0.0  # bytes/s, as of the last time
        self.lend: Callable[[], None] | None = None  # divides what budgets have to spare
        self._now = now
        self._at = now()
        self._offered: dict[int, float] = {}  # bytes of each class
        self._offered_nbytes = 0.0  # of all classes, at the last tick,
        self._offered_s = 0.0  # in so much time
        self._faded_at = self._at
        self._likelier: dict[int, float] = {}  # bytes of the classes that are likelier
        self._verdicts: dict[BlockKey, _Verdict] = {}  # the latest ones, oldest first
        self._returns = returns or Returns(now)

    def set_rate(self, nbytes_per_day: int) -> None:
        """Go on with another budget; what was saved up or overdrawn stays within its bounds."""
        self._pass_time(self._now())
        self._rate = nbytes_per_day / DAY_S
        self._burst = self._rate * BURST_S
        self._left = min(self._burst, max(-self._burst, self._left))

    @property
    def rate(self) -> float:
        """Bytes a second that are its own."""
        return self._rate

    @property
    def missing(self) -> float:
        """Bytes that it could still save up, or has overdrawn."""
        return self._burst - self._left

    def offered(self, now: float) -> float:
        """Return how many bytes a second were offered lately."""
        stays = exp(-max(0.0, now - self._faded_at) / MEMORY_S)
        seconds = self._offered_s * stays + MEMORY_S * (1.0 - stays)
        return self._offered_nbytes * stays / max(seconds, MEMORY_MIN_S)

    def spare(self, now: float) -> float:
        """Give away what it earned since the last time and could not save up, in bytes."""
        self._earn(now)
        spare, self._spare = self._spare, 0.0
        return spare

    def borrow(self, nbytes: float, per_s: float) -> None:
        """Have bytes of other budgets, as far as there is room; and be as liberal as with so many
        bytes a second more, until the next time."""
        self._left = min(self._burst, self._left + nbytes)
        self._borrowed = per_s

    def asked(self, prefix: Sequence[BlockKey]) -> None:
        """Note that a request asks for a prefix, before any of it is offered for it."""
        self._returns.asked(prefix)

    def admits(
        self,
        key: BlockKey,
        nbytes: int,
        *,
        parent: BlockKey | None,
        begun: bool,
        half: bool = False,
    ) -> bool:
        """Return whether to write a record of a block, and spend it.

        begun: the file tier has, or is getting, the block before it, or needs none. half: it has,
        or is getting, another part of the same block.
        """
        if self.lend is not None:
            self.lend()
        now = self._now()
        self._pass_time(now)
        number = self._returns.class_of(key, parent)
        expected = self._returns.expected(number)
        if begun:  # else it could not be written however much is left
            self._offered[number] = self._offered.get(number, 0.0) + nbytes
        admitted = begun and self._left > -self._burst
        if admitted and not half:
            known = self._verdict(key, parent, expected, now)
            admitted = self._has_room_for(number) if known is None else known
        if admitted:
            self._left -= nbytes
        self._note(key, _Verdict(expected, admitted, now))
        return admitted

    def _verdict(
        self, key: BlockKey, parent: BlockKey | None, expected: float, now: float
    ) -> bool | None:
        """Return what was decided just now of another part of a block, or of the block before."""
        if self._is_fresh(key, now) and self._verdicts[key].expected == expected:
            return self._verdicts[key].admitted
        if parent is not None and self._is_fresh(parent, now):
            before = self._verdicts[parent]
            return before.admitted if expected >= AS_LIKELY * before.expected else None
        return None

    def _is_fresh(self, key: BlockKey | None, now: float) -> bool:
        known = self._verdicts.get(key) if key is not None else None
        return known is not None and now - known.at < VERDICT_S

    def _has_room_for(self, number: int) -> bool:
        if number not in self._likelier:
            self._rank()
        likelier = self._likelier[number] / max(self._offered_s, MEMORY_MIN_S)
        rate = self._rate + self._borrowed
        return likelier < rate * (1.0 + 2.0 * self._left / self._burst)

    def _earn(self, now: float) -> None:
        earned = self._left + (now - self._at) * self._rate
        self._left = min(self._burst, earned)
        self._spare += earned - self._left
        self._at = now

    def _pass_time(self, now: float) -> None:
        self._earn(now)
        passed = now - self._faded_at
        if passed >= TICK_S:
            stays = exp(-passed / MEMORY_S)
            self._offered = {
                number: nbytes * stays for number, nbytes in self._offered.items() if nbytes >= 1.0
            }
            self._offered_nbytes = sum(self._offered.values())
            self._offered_s = self._offered_s * stays + MEMORY_S * (1.0 - stays)
            self._faded_at = now
            self._likelier.clear()

    def _rank(self) -> None:
        """Look which classes are likelier than which now, whenever their bytes were offered."""
        expected = self._returns.expected
        ranked = sorted(((expected(number), number) for number in self._offered), reverse=True)
        likelier = as_likely = 0.0
        before = float("inf")
        for returns, number in ranked:
            if returns < before:
                likelier, as_likely, before = likelier + as_likely, 0.0, returns
            self._likelier[number] = likelier
            as_likely += self._offered[number]

    def _note(self, key: BlockKey, verdict: _Verdict) -> None:
        self._verdicts.pop(key, None)
        self._verdicts[key] = verdict
        if len(self._verdicts) > VERDICTS_MAX:
            del self._verdicts[next(iter(self._verdicts))]

    # ---- another life ------------------------------------------------------------------------

    def save(self) -> bytes:
        """Return what another life should know, for `split` and `load`: less than 100 KiB."""
        self._pass_time(self._now())
        offered = b"".join(_OFFERED.pack(*item) for item in self._offered.items())
        learned = self._returns.save()
        head = (_SAVED_MAGIC, len(offered), len(learned), self._left, self._offered_s)
        return _SAVED.pack(*head) + offered + learned

    @staticmethod
    def split(saved: bytes) -> tuple[bytes, bytes]:
        """Cut what `save` returned, if it is there, from what follows it."""
        if not saved.startswith(_SAVED_MAGIC) or len(saved) < _SAVED.size:
            return b"", saved
        _, offered, learned, *_ = _SAVED.unpack_from(saved)
        end = _SAVED.size + offered + learned
        return saved[:end], saved[end:]

    def load(self, saved: bytes) -> None:
        """Go on where another life was when it saved; what cannot be read is ignored. The time
        between the two earns nothing."""
        if not saved:
            return
        _, offered_nbytes, learned_nbytes, left, seconds = _SAVED.unpack_from(saved)
        rest = memoryview(saved)[_SAVED.size :]
        if len(rest) != offered_nbytes + learned_nbytes or offered_nbytes % _OFFERED.size:
            return
        offered = dict(_OFFERED.iter_unpack(rest[:offered_nbytes]))
        amounts = (seconds, *offered.values())
        if (
            not isfinite(left + sum(amounts))
            or min(amounts) < 0
            or max(offered, default=0) > CLASSES
        ):
            return
        self._left = min(self._burst, max(-self._burst, left))
        self._offered, self._offered_s = offered, seconds
        self._returns.load(bytes(rest[offered_nbytes:]))
