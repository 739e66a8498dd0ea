"""Calls of SGLang's threads, done on the loop of a client of ours; each ends by its deadline.

A call that fails is a miss. SGLang frees its pages when a call has returned: so a load returns when
nothing writes to them any more, which is the loop's to see to.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future

import kvstore
from kvstore import KVStoreError
from kvstore.client.page_counters import Counters
from kvstore.client.page_work import Done, Work, start
from kvstore.client.pages import Pages, Place, Position, connect
from kvstore.client.pieces import Memory
from kvstore_sglang.settings import Settings

logger = logging.getLogger(__name__)

LATE_S = 630.0  # beyond every deadline that can be set


class Mover:
    """Pages to and from one daemon, for any thread."""

    def __init__(self, settings: Settings, name: str) -> None:
        self.counters = Counters()
        self._pages = Pages(settings.limits, self.counters)
        self._client = kvstore.Client(
            settings.target or None, name=name, daemon_uid=settings.daemon_uid
        )
        self._client.submit(connect)  # the first lookup has no time for it

    @property
    def available(self) -> bool:
        """False while the daemon is away, and all is a miss."""
        return self._client.available

    def exist(self, places: Sequence[Place | None]) -> Done:
        return self._call(places, lambda remote: self._pages.exist(remote, places))

    def load(self, places: Sequence[Place | None], memory: Sequence[Memory]) -> Done:
        return self._call(places, lambda remote: self._pages.load(remote, places, memory))

    def save(
        self,
        places: Sequence[Place | None],
        memory: Sequence[Memory],
        positions: Sequence[Position] = (),
    ) -> Done:
        return self._call(
            places, lambda remote: self._pages.save(remote, places, memory, positions)
        )

    def clear(self, namespaces: Sequence[kvstore.Namespace]) -> int:
        """Delete all blocks of some namespaces, from all tiers; return how many there were."""
        deleted = 0
        for namespace in namespaces:
            try:
                deleted += self._client.admin.clear(namespace.id)
            except KVStoreError as error:
                logger.error("clear=failed namespace=%s reason=%r", namespace.title, str(error))
        return deleted

    def flush(self, wait_s: float = 30.0) -> bool:
        """Wait until all that was saved is on disk; False if it is not after `wait_s`. Raises
        Unavailable."""
        return self._client.admin.flush(wait_s)

    def close(self) -> None:
        logger.info("closed %s", self.counters.as_dict())
        self._client.close()

    def _call(self, places: Sequence[Place | None], work: Work) -> Done:
        """Do work on pages. Without a daemon all of them are misses at once."""
        count = len(places)
        if not any(places):
            return [False] * count
        if not self._client.available:
            self.counters.refuse("away", count, "the daemon is away")
            return [False] * count
        return _outcome(start(self._client, self.counters, count, work))


def _outcome(work: Future[Done]) -> Done:
    """Wait for work that ends by itself: it keeps its deadline, and the memory is SGLang's again
    only then. If it should not, the log says so."""
    while True:
        try:
            return work.result(LATE_S)
        except TimeoutError:
            logger.error("pages=late waited_s=%.0f", LATE_S)
