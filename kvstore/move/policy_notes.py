"""What policies have learned, kept over restarts in a note of the file tier.

It is written when the node closes, and now and then before: a crash costs what was learned since.
What engines tell of their pace is written soon, because a start needs it for its first requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvstore.decide.planner import Planner
from kvstore.tier.file import Devices, DiskFailed, DiskFull

logger = logging.getLogger(__name__)

SAVE_EVERY_S = 300.0
SAVE_NEW_AFTER_S = 10.0  # what computing a block takes was told for a namespace the first time
SAVE_NEW_EVERY_S = 60.0  # an engine may begin a namespace with every step
CLOSE_S = 2.0  # for the last one; a disk that hangs is not waited for


class PolicyNotes:
    """Loads once, before the first block is found; then saves."""

    def __init__(self, planner: Planner, file: Devices | None, now: Callable[[], float]) -> None:
        self._planner = planner
        self._file = file
        self._now = now
        self._loading = asyncio.Lock()
        self._loaded = False
        self._save_at = 0.0
        self._save_new_at = 0.0  # not before
        self._newcomers = 0

    async def load(self) -> None:
        """Give policies what another life has saved. A second call waits for the first."""
        async with self._loading:
            if self._file is not None and not self._loaded:
                self._planner.load_policies(await self._file.notes.read())
                self._save_at = self._now() + SAVE_EVERY_S
            self._loaded = True

    async def save_now_and_then(self) -> None:
        """Save if it is time to."""
        if self._planner.costs.newcomers > self._newcomers:
            self._newcomers = self._planner.costs.newcomers
            soon = max(self._now() + SAVE_NEW_AFTER_S, self._save_new_at)
            self._save_at = min(self._save_at, soon)
        if self._loaded and self._now() >= self._save_at:
            await self.save()

    async def save(self) -> None:
        """Save what policies know now; a disk that does not take it is no error."""
        self._save_at = self._now() + SAVE_EVERY_S
        self._save_new_at = self._now() + SAVE_NEW_EVERY_S
        data = self._planner.save_policies() if self._loaded else b""
        if not data or self._file is None:
            return
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._file.notes.write(data)
        except (DiskFull, DiskFailed, TimeoutError) as error:
            logger.warning("policies=not_saved reason=%r", str(error))
