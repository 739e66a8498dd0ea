"""Links of connections that are used no more, open while somebody may still touch their arena.

A link is how the daemon knows that nobody touches an ended session's slots any more: it stays open
while somebody has views of its arena, or a reservation to write into, for a bounded time.
"""

from __future__ import annotations

import asyncio
import logging
import time

from kvstore.client.connection import Connection

logger = logging.getLogger(__name__)

RETIRED_LINK_S = 60.0
RETIRED_LINK_MIN_S = 1.0  # what is granted now is viewed by then
RETIRED_POLL_S = 0.1
RETIRED_MAX = 8


class RetiredLinks:
    """Those of one client."""

    def __init__(self) -> None:
        self._reserved: dict[int, float] = {}  # reservations not settled -> when to forget them
        self._links: dict[asyncio.Task[None], Connection] = {}

    def reserved(self, lease_id: int) -> None:
        """Note a reservation: its slots will be written to."""
        now = time.monotonic()
        self._reserved = {lease: end for lease, end in self._reserved.items() if end > now}
        self._reserved[lease_id] = now + RETIRED_LINK_S

    def settled(self, *lease_ids: int) -> None:
        """Note that nobody writes into the slots of these reservations any more."""
        for lease_id in lease_ids:
            self._reserved.pop(lease_id, None)

    def add(self, connection: Connection) -> None:
        """Use a connection no more, but keep its link for copies that are under way."""
        if connection in self._links.values():
            return
        if len(self._links) >= RETIRED_MAX:
            next(iter(self._links)).cancel()
        task = asyncio.create_task(self._close_later(connection))
        self._links[task] = connection
        task.add_done_callback(lambda done: self._links.pop(done, None))

    async def close(self) -> None:
        """Close all of them now."""
        tasks, connections = [*self._links], [*self._links.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in connections:
            await connection.close()

    async def _close_later(self, connection: Connection) -> None:
        """Let running calls end, then hold the link for as long as it vouches for somebody."""
        try:
            async with asyncio.timeout(RETIRED_LINK_S):
                await connection.channel.close(RETIRED_LINK_S)
                await asyncio.sleep(RETIRED_LINK_MIN_S)
                writing = set(self._reserved)
                # Nothing tells when the last view goes.
                while writing & self._reserved.keys() or connection.viewed:  # noqa: ASYNC110
                    await asyncio.sleep(RETIRED_POLL_S)
        except TimeoutError:
            logger.warning("client=link_closed reason='an ended session is still in use'")
        finally:
            await connection.close()
