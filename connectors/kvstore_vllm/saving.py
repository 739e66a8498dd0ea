"""Saves, behind the engine's back: device pages -> leased slots -> commit, in one thread.

The engine may hand a device block to another request while a copy out of it is queued. So every
step passes a *fence* with the blocks it may overwrite: copies that read one of them get a moment to
finish, and are given up otherwise. A save given up is never committed; what was copied is garbage
that nobody sees. Nothing else here can delay the engine.

Coded records are made in private memory, of this process or on the device, before there are slots:
only then their sizes are known. The device blocks are free as soon as that is done. Lossy ones are
made of two parts; the first block of a sequence is exact, because all others attend to it. Blocks
that the engine had before a request came are offered with every request, because the daemon may
have dropped them since: which of these it lacks is asked before they are coded.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, cycle
from typing import TYPE_CHECKING, Any, NamedTuple

from kvstore import AsyncClient, Client
from kvstore.client.session import registered
from kvstore.model.block import Grant, Namespace, Slot, Span
from kvstore.model.errors import Incompatible, InvalidRequest, KVStoreError
from kvstore_vllm.counters import Counters
from kvstore_vllm.metadata import SaveOrder, lacking, pieces
from kvstore_vllm.settings import Settings
from kvstore_vllm.shards import Shards, with_fine_parts

if TYPE_CHECKING:
    from kvstore_vllm.pages import Pages, Sized

logger = logging.getLogger(__name__)


_STALL_S = 1.0
"""How long fences stop waiting at all after one waited in vain: a hung daemon costs little."""


class _Job:
    """One order on its way. `dropped` changes under the lock, before the copy is complete; so do
    `blocks`, the device blocks that are still to be read."""

    __slots__ = ("after", "blocks", "dropped", "namespace", "order")

    def __init__(self, order: SaveOrder, namespace: Namespace, after: Any) -> None:
        self.order = order
        self.namespace = namespace
        self.after = after
        self.blocks = _blocks_of([order])
        self.dropped = False


class _Coded(NamedTuple):
    """Records of an order: base parts, then the fine parts of lossy ones, None where there is none.

    groups: of pages, of each block. raw_nbytes: of each block as the engine holds it. sizes: of the
    slots that are asked for.
    """

    groups: list[int]
    bases: list[Sized]
    fines: list[Sized | None]
    raw_nbytes: list[int]
    sizes: list[int]


class Saver:
    """Owns the save thread of one worker. `put` and `fence` belong to the engine's thread."""

    def __init__(
        self,
        settings: Settings,
        client: Client,
        pages: Pages,
        *,
        shards: Shards,
        counters: Counters,
    ) -> None:
        self._settings = settings
        self._client = client
        self._pages = pages
        self._shards = shards
        self._counters = counters
        self._changed = threading.Condition()
        self._queue: deque[_Job] = deque()
        self._reading: list[_Job] = []  # queued or being copied: the fence must know them
        self._busy = False
        self._closing = False
        self._stalled_until = 0.0
        self._thread = threading.Thread(target=self._run, name="kvstore-save", daemon=True)
        self._thread.start()

    def put(self, orders: Iterable[SaveOrder], namespace: Namespace) -> None:
        """Queue saves of blocks that the engine has finished computing. Never blocks."""
        for order in map(self._shards.of_pages, orders):
            if not order.spans:
                continue  # of groups that this worker has no layer of
            if not self._client.available:
                self._counters.add(saves_dropped_down=1)
                continue
            with self._changed:
                if len(self._reading) >= self._settings.save_queue_jobs or self._closing:
                    self._counters.add(saves_dropped_queue=1)
                    continue
                job = _Job(order, namespace, self._pages.mark())
                self._reading.append(job)
                self._queue.append(job)
                self._changed.notify_all()

    def fence(self, handed_out: Iterable[int]) -> None:
        """Return when no copy reads one of the blocks `handed_out`: at most reuse_wait_s."""
        reused = set(handed_out)
        with self._changed:
            if not self._late(reused):
                return
            started = time.monotonic()
            if started >= self._stalled_until and not self._changed.wait_for(
                lambda: not self._late(reused), self._settings.reuse_wait_s
            ):
                self._stalled_until = time.monotonic() + _STALL_S
            for job in self._late(reused):
                job.dropped = True
                self._reading.remove(job)
                self._counters.add(saves_dropped_reuse=1)
            self._counters.add(reuse_wait_seconds=time.monotonic() - started)

    def give_up(self, wait_s: float) -> bool:
        """Drop every save whose blocks are still to be copied; return when no block is read. False
        if that took longer than `wait_s`."""
        with self._changed:
            for job in self._reading:
                job.dropped = True
                self._counters.add(saves_dropped_reuse=1)
            self._reading.clear()
            return self._changed.wait_for(lambda: not self._queue and not self._busy, wait_s)

    def _late(self, reused: set[int]) -> list[_Job]:
        """Return the jobs that still read one of these device blocks."""
        return [job for job in self._reading if not reused.isdisjoint(job.blocks)]

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
        self._thread.join(timeout=wait_s)

    def _run(self) -> None:
        try:
            self._pages.enter_thread()
        except Exception:  # if it cannot copy, it fails, and reports it
            logger.exception("save=unbound")
        while (job := self._next()) is not None:
            try:
                self._save(job)
            except KVStoreError as error:
                level = logging.WARNING if isinstance(error, InvalidRequest) else logging.DEBUG
                logger.log(level, "save=dropped error=%r", error)
                self._counters.add(saves_dropped_down=1)
            except Exception:
                # A save is optional and this thread is the only one there is: it must survive.
                logger.exception("save=dropped")
                self._counters.add(saves_dropped_down=1)
            finally:
                self._finish(job)

    def _next(self) -> _Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            if not self._queue:
                return None
            self._busy = True
            return self._queue.popleft()

    def _finish(self, job: _Job) -> None:
        with self._changed:
            if job in self._reading:
                self._reading.remove(job)
            self._busy = False
            self._changed.notify_all()

    def _save(self, job: _Job) -> None:
        if job.dropped:
            return
        if not self._pages.coded:
            self._store(job, job.order, lambda grant: self._fill(job, grant))
            return
        orders = self._missing(job) if job.order.reused else [job.order]
        sizes = self._pages.record_nbytes, self._pages.encoded_nbytes_max
        parts = [part for order in orders for part in pieces(order, *sizes)]
        for number, part in enumerate(parts, 1):
            coded = self._encode(job, part, is_last=number == len(parts))
            if coded is None:
                return
            self._store(job, part, partial(self._fill_coded, coded), coded.sizes)

    def _missing(self, job: _Job) -> list[SaveOrder]:
        """Return what of an order the daemon lacks. Its other device blocks are read no more."""
        order, spans = job.order, self._shards.spans_of(job.order)

        async def ask(remote: AsyncClient) -> Sequence[bool]:
            match = await remote.match(
                await registered(remote, job.namespace),
                order.keys,
                each=True,
                spans=spans,
                refined=order.refined,
            )
            return match.present

        try:
            present = self._client.submit(ask).result()
        except Incompatible:  # a daemon of an earlier version: `reserve` tells what it has
            return [order]
        orders = lacking(order, present)
        with self._changed:
            if job.dropped:
                return []
            job.blocks = _blocks_of(orders)
            self._changed.notify_all()
        self._counters.add(known_blocks=sum(present))
        if any(present) and order.tokens is not None:
            self._store(job, replace(order, spans=()), lambda grant: None)  # tells the tokens
        return orders

    def _store(
        self,
        job: _Job,
        order: SaveOrder,
        fill: Callable[[Grant], None],
        sizes: Sequence[int] = (),
    ) -> None:
        """Reserve slots for an order, and have them filled and committed."""
        spans = with_fine_parts(job.namespace, self._shards.spans_of(order))
        reserve = partial(
            self._reserve, namespace=job.namespace, order=order, spans=spans, sizes=sizes
        )
        grant = self._client.submit(reserve).result()
        if grant.refused:
            self._counters.add(refused_blocks=grant.refused)
        if not any(grant.slots):
            if grant.lease_id:
                self._client.release(grant.lease_id)
            return
        try:
            fill(grant)
        except Exception:
            # No copy is in flight any more. Else the slots are this engine's for as long as it
            # lives, and soon it has so many that it is given no other.
            self._client.submit(lambda remote: remote.release(grant.lease_id))
            raise

    def _encode(self, job: _Job, order: SaveOrder, *, is_last: bool) -> _Coded | None:
        """Return the records of an order; None if the fence gave the job up meanwhile."""
        started = time.perf_counter()
        groups: list[int] = []
        bases: list[Sized] = []
        fines: list[Sized | None] = []
        sizes: list[int] = []
        raws: list[int] = []
        for span in order.spans:
            first, count = order.first_block + span.begin, len(span.device_blocks)
            exact = [first + at == 0 for at in range(count)] if self._pages.lossy else ()
            encoded = self._pages.encode(span.group, span.device_blocks, job.after, exact)
            groups += [span.group] * count
            bases += [each.base for each in encoded]
            raws += [self._pages.raw_nbytes[span.group]] * count
            if self._pages.lossy:
                fines += [each.fine for each in encoded]
                sizes += [self._pages.lossy[span.group].fine_nbytes] * count
        self._counters.add(save_seconds=time.perf_counter() - started)
        with self._changed:
            if job.dropped:
                return None
            if is_last:
                self._reading.remove(job)
                self._changed.notify_all()
        return _Coded(groups, bases, fines, raws, [*(each.nbytes for each in bases), *sizes])

    def _fill_coded(self, coded: _Coded, grant: Grant) -> None:
        """Copy records to their slots, and commit them."""
        started = time.perf_counter()
        records = [*coded.bases, *coded.fines]
        # An exact block has no fine part, and no slot for one.
        pairs = [
            (record, self._client.view(slot)) if slot and record is not None else None
            for record, slot in zip(records, grant.slots, strict=True)
        ]
        sums = [0] * len(pairs)
        for group in dict.fromkeys(coded.groups):
            taken = {
                index: pair
                for index, (pair, of) in enumerate(zip(pairs, cycle(coded.groups), strict=False))
                if pair and of == group
            }
            found = self._pages.store(group, list(taken.values()))
            for index, sum_ in zip(taken, found, strict=True):
                sums[index] = sum_
        seconds = time.perf_counter() - started
        committed = self._client.commit(grant.lease_id, sums)
        count = len(coded.bases)
        self._counters.add(
            saved_blocks=committed.committed,
            saved_bytes=sum(len(pair[1]) for pair in pairs if pair),
            saved_fine_bytes=sum(len(pair[1]) for pair in pairs[count:] if pair),
            saved_raw_bytes=sum(
                raw for pair, raw in zip(pairs, coded.raw_nbytes, strict=False) if pair
            ),
            save_seconds=seconds,
        )

    def _fill(self, job: _Job, grant: Grant) -> None:
        """Copy, and commit what was copied; a job given up meanwhile is released."""
        started = time.perf_counter()
        copied = self._copy(job, grant.slots)
        if copied is None:
            self._client.release(grant.lease_id)
            return
        records, found = copied
        sums = [0 if record is None else next(found) for record in records]
        nbytes = sum(len(record) for record in records if record is not None)
        seconds = time.perf_counter() - started
        committed = self._client.commit(grant.lease_id, sums)
        self._counters.add(
            saved_blocks=committed.committed,
            saved_bytes=nbytes,
            saved_raw_bytes=nbytes,
            save_seconds=seconds,
        )

    async def _reserve(
        self,
        remote: AsyncClient,
        namespace: Namespace,
        order: SaveOrder,
        spans: Sequence[Span],
        sizes: Sequence[int],
    ) -> Grant:
        return await remote.reserve(
            await registered(remote, namespace),
            order.keys,
            first_block=order.first_block,
            parent=order.parent,
            spans=spans,
            wait_s=self._settings.save_deadline_s,
            session_id=order.session_id,
            sizes=sizes,
            refined=order.refined,
            tokens=order.tokens,
        )

    def _copy(
        self, job: _Job, slots: Sequence[Slot | None]
    ) -> tuple[list[memoryview | None], Iterator[int]] | None:
        """Copy the pages to their slots; None if the fence gave the job up meanwhile.

        Returns the records, and the checksums of those that were copied, still to be computed.
        """
        records: list[memoryview | None] = []
        sums: list[Iterable[int]] = []
        for span in job.order.spans:
            size = self._pages.record_nbytes[span.group]
            part = slots[len(records) : len(records) + len(span.device_blocks)]
            targets = [self._client.view(slot)[:size] if slot else None for slot in part]
            pairs = [
                (block, target)
                for block, target in zip(span.device_blocks, targets, strict=True)
                if target is not None
            ]
            if job.dropped:
                return None
            blocks, views = [block for block, _ in pairs], [view for _, view in pairs]
            sums.append(self._pages.read(span.group, blocks, views, job.after))
            records += targets
        with self._changed:
            if job.dropped:
                return None
            self._reading.remove(job)
            self._changed.notify_all()
        return records, chain.from_iterable(sums)


def _blocks_of(orders: Iterable[SaveOrder]) -> set[int]:
    """Return the device blocks that orders read."""
    return {block for order in orders for span in order.spans for block in span.device_blocks}
