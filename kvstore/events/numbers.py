"""Sequence numbers that never go back, in this life or the next.

Routers ignore what has a lower number than what they have seen. So a life begins at the clock, in
milliseconds times 2**20, or after every number that an earlier life could have used, whichever is
more: the file says so in advance.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvstore.events.wire import SEQUENCE_MAX
from kvstore.system.notes import read_note, write_note

logger = logging.getLogger(__name__)

NUMBERS_FILE = "events.json"
NBYTES_MAX = 4096
AHEAD = 1 << 20  # numbers that may be used before the file is written again


class _Note(msgspec.Struct, frozen=True):
    last: int


class Numbers:
    """Where streams begin. directory: None if nothing outlives a restart; then only the clock
    counts. Its methods block."""

    def __init__(
        self, directory: Path | None, wall_ms: Callable[[], int] = lambda: int(time.time() * 1000)
    ) -> None:
        self._path = directory / NUMBERS_FILE if directory is not None else None
        self._clock = max(0, wall_ms()) << 20
        self.first = max(self._clock, self._saved() + 1)
        if self.first > SEQUENCE_MAX >> 1:  # a clock of the year 140000, or a file that lies
            self.first = self._clock
        self._reserved = -1
        self.use(self.first)

    def _saved(self) -> int:
        if self._path is None:
            return -1
        data = read_note(self._path, NBYTES_MAX)
        if data is None:
            return -1
        try:
            return msgspec.json.decode(data, type=_Note).last
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            logger.warning("file=ignored path=%s error=%r", self._path, str(error)[:200])
            return -1

    def use(self, number: int) -> None:
        """Note that numbers up to this one are used."""
        if number <= self._reserved:
            return
        self._reserved = number + AHEAD
        if self._path is not None:
            write_note(self._path, msgspec.json.encode(_Note(self._reserved)) + b"\n")
