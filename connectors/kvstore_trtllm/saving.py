"""Saves, behind the engine's back: slots are reserved, blocks copied and hashed, committed.

The engine gives a block to another request when its own is done. It is asked not to before the
copies out of it have ended (`reading`), and each step passes the fence of
`kvstore.client.fenced_saves` with the blocks it may overwrite all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from kvstore import AsyncClient, Client
from kvstore.client.fenced_saves import FencedJob, FencedSaves
from kvstore.client.leased import answer_in, give_back
from kvstore.model.block import Grant, Namespace, Part, Slot, Span
from kvstore.model.checksum import copies_in
from kvstore.model.errors import Unavailable
from kvstore_trtllm.counters import Counters
from kvstore_trtllm.metadata import SaveOrder
from kvstore_trtllm.pool import Pool
from kvstore_trtllm.settings import Settings

ANSWER_S = 0.5
"""Beyond the wait for room: how long an answer may take."""


class _Job(FencedJob):
    """One order on its way."""

    __slots__ = ("after", "namespace", "order")

    def __init__(self, order: SaveOrder, namespace: Namespace, after: Any) -> None:
        super().__init__(set(order.device_blocks))
        self.order = order
        self.namespace = namespace
        self.after = after


class Saver(FencedSaves[_Job]):
    """The saves of one rank. `put` and `reading` belong to the engine's thread."""

    def __init__(
        self, settings: Settings, client: Client, pool: Pool, shard: int, counters: Counters
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._part = Part(0, shard)
        super().__init__(
            client,
            counters,
            jobs_max=settings.save_queue_jobs,
            reuse_wait_s=settings.reuse_wait_s,
        )

    def put(self, orders: Iterable[SaveOrder], namespace: Namespace, after: Any) -> None:
        """Queue saves of blocks that are complete `after` that point. Never blocks."""
        for order in orders:
            self.queue(partial(_Job, order, namespace, after))

    @property
    def reading(self) -> set[int]:
        """The requests whose blocks are still read."""
        with self._changed:
            return {job.order.request_id for job in self._reading}

    def save(self, job: _Job) -> None:
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
                await remote.register(job.namespace, now=False),
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
        if job.dropped or (end == len(job.order.keys) and not self.all_read(job)):
            return None
        views = [view for _, view in self._views(slots)]
        found = dict(zip(wanted, copies_in(records, views), strict=True))
        return [found.get(at, 0) for at in range(len(slots))]

    def _views(self, slots: Sequence[Slot | None]) -> Iterator[tuple[int, memoryview]]:
        for at, slot in enumerate(slots):
            if slot:
                yield at, self._client.view(slot)[: self._pool.record_nbytes]
