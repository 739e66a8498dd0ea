"""Work that blocks, in a thread that a process which ends does not wait for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def in_detached_thread(work: Callable[[], T], *, name: str) -> asyncio.Future[T]:
    """Return what `work` returns or raises. Who no longer waits for it does not stop it."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def tell(set_it: Callable[[Any], None], found: Any) -> None:
        if not answer.done():
            set_it(found)

    def run() -> None:
        try:
            outcome: tuple[Callable[[Any], None], Any] = (answer.set_result, work())
        except Exception as error:
            outcome = (answer.set_exception, error)
        try:
            loop.call_soon_threadsafe(tell, *outcome)
        except RuntimeError:  # the loop was closed meanwhile
            pass

    threading.Thread(target=run, name=name, daemon=True).start()
    return answer
