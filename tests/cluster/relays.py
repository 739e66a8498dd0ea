"""A relay between two daemons that delays, cuts, stalls and flips: in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.peer.relay import Relay, relayed


@contextmanager
def relay_to(port: int, host: str = "127.0.0.1") -> Iterator[Relay]:
    """Relay to a port of an address; its faults are set while it runs."""
    ready, done = threading.Event(), threading.Event()
    found: list[Relay] = []

    async def run() -> None:
        async with relayed(port, host) as relay:
            found.append(relay)
            ready.set()
            await asyncio.to_thread(done.wait)

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield found[0]
    finally:
        done.set()
        thread.join(10)
