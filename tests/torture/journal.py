"""What a daemon has promised its clients, and which bytes it may serve.

Every put writes bytes of its own, so that what is served tells when it was put. Two calls that
overlapped in time may have happened in either order; a call that failed may happen until the daemon
is dead. So:

- bytes may be served unless a delete was answered that began after their put had ended;
- a record must be there if a put of it was answered as durable (or as committed, before a flush
  that was answered as durable) and no delete, answered or not, ended later than that put began;
- unless it was evicted since then (the daemon wrote that down, and was allowed to), or damaged on
  the disk and not written anew since.

Of several tenants, each has a journal; bytes that another one has put are foreign.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf

from kvstore.model.block import BlockKey, Committed, NamespaceId
from tests.torture.spaces import SPACES, Item, is_fine, number_of, record_bytes

NUMBERS_EACH = 1 << 32


@dataclass(slots=True, eq=False)
class Call:
    """A put or a delete; `end` is inf while it may still happen. number: of its bytes."""

    number: int
    begin: float
    end: float = inf
    answered: bool = False


@dataclass(slots=True)
class History:
    """What happened to one record."""

    puts: dict[int, Call] = field(default_factory=dict)
    durable_from: float = -inf
    evicted_at: float = -inf
    damaged: bool = False


class Journal:
    """See the module. Writers of different keys may use it at once.

    others: of those who share the daemon; what only they have put is `foreign` to this one.
    """

    def __init__(self, owner: int = 0) -> None:
        """owner: whose it is. The numbers of no two owners' puts are the same."""
        self.others: Sequence[Journal] = ()
        self.accepted_nbytes = 0
        self.durable: Counter[str] = Counter()  # records answered as durable, by model
        self.away: set[Item] = set()  # on a disk that is not there now
        self._lock = threading.Lock()
        self._number = owner * NUMBERS_EACH
        self._histories: dict[Item, History] = {}
        self._deletes: defaultdict[NamespaceId | BlockKey, list[Call]] = defaultdict(list)
        self._open: list[Call] = []  # without an answer
        self._loose: list[tuple[Call, Sequence[Item]]] = []  # committed in this life, not durable

    # ---- calls -----------------------------------------------------------------------------------

    def put(self, items: Sequence[Item]) -> Call:
        """Note that a put begins."""
        with self._lock:
            call = self._began()
            for item in items:
                self._histories.setdefault(item, History()).puts[call.number] = call
            return call

    def put_done(self, call: Call, items: Sequence[Item], nbytes: int, done: Committed) -> None:
        """Note the answer to a put of records of about `nbytes` each."""
        with self._lock:
            in_time = self._ended(call)
            self.accepted_nbytes += done.committed * nbytes
            if done.refused:
                return  # which of them, is not said
            if not done.existing:
                for item in items:
                    self._histories[item].damaged = False
            if done.durable:
                self._promised(call, items)
            elif in_time:
                self._loose.append((call, items))

    def delete(self, *of: NamespaceId | BlockKey) -> Call:
        """Note that a delete of keys, or of a namespace, begins."""
        with self._lock:
            call = self._began()
            for each in of:
                self._deletes[each].append(call)
            return call

    def delete_done(self, call: Call) -> None:
        with self._lock:
            self._ended(call)

    def flushed(self, began: float) -> None:
        """Note that a flush which began then was answered as durable."""
        with self._lock:
            for call, items in self._loose:
                if call.end < began:
                    self._promised(call, items)
            self._loose = [each for each in self._loose if each[0].end >= began]

    def life_over(self) -> None:
        """The daemon is dead: what has not happened by now never will."""
        with self._lock:
            for call in self._open:
                call.end = time.monotonic()
            self._open, self._loose = [], []

    # ---- what may be lost ------------------------------------------------------------------------

    def evicted(self, item: Item, at: float) -> None:
        """The file tier gave a record up for room."""
        self._histories.setdefault(item, History()).evicted_at = at

    def damaged(self, item: Item) -> None:
        """Its bytes on the disk were changed: until somebody writes it anew, nothing is owed."""
        history = self._histories.setdefault(item, History())
        history.damaged, history.durable_from = True, -inf

    def disk_lost(self) -> None:
        """The next life is on another host: what a bucket has may be served, nothing is owed."""
        for item in self._histories:
            self.damaged(item)

    # ---- judgement -------------------------------------------------------------------------------

    def owed(self) -> Iterator[Item]:
        """Yield what must be served."""
        for item in list(self._histories):
            if self.is_owed(item):
                yield item

    def is_owed(self, item: Item) -> bool:
        history = self._histories.get(item, History())
        if is_fine(item) or item in self.away or history.durable_from <= history.evicted_at:
            return False
        deletes = self._deletes_of(item)
        return history.durable_from > max((call.end for call in deletes), default=-inf)

    def may_exist(self, item: Item) -> bool:
        """Whether any bytes at all may be served for a record, asked for now."""
        history = self._histories.get(item, History())
        return any(self._may_serve(item, call, time.monotonic()) for call in history.puts.values())

    def judge(self, item: Item, data: bytes, asked_at: float) -> str:
        """Return "" if `data` may be served to who asked then, else "wrong", "foreign" or
        "resurrected"."""
        number = number_of(item, data)
        call = self._put_of(item, number)
        if call is None and any(other._put_of(item, number) for other in self.others):
            return "foreign"
        if call is None or data != record_bytes(item, number, len(data)):
            return "wrong"
        return "" if self._may_serve(item, call, asked_at) else "resurrected"

    def was_put_by_others(self, item: Item) -> bool:
        """Whether somebody else has put a record, and the owner never has."""
        return item not in self._histories and any(item in o._histories for o in self.others)

    def _put_of(self, item: Item, number: int) -> Call | None:
        history = self._histories.get(item)
        return history.puts.get(number) if history is not None else None

    def _may_serve(self, item: Item, put: Call, asked_at: float) -> bool:
        return not any(
            each.answered and each.end < asked_at and each.begin > put.end
            for each in self._deletes_of(item)
        )

    def _deletes_of(self, item: Item) -> list[Call]:
        with self._lock:
            of = (item.namespace_id, item.key)
            return [call for each in of for call in self._deletes.get(each, ())]

    def _began(self) -> Call:
        self._number += 1
        call = Call(self._number, time.monotonic())
        self._open.append(call)
        return call

    def _ended(self, call: Call) -> bool:
        """Note an answer; False: it was read after the daemon that gave it had died."""
        call.answered = True
        if call not in self._open:
            return False
        call.end = time.monotonic()
        self._open.remove(call)
        return True

    def _promised(self, call: Call, items: Sequence[Item]) -> None:
        for item in items:
            self.durable[SPACES[item.namespace_id].title] += not is_fine(item)
            history = self._histories[item]
            if not history.damaged:
                history.durable_from = max(history.durable_from, call.begin)
