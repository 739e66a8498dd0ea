"""Who listens to what is asked for: `kvstore trace record`.

A call only puts what it has in its hands anyway into a bounded queue, if somebody listens. A
listener that does not keep up misses requests, which is counted; nobody ever waits for it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from kvstore.metrics import Metrics
from kvstore.model.block import KEY_NBYTES, Namespace, NamespaceId
from kvstore.model.errors import InvalidRequest, Unavailable
from kvstore.server.monitor import Monitors
from kvstore.store.answers import Answers

LISTENERS_MAX = 4
QUEUE_REQUESTS_MAX = 8192
QUEUE_NBYTES_MAX = 32 << 20  # of keys
BATCH_REQUESTS = 256
BATCH_NBYTES = 1 << 20
GATHER_S = 0.1  # an event loop that is busy is not woken for every request
SAMPLE_NBYTES = 8  # of a key: it is a hash


class Lookup(NamedTuple):
    """One request for a prefix. at: seconds since the epoch. engine: the kvstore session's
    number, which names none in a call. session_id: the conversation's name, "" if nobody told."""

    at: float
    engine: int
    namespace_id: NamespaceId
    namespace: Namespace
    keys: bytes
    hit_blocks: int
    request_id: str
    session_id: str

    @property
    def block_nbytes(self) -> int:
        """Bytes of a block as engines have it: fine parts are no more of it than their bases."""
        groups = self.namespace.groups
        return sum(each.record_nbytes * each.shards for each in groups if each.refines == -1)


class Recording:
    """The queue of one listener."""

    def __init__(
        self, metrics: Metrics, *, share: float, block: int, namespace_id: NamespaceId | None
    ) -> None:
        """share: of all prefixes, told apart by their block number `block`. Raises InvalidRequest.

        Prefixes that end before that block are left out.
        """
        if not 0 < share <= 1:
            raise InvalidRequest(f"a share of {share:g}; more than 0, up to 1")
        self.dropped = 0
        self._metrics = metrics
        self._below = int(share * 256**SAMPLE_NBYTES)
        self._at = block * KEY_NBYTES
        self._namespace_id = namespace_id
        self._queue: deque[Lookup] = deque()
        self._nbytes = 0
        self._more = asyncio.Event()
        self._closed = False

    def note(self, lookup: Lookup) -> None:
        """Take a request, if it is one of the sample and there is room. Never waits."""
        if self._namespace_id not in (None, lookup.namespace_id) or not self._is_sampled(lookup):
            return
        nbytes = len(lookup.keys)
        full = self._nbytes + nbytes > QUEUE_NBYTES_MAX or len(self._queue) >= QUEUE_REQUESTS_MAX
        self._metrics.recorded.labels("dropped" if full else "sent").inc()
        if full:
            self.dropped += 1
            return
        self._nbytes += nbytes
        self._queue.append(lookup)
        self._more.set()

    def close(self) -> None:
        """End `batches` when all is taken."""
        self._closed = True
        self._more.set()

    async def batches(self) -> AsyncIterator[list[Lookup]]:
        """Yield what comes, until it is closed."""
        while True:
            await self._more.wait()
            if not self._closed:
                await asyncio.sleep(GATHER_S)
            self._more.clear()
            while batch := self._take():
                yield batch
            if self._closed:
                return

    def _is_sampled(self, lookup: Lookup) -> bool:
        key = lookup.keys[self._at : self._at + SAMPLE_NBYTES]
        return len(key) == SAMPLE_NBYTES and int.from_bytes(key, "little") < self._below

    def _take(self) -> list[Lookup]:
        batch: list[Lookup] = []
        nbytes = 0
        while self._queue and len(batch) < BATCH_REQUESTS and nbytes < BATCH_NBYTES:
            batch.append(self._queue.popleft())
            nbytes += len(batch[-1].keys)
        self._nbytes -= nbytes
        return batch


class Recorder:
    """All listeners of a daemon. monitors: those of answers, who end with it."""

    def __init__(self, metrics: Metrics, answers: Answers | None = None) -> None:
        self.monitors = Monitors(metrics, answers or Answers())
        self._metrics = metrics
        self._recordings: set[Recording] = set()
        self._closed = False

    @property
    def listening(self) -> bool:
        """Whether anybody is: else there is nothing to note."""
        return bool(self._recordings)

    def note(
        self,
        *,
        engine: int,
        namespace_id: bytes,
        namespace: Namespace,
        keys: bytes,
        hit_blocks: int,
        request_id: str,
        session_id: str = "",
    ) -> None:
        """Tell every listener of a request that was answered now."""
        known_as = NamespaceId(namespace_id)
        lookup = Lookup(
            time.time(), engine, known_as, namespace, keys, hit_blocks, request_id, session_id
        )
        for recording in self._recordings:
            recording.note(lookup)

    @contextmanager
    def listen(
        self, *, share: float, block: int, namespace_id: NamespaceId | None
    ) -> Iterator[Recording]:
        """Record for as long as the context lasts. Raises InvalidRequest, and Unavailable if too
        many do."""
        recording = Recording(self._metrics, share=share, block=block, namespace_id=namespace_id)
        if self._closed or len(self._recordings) >= LISTENERS_MAX:
            raise Unavailable(f"{LISTENERS_MAX} recordings are under way, or the daemon ends")
        self._recordings.add(recording)
        try:
            yield recording
        finally:
            self._recordings.discard(recording)

    def close(self) -> None:
        """End all recordings: they would keep a daemon from draining."""
        self._closed = True
        self.monitors.close()
        for recording in self._recordings:
            recording.close()
