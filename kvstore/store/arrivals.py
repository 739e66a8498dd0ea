"""Who waits for blocks that are still being computed: another engine, here or on another host, that
will go on with them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from kvstore.model.block import BlockKey
from kvstore.model.errors import Unavailable

WAITS_MAX = 1024


class Arrivals:
    """Wakes those who wait for keys. Without any, a commit pays nothing."""

    def __init__(self) -> None:
        self._waiting: dict[BlockKey, set[asyncio.Event]] = {}
        self._waits = 0

    def committed(self, keys: Sequence[BlockKey]) -> None:
        """Wake who waits for one of `keys`: some of their parts have come."""
        if not self._waiting:
            return
        for key in keys:
            for event in self._waiting.get(key, ()):
                event.set()

    async def wait(self, keys: Sequence[BlockKey], missing: Callable[[], list[BlockKey]]) -> None:
        """Return when `missing`, asked after each arrival of one of `keys`, is empty.

        Raises Unavailable if too many wait.
        """
        if self._waits >= WAITS_MAX:
            raise Unavailable(f"{WAITS_MAX} reads wait for blocks already", reason="waits")
        event = asyncio.Event()
        self._waits += 1
        for key in keys:
            self._waiting.setdefault(key, set()).add(event)
        try:
            while missing():
                await event.wait()
                event.clear()
        finally:
            self._waits -= 1
            for key in keys:
                events = self._waiting.get(key)
                if events is not None:
                    events.discard(event)
                    if not events:
                        del self._waiting[key]
