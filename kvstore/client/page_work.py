"""Work on pages that an engine's threads start: whatever becomes of it, they get an answer.

An engine's thread that is told of an error ends, and its engine waits for it. So a page that could
not be had is a miss, and why is counted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any

from kvstore.client.async_client import AsyncClient
from kvstore.client.blocking import Client
from kvstore.client.page_counters import Counters
from kvstore.client.pages import kind_of
from kvstore.model.errors import KVStoreError

logger = logging.getLogger(__name__)

Done = list[bool]
Work = Callable[[AsyncClient], Coroutine[Any, Any, Done]]


def start(client: Client, counters: Counters, pages: int, work: Work) -> Future[Done]:
    """Do work on `pages` pages on the client's loop; return what becomes of each page.

    The future raises nothing, and is not to be cancelled: all pages are misses if the work fails,
    if the client is closed, or is closed before the work ends. It is done only when the work is.
    """
    answer: Future[Done] = Future()
    answer.set_running_or_notify_cancel()

    def tell(ended: Future[Done]) -> None:
        try:
            answer.set_result(ended.result())
        except Exception as failure:
            answer.set_result(_missed(counters, pages, failure))

    try:
        client.submit(work).add_done_callback(tell)
    except KVStoreError as error:  # the client is closed
        answer.set_result(_missed(counters, pages, error))
    return answer


def _missed(counters: Counters, pages: int, failure: BaseException) -> Done:
    if isinstance(failure, KVStoreError):
        counters.refuse(kind_of(failure), pages, str(failure))
    elif isinstance(failure, CancelledError):
        counters.refuse("away", pages, "the client was closed")
    else:
        logger.error("pages=%d failed", pages, exc_info=failure)
        counters.add("failed", pages)
    return [False] * pages
