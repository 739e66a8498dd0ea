"""Saves, behind the engine's back: slots are reserved, blocks copied and hashed, committed.

The engine gives a block to another request when its own is done. It is asked not to before the
copies out of it have ended (`reading`), and each step passes a *fence* with the blocks it may
overwrite all the same: copies that read one of them get a moment to finish, and are given up
otherwise. A save given up is never committed. Nothing else here can delay the engine.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore import AsyncClient, Client
from kvstore.client.leased import answer_in, give_back
from kvstore.client.session import registered
from kvstore.model.block import Grant, Namespace, Part, Slot, Span
from kvstore.model.checksum import copies_in
from kvstore.model.errors import KVStoreError, Unavailable
from kvstore_trtllm.counters import Counters
from kvstore_trtllm.metadata import SaveOrder
from kvstore_trtllm.pool import Pool
from kvstore_trtllm.settings import Settings

logger = logging.getLogger(__name__)

ANSWER_S = 0.5
"""Beyond the wait for room: how long an answer may take."""


@dataclass(eq=False, slots=True)
class _Job:
    """One order on its way. `dropped` changes under the lock."""

    order: SaveOrder
    namespace: Namespace
    after: Any
    dropped: bool = False


class Saver:
    """Owns the save thread of one rank. Other methods belong to the engine's thread."""

    def __init__(
        self, settings: Settings, client: Client, pool: Pool, shard: int, counters: Counters
    ) -> None:
        self._settings = settings
        self._client = client
        self._pool = pool
        self._part = Part(0, shard)
        self._counters = counters
        self._changed = threading.Condition()
        self._queue: deque[_Job] = deque()
        self._reading: list[_Job] = []  # queued or being copied
        self._busy = self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvstore-save", daemon=True)
        self._thread.start()

    def put(self, orders: Iterable[SaveOrder], namespace: Namespace, after: Any) -> None:
        """Queue saves of blocks that are complete `after` that point. Never blocks."""
        for order in orders:
            if not self._client.available:
                self._counters.add(saves_dropped_away=1)
                continue
            with self._changed:
                if len(self._reading) >= self._settings.save_queue_jobs or self._closing:
                    self._counters.add(saves_dropped_queue=1)
                    continue
                job = _Job(order, namespace, after)
                self._reading.append(job)
                self._queue.append(job)
                self._changed.notify_all()

    def fence(self, handed_out: Iterable[int]) -> None:
        """Return when no copy reads one of these blocks: after reuse_wait_s at the most."""
        reused = set(handed_out)
        with self._changed:
            late = [each for each in self._reading if reused & set(each.order.device_blocks)]
            if late:
                self._changed.wait_for(
                    lambda: not any(each in self._reading for each in late),
                    self._settings.reuse_wait_s,
                )
            for job in late:
                if job in self._reading:
                    job.dropped = True
                    self._reading.remove(job)
                    self._counters.add(saves_dropped_reuse=1)

    @property
    def reading(self) -> set[int]:
        """The requests whose blocks are still read."""
        with self._changed:
            return {job.order.request_id for job in self._reading}

    def drain(self, wait_s: float) -> bool:
        """Wait until nothing is queued or being committed; False if that took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._busy, wait_s)

    def close(self, wait_s: float) -> None:
        """Finish what is queued within `wait_s`, then stop the thread."""
        self.drain(wait_s)
        with self._changed:
            self._closing = True
            self._queue.clear()
            self._changed.notify_all()
        self._thread.join(wait_s)

    # The thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                self._save(job)
            except KVStoreError as error:
                logger.info("save=dropped error=%r", error)
                self._counters.add(saves_dropped_away=1)
            except Exception:
                # A save is optional, and this thread is the only one there is.
                logger.exception("save=dropped")
                self._counters.add(saves_dropped_away=1)
            finally:
                self._ended(job)

    def _next(self) -> _Job | None:
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._queue or self._closing)
            if not self._queue:
                return None
            self._busy = True
            return self._queue.popleft()

    def _ended(self, job: _Job) -> None:
        """Note that nothing reads the job's blocks any more."""
        with self._changed:
            if job in self._reading:
                self._reading.remove(job)
            self._changed.notify_all()

    def _save(self, job: _Job) -> None:
        count = len(job.order.keys)
        for begin in range(0, count, self._pool.read_max):
            end = min(begin + self._pool.read_max, count)
            if job.dropped or not self._save_piece(job, begin, end):
                return

    def _save_piece(self, job: _Job, begin: int, end: int) -> bool:
        """Save blocks [begin, end) of an order. False if the store is full, or the job dropped."""
        grant = self._reserve(job, begin, end)
        wanted = [at for at, slot in enumerate(grant.slots) if slot]
        committed = 0
        try:
            if not wanted:
                return not grant.refused
            checksums = self._fill(job, begin, end, grant.slots, wanted)
            if checksums is None:
                return False
            committed = self._client.commit(grant.lease_id, checksums).committed
            self._counters.add(saved_blocks=committed)
        finally:
            if grant.lease_id and not committed:
                self._client.submit(lambda remote: remote.release(grant.lease_id))
        if grant.refused:
            self._counters.add(saves_dropped_full=1)
        return not grant.refused

    def _reserve(self, job: _Job, begin: int, end: int) -> Grant:
        order = job.order

        async def reserve(remote: AsyncClient) -> Grant:
            return await remote.reserve(
                await registered(remote, job.namespace),
                order.keys[begin:end],
                first_block=order.first_block + begin,
                parent=order.keys[begin - 1] if begin else order.parent,
                spans=[Span(self._part, 0, end - begin)],
                wait_s=self._settings.save_deadline_s,
            )

        asked = self._client.submit(reserve)
        try:
            return answer_in(self._client, asked, self._settings.save_deadline_s + ANSWER_S)
        except Unavailable:
            give_back(self._client, asked)
            raise

    def _fill(
        self, job: _Job, begin: int, end: int, slots: Sequence[Slot | None], wanted: Sequence[int]
    ) -> list[int] | None:
        """Copy blocks into their slots; return the checksums of all slots, 0 where there is none.

        None if the fence gave the job up meanwhile: then the slots hold what nobody wants.
        """
        blocks = job.order.device_blocks[begin:end]
        records = self._pool.read([blocks[at] for at in wanted], job.after)
        with self._changed:
            if job.dropped:
                return None
            if end == len(job.order.keys):
                self._reading.remove(job)
                self._changed.notify_all()
        views = [view for _, view in self._views(slots)]
        found = dict(zip(wanted, copies_in(records, views), strict=True))
        return [found.get(at, 0) for at in range(len(slots))]

    def _views(self, slots: Sequence[Slot | None]) -> Iterator[tuple[int, memoryview]]:
        for at, slot in enumerate(slots):
            if slot:
                yield at, self._client.view(slot)[: self._pool.record_nbytes]
