"""What the connector has done, and what it had to refuse; the log says that once a minute."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

LOG_EVERY_S = 60.0


@dataclass(slots=True)
class Counters:
    """Pages, unless said otherwise.

    looked_up, hits; loads, loaded; saves, saved; deleted.
    malformed: keys that are none of the engine's. too_large: beyond the bound of a page. partial:
    pages that are not full. no_room: the daemon did not take them. busy: over in_flight_max. late:
    past the deadline of a lookup or a save. away: the daemon was not there. unnamed: it was not
    known whose pages they are. failed: otherwise.
    """

    looked_up: int = 0
    hits: int = 0
    loads: int = 0
    loaded: int = 0
    saves: int = 0
    saved: int = 0
    deleted: int = 0
    malformed: int = 0
    too_large: int = 0
    partial: int = 0
    no_room: int = 0
    busy: int = 0
    late: int = 0
    away: int = 0
    unnamed: int = 0
    failed: int = 0
    _logged: dict[str, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, name: str, count: int) -> None:
        with self._lock:
            setattr(self, name, getattr(self, name) + count)

    def refuse(self, name: str, count: int, reason: str) -> None:
        """Count pages, and log why, but not for every one."""
        if not count:
            return
        self.add(name, count)
        now = time.monotonic()
        if now >= self._logged.get(name, 0.0) + LOG_EVERY_S:
            self._logged[name] = now
            logger.warning("%s=%d reason=%r", name, getattr(self, name), reason)

    def as_dict(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in self.__slots__ if not name.startswith("_")}
