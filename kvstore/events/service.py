"""KV events of one daemon: settings become a feed on its event loop and a publisher's thread."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from kvstore.events.feed import Feed
from kvstore.events.numbers import Numbers
from kvstore.events.publisher import Publisher
from kvstore.metrics import Metrics
from kvstore.settings import Settings, state_directory
from kvstore.store.store import Store
from kvstore.system.allocator import keep_large_apart

logger = logging.getLogger(__name__)


class Events:
    """Binds its addresses when it is made. Raises ConfigError."""

    def __init__(self, settings: Settings, store: Store, metrics: Metrics) -> None:
        events = self._settings = settings.events
        self._store = store
        engines = events.topics == "engines"
        self._feed = Feed(
            store.announce(None),
            store.sessions,
            metrics,
            model=events.model,
            engines=engines,
            recalling=lambda: store.report.recalling,
        )
        numbers = Numbers(state_directory(settings))
        self._publisher = Publisher(
            events.publish,
            events.replay,
            own=None if engines else events.dp_rank,
            first=numbers.first,
            batches_max=events.replay_batches,
            used=numbers.use,
            ask=self._feed.ask,
            metrics=metrics,
        )

    def start(self) -> None:
        """Announce from now on. On the event loop, once the store has started."""
        keep_large_apart()
        self._publisher.start()
        self._feed.start(self._publisher)
        self._store.announce(self._feed)
        self._store.report.events = self.stats
        stats = self.stats()
        logger.info("events=on publish=%s replay=%s", stats["publish"], stats["replay"])

    async def close(self) -> None:
        """Stop."""
        self._store.announce(None)
        self._feed.close()
        await asyncio.to_thread(self._publisher.close)

    def stats(self) -> dict[str, Any]:
        """Return where it is announced, and how much."""
        publisher = self._publisher
        streams = list(publisher.streams.values())
        return {
            "publish": publisher.publish,
            "replay": publisher.replay,
            "dp_rank": self._settings.dp_rank,
            "topics": sorted(stream.topic.decode() for stream in streams),
            "subscribers": publisher.subscribers,
            "sequence": max((stream.next for stream in streams), default=0) - 1,
            "blocks": publisher.book.announced,
            "nbytes": publisher.book.nbytes,
            "waiting": len(self._feed.changed),
        }
