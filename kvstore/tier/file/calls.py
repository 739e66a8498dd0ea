"""The calls under way on one directory: `close` waits until the last of them has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from kvstore.model.errors import Unavailable


class Calls:
    """is_open: whether new calls are accepted."""

    def __init__(self) -> None:
        self.is_open = False
        self._count = 0
        self._quiet = asyncio.Event()
        self._quiet.set()

    @contextmanager
    def one(self) -> Iterator[None]:
        """Count a call for as long as the context lasts. Raises Unavailable if not open."""
        self.check_open()
        self._count += 1
        self._quiet.clear()
        try:
            yield
        finally:
            self._count -= 1
            if not self._count:
                self._quiet.set()

    def check_open(self) -> None:
        if not self.is_open:
            raise Unavailable("the file tier is not open")

    async def ended(self) -> None:
        """Wait until no call is under way."""
        await self._quiet.wait()
