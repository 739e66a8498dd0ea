"""The numbers of frames, one count for all devices: a higher one was begun later."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.format.frame import NO_SEQUENCE


class Sequences:
    """in_flight: the numbers of runs that are being written, to whichever device."""

    def __init__(self) -> None:
        self.in_flight: set[int] = set()
        self._next = 1

    def take(self) -> int:
        """Return the next frame's number."""
        self._next += 1
        return self._next - 1

    def begin_runs(self, count: int) -> list[int]:
        """Return numbers for frames of records.

        Tombstones that would kill these frames are kept until `end_runs`: then the frames are
        durable, or never will be.
        """
        numbers = [self.take() for _ in range(count)]
        self.in_flight.update(numbers)
        return numbers

    def end_runs(self, numbers: Sequence[int]) -> None:
        """See `begin_runs`."""
        self.in_flight.difference_update(numbers)

    def lowest_in_flight(self) -> int:
        return min(self.in_flight, default=NO_SEQUENCE)

    def go_on_from(self, sequence: int) -> None:
        """Take no lower number from now on."""
        self._next = max(self._next, sequence)
