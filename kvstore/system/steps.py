"""Long work in short steps: the loop runs others between them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")


async def in_steps(steps: Generator[None, None, T]) -> T:
    """Take all steps, let others run between them, and return what comes out. Closes `steps`."""
    with contextlib.closing(steps):
        while True:
            try:
                next(steps)
            except StopIteration as done:
                found: T = done.value
                return found
            await asyncio.sleep(0)
