"""One topic: its sequence numbers, its pace, and what of it can be sent again.

A stream of its own (`clears`) may be wiped by AllBlocksCleared: nobody else tells in it. In the
topic of an engine the engine tells of its GPU, so there only blocks by name are taken back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvstore.events.book import Book, Step, events_of
from kvstore.events.wire import AllBlocksCleared, Event

BATCHES_PER_S = 10
REPLAYED_EVENTS_MAX = 1 << 20  # 8 bytes each, of one topic
YOUNG_S = 60.0  # after a start, whoever joins may believe what an earlier life has said

Numbered = tuple[int, list[Event]]


class _Kept(NamedTuple):
    """What replay makes a batch of: the blocks it told of, by name."""

    number: int
    clear: bool
    steps: Sequence[Step]


class Stream:
    """One topic. Times are seconds of one clock.

    model: whose blocks it tells, None for all. first: its first sequence number. batches_max: that
    replay can fill.
    """

    def __init__(
        self,
        topic: bytes,
        book: Book,
        *,
        model: str | None,
        clears: bool,
        first: int,
        batches_max: int,
        now: float,
    ) -> None:
        self.topic = topic
        self.model = model
        self.clears = clears
        self.next = first
        self.joined = 0  # subscribers
        self._book = book
        self._batches: deque[_Kept] = deque()
        self._batches_max = batches_max
        self._kept_events = 0
        self._began = now
        self._snapshot: Iterator[list[Step]] | None = None
        self._clear = False
        self._again = False

    @property
    def batches(self) -> int:
        """How many can be sent again."""
        return len(self._batches)

    @property
    def telling_all(self) -> bool:
        """Whether somebody has joined who was not told everything yet."""
        return self._snapshot is not None or self._again

    def join(self, now: float) -> None:
        """Tell everything again: somebody has joined."""
        self.joined += 1
        self.tell_all(now)

    def tell_all(self, now: float) -> None:
        """Tell everything again. Several at once cost one snapshot."""
        if self._snapshot is not None:
            self._again = True
            return
        self._begin(now)

    def _begin(self, now: float) -> None:
        # A clear makes others, who know everything, miss for as long as the snapshot takes.
        self._clear = self.clears and (self.joined <= 1 or now < self._began + YOUNG_S)
        self._snapshot = self._book.whole(self.model, cleared=self._clear)

    def batch(self, steps: Sequence[Step], now: float) -> Numbered | None:
        """Return the next batch and its number: `steps` of its model, and a part of a snapshot if
        one is due. None: nothing to tell."""
        mine = [s for s in steps if self.model is None or s.space.model == self.model]
        clear = self._clear
        if self._snapshot is not None:
            self._clear = False
            part = next(self._snapshot, None)
            if part is not None:
                mine = [*part, *mine]
            elif not self._again:
                self._snapshot = None
            else:
                self._again = False
                self._begin(now)
        events = _with(clear, mine)
        if not events:
            return None
        number, self.next = self.next, self.next + 1
        self._keep(_Kept(number, clear, mine))
        return number, events

    def _keep(self, batch: _Kept) -> None:
        self._batches.append(batch)
        self._kept_events += sum(len(step.hashes) for step in batch.steps)
        while len(self._batches) > self._batches_max or (
            self._kept_events > REPLAYED_EVENTS_MAX and len(self._batches) > 1
        ):
            old = self._batches.popleft()
            self._kept_events -= sum(len(step.hashes) for step in old.steps)

    def replay(self, start: int) -> tuple[str, Iterator[Numbered]]:
        """Return how a replay from a number on can be answered, and the batches.

        future: there is none yet. kept: they were kept. whole: they were not, so everything is
        told; as many batches as it takes have numbers from `start` to the last one.
        """
        if start >= self.next:
            return "future", iter(())
        if self._batches and start >= self._batches[0].number:
            return "kept", self._kept(start)
        return "whole", self._whole(start)

    def _kept(self, start: int) -> Iterator[Numbered]:
        for number, clear, steps in list(self._batches):
            if number >= start:
                yield number, _with(clear, steps)

    def _whole(self, start: int) -> Iterator[Numbered]:
        last = self.next - 1
        number, clear = start, self.clears
        for steps in self._book.whole(self.model, cleared=self.clears):
            yield min(number, last), _with(clear, steps)
            number, clear = number + 1, False
        yield last, _with(clear, ())


def _with(clear: bool, steps: Sequence[Step]) -> list[Event]:
    return [AllBlocksCleared(), *events_of(steps)] if clear else events_of(steps)
