"""Watches the bytes that directories really take."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

EVERY_S = 0.005
LOOKS = 3


def physical_nbytes(directories: Sequence[Path]) -> int:
    """Return the bytes of the segments' blocks now, in all of them together."""
    return sum(map(_physical_nbytes, directories))


def _physical_nbytes(directory: Path) -> int:
    nbytes = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            try:
                nbytes += entry.stat().st_blocks * 512 * entry.name.endswith(".segment")
            except FileNotFoundError:
                pass  # unlinked since it was listed
    return nbytes


class CapWatch:
    """Looks all the time, from its entry to its exit. `overshoot_bytes`: the worst moment.

    The files are not looked at in one instant: what moved from one to another meanwhile would count
    twice. So it is the least of three looks that has to be under the cap.
    """

    def __init__(self, directories: Sequence[Path], capacity_bytes: int) -> None:
        self.overshoot_bytes = 0
        self.looks = 0
        self._directories = directories
        self._capacity_bytes = capacity_bytes
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(EVERY_S):
            most = self._capacity_bytes + self.overshoot_bytes
            if physical_nbytes(self._directories) > most:
                least = min(physical_nbytes(self._directories) for _ in range(LOOKS))
                self.overshoot_bytes = max(self.overshoot_bytes, least - self._capacity_bytes)
            self.looks += 1
