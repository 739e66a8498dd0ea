"""Saves, behind the engine's back: device pages -> leased slots -> commit, in one thread.

Every step passes the fence of `kvstore.client.fenced_saves` with the blocks it may overwrite.

Coded records are made in private memory, of this process or on the device, before there are slots:
only then their sizes are known. The device blocks are free as soon as that is done. Lossy ones are
made of two parts; the first block of a sequence is exact, because all others attend to it. Blocks
that the engine had before a request came are offered with every request, because the daemon may
have dropped them since: which of these it lacks is asked before they are coded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, cycle
from typing import TYPE_CHECKING, Any, NamedTuple

from kvstore import AsyncClient, Client
from kvstore.client.fenced_saves import FencedJob, FencedSaves
from kvstore.model.block import Grant, Namespace, Slot, Span
from kvstore.model.errors import Incompatible
from kvstore_vllm.counters import Counters
from kvstore_vllm.metadata import SaveOrder, lacking, pieces
from kvstore_vllm.settings import Settings
from kvstore_vllm.shards import Shards, with_fine_parts

if TYPE_CHECKING:
    from kvstore_vllm.pages import Pages, Sized


class _Job(FencedJob):
    """One order on its way."""

    __slots__ = ("after", "namespace", "order")

    def __init__(self, order: SaveOrder, namespace: Namespace, after: Any) -> None:
        super().__init__(_blocks_of([order]))
        self.order = order
        self.namespace = namespace
        self.after = after


class _Coded(NamedTuple):
    """Records of an order: base parts, then the fine parts of lossy ones, None where there is none.

    groups: of pages, of each block. raw_nbytes: of each block as the engine holds it. uncoded: of
    each base part, whether it is raw. sizes: of the slots that are asked for.
    """

    groups: list[int]
    bases: list[Sized]
    fines: list[Sized | None]
    raw_nbytes: list[int]
    uncoded: list[bool]
    sizes: list[int]


class Saver(FencedSaves[_Job]):
    """The saves of one worker. `put` belongs to the engine's thread."""

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
        self._pages = pages
        self._shards = shards
        super().__init__(
            client,
            counters,
            jobs_max=settings.save_queue_jobs,
            reuse_wait_s=settings.reuse_wait_s,
        )

    def put(self, orders: Iterable[SaveOrder], namespace: Namespace) -> None:
        """Queue saves of blocks that the engine has finished computing. Never blocks."""
        for order in map(self._shards.of_pages, orders):
            if order.spans:  # else of groups that this worker has no layer of
                self.queue(partial(self._job, order, namespace))

    def _job(self, order: SaveOrder, namespace: Namespace) -> _Job:
        return _Job(order, namespace, self._pages.mark())

    def enter_thread(self) -> None:
        self._pages.enter_thread()

    def save(self, job: _Job) -> None:
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
                await remote.register(job.namespace, now=False),
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
        if not self.reads_only(job, _blocks_of(orders)):
            return []
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
        uncoded: list[bool] = []
        for span in order.spans:
            first, count = order.first_block + span.begin, len(span.device_blocks)
            exact = [first + at == 0 for at in range(count)] if self._pages.lossy else ()
            encoded = self._pages.encode(span.group, span.device_blocks, job.after, exact)
            groups += [span.group] * count
            bases += [each.base for each in encoded]
            raws += [self._pages.raw_nbytes[span.group]] * count
            uncoded += [each.uncoded for each in encoded]
            if self._pages.lossy:
                fines += [each.fine for each in encoded]
                sizes += [self._pages.lossy[span.group].fine_nbytes] * count
        self._counters.add(save_seconds=time.perf_counter() - started)
        if job.dropped or (is_last and not self.all_read(job)):
            return None
        sizes = [*(each.nbytes for each in bases), *sizes]
        return _Coded(groups, bases, fines, raws, uncoded, sizes)

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
            saved_uncoded_blocks=sum(
                raw for pair, raw in zip(pairs, coded.uncoded, strict=False) if pair
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
            await remote.register(namespace, now=False),
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
        if not self.all_read(job):
            return None
        return records, chain.from_iterable(sums)


def _blocks_of(orders: Iterable[SaveOrder]) -> set[int]:
    """Return the device blocks that orders read."""
    return {block for order in orders for span in order.spans for block in span.device_blocks}
