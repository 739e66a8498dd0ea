"""Loads: leased slots -> device pages, verified, in threads beside the engine's steps.

A load counts only if every record of this worker's shard matched its checksum while the lease was
held. That it was is known without asking when the lease's deadline has not passed: until then the
daemon gives the slots to nobody else. Past it, the daemon's answer to `release` decides. Anything
else is a failure of the *request*: the engine recomputes it. Whatever happens, every load is
reported exactly once, or its request would wait for ever.

A load may begin while the daemon still reads the last blocks into their slots: each block is copied
once the daemon says that it is there. Such loads have a thread of their own, because they wait.

A lossy record is its base part. A fine part that is missing is none the less a load; one that is
wrong is not used, and fails only the request that insists on it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import reduce
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from kvstore import Client
from kvstore.model.block import BlockKey, NamespaceId, Part
from kvstore.model.errors import CorruptBlock, KVStoreError, Unavailable
from kvstore.model.outcome import Ready
from kvstore.system.threads import Threads
from kvstore_kernels.codec.copies import Decoded, Fine
from kvstore_vllm.counters import Counters
from kvstore_vllm.metadata import LoadOrder, LoadSpan
from kvstore_vllm.shards import Shards

if TYPE_CHECKING:
    from kvstore_vllm.pages import Pages

logger = logging.getLogger(__name__)

SHARES = 4  # for each thread: one that has to wait for a core leaves some of its own to another
WINDOW_NBYTES = 4 << 20
"""Copied at once of what is still coming: what is left to copy when the last byte has come."""


class _Copy(NamedTuple):
    """Records of one group of pages on their way from the arena into device blocks."""

    group: int
    keys: Sequence[BlockKey]
    records: Sequence[memoryview]
    checksums: Sequence[int]
    device_blocks: Sequence[int]
    fines: Sequence[Fine | None]
    blocks: Sequence[int]

    def between(self, begin: int, end: int) -> _Copy:
        """Return what belongs to blocks [begin, end) of the prefix."""
        return self.cut(slice(bisect_left(self.blocks, begin), bisect_left(self.blocks, end)))

    def cut(self, cut: slice) -> _Copy:
        """Return some of the records."""
        return _Copy(
            self.group,
            self.keys[cut],
            self.records[cut],
            self.checksums[cut],
            self.device_blocks[cut],
            self.fines[cut],
            self.blocks[cut],
        )


class _Found(NamedTuple):
    """What a copy found. corrupt: keys of records that were not what their writer committed;
    coarse: of records whose fine parts were not, and were not used. refined: blocks that are finer
    by their fine parts."""

    corrupt: list[BlockKey]
    coarse: list[BlockKey]
    refined: int

    def and_(self, other: _Found) -> _Found:
        return _Found(
            self.corrupt + other.corrupt, self.coarse + other.coarse, self.refined + other.refined
        )


_Item = tuple[LoadOrder, Any] | None
"""An order, and the point that the engine has reached; None: the thread is to end."""


class _GivenUp(Unavailable):
    """Blocks that were still to be read are computed instead."""


class Loader:
    """Owns the load threads of one worker."""

    def __init__(self, client: Client, pages: Pages, *, shards: Shards, counters: Counters) -> None:
        self._client = client
        self._pages = pages
        self._shards = shards
        self._counters = counters
        self._helpers = Threads(max(1, pages.writers - 1), thread_name_prefix="kvstore-load-helper")
        self._orders: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._coming: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._copying = threading.Lock()  # pages take no more than `writers` at once
        self._changed = threading.Condition()
        self._pending = 0
        self._loaded: set[str] = set()
        self._failed: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._threads = [
            threading.Thread(target=self._run, args=[orders], name=name, daemon=True)
            for name, orders in (("kvstore-load", self._orders), ("kvstore-follow", self._coming))
        ]
        for thread in self._threads:
            thread.start()

    def put(self, order: LoadOrder) -> None:
        """Queue a load. Bounded by the requests the engine keeps waiting for loads."""
        with self._changed:
            self._pending += 1
        orders = self._orders if order.ready_blocks is None else self._coming
        orders.put((order, self._pages.mark()))

    def take(self) -> tuple[set[str], set[str]]:
        """Return the requests (loaded, failed) since the last call."""
        with self._changed:
            taken = self._loaded, self._failed
            self._loaded, self._failed = set(), set()
            return taken

    def take_failed_blocks(self) -> set[int]:
        """Return the first device block of each load that failed since the last call."""
        with self._changed:
            blocks, self._failed_blocks = self._failed_blocks, set()
            return blocks

    def wait(self, wait_s: float) -> None:
        """Wait until a load under way has ended, `wait_s` at most."""
        with self._changed:
            self._changed.wait_for(lambda: self._loaded or self._failed, timeout=wait_s)

    @property
    def pending(self) -> bool:
        return self._pending > 0

    def close(self, wait_s: float) -> None:
        self._orders.put(None)
        self._coming.put(None)
        for thread in self._threads:
            thread.join(timeout=wait_s)
        self._helpers.shutdown(wait=False)

    # The threads ----------------------------------------------------------------------------------

    def _run(self, orders: queue.SimpleQueue[_Item]) -> None:
        try:
            self._pages.enter_thread()
        except Exception:  # if it cannot copy, it fails, and reports it
            logger.exception("load=unbound")
        while (item := orders.get()) is not None:
            order, after = item
            outcome = "loads_failed"
            try:
                self._load(order, after)
                outcome = "loads"
            except _GivenUp as error:
                outcome = "loads_given_up"
                logger.info("load=given_up request=%s reason=%s", order.request_id, error)
            except KVStoreError as error:
                logger.warning("load=failed request=%s error=%r", order.request_id, error)
            except Exception:
                logger.exception("load=failed request=%s", order.request_id)
            finally:
                self._report(order, outcome)

    def _report(self, order: LoadOrder, outcome: str) -> None:
        """outcome: the name of its counter."""
        self._counters.add(**{outcome: 1})
        loaded = outcome == "loads"
        with self._changed:
            (self._loaded if loaded else self._failed).add(order.request_id)
            if not loaded:
                self._failed_blocks.add(order.first_block)
            self._pending -= 1
            self._changed.notify_all()

    def _load(self, order: LoadOrder, after: Any) -> None:
        """Copy and verify this worker's records. Raises if the result may not be used."""
        spans = [s for s in order.spans if Part(s.group, s.shard) in self._shards]
        try:
            self._client.connect()  # this process may not have mapped the arena yet
            self._check(order)
            found = self._copy(order, spans, after)
            in_time = time.monotonic() < order.deadline
        finally:
            release = self._client.submit(lambda remote: remote.release(order.lease_id))
        # A block is accused of being corrupt only if the daemon says that the slot was its own.
        if (found.corrupt or not in_time) and not all(release.result()):
            raise Unavailable("the lease ended during the load")
        records = sum(len(span.slots) for span in spans)
        if found.corrupt:
            self._counters.add(corrupt_blocks=len(found.corrupt))
            self._drop(order.namespace_id, found.corrupt + found.coarse)
            raise CorruptBlock(
                f"{len(found.corrupt)} of {records} records do not match their checksums"
            )
        if found.coarse:
            self._note_coarse(order, found.coarse, release)
        self._counters.add(loads_early=int(order.ready_blocks is not None))
        self._count(spans, found)

    def _note_coarse(
        self, order: LoadOrder, keys: list[BlockKey], release: Future[list[bool]]
    ) -> None:
        """Report fine parts that were wrong. Raises CorruptBlock if the request insists on them."""
        self._counters.add(corrupt_fine_blocks=len(keys))
        with suppress(KVStoreError):  # a daemon that is away is told nothing
            if all(release.result()):
                self._drop(order.namespace_id, keys)
        if order.refined:
            raise CorruptBlock(f"{len(keys)} fine parts do not match their records")

    def _count(self, spans: Sequence[LoadSpan], found: _Found) -> None:
        slots = [slot for span in spans for slot in span.slots]
        fines = [fine.slot for span in spans for fine in span.fines if fine is not None]
        lossy = self._pages.lossy
        base = [
            slot
            for span in spans
            for slot in span.slots
            if lossy and slot.nbytes == lossy[self._pages_of(span)].base_nbytes
        ]
        self._counters.add(
            loaded_blocks=len(slots),
            loaded_bytes=sum(slot.nbytes for slot in (*slots, *fines)),
            loaded_lossy_blocks=len(base),
            loaded_base_blocks=len(base) - found.refined,
        )

    def _check(self, order: LoadOrder) -> None:
        """Raise Unavailable if the leased slots cannot be what the engine was promised."""
        if not order.complete:
            raise Unavailable("the lease does not cover every block that was offered")
        if self._client.instance != order.instance:
            raise Unavailable("the daemon was restarted after the lease was granted")
        if time.monotonic() >= order.deadline:
            raise Unavailable("the lease ran out before the load began")

    def _copy(self, order: LoadOrder, spans: Sequence[LoadSpan], after: Any) -> _Found:
        """Copy all records, each once it is there."""
        # All views at once: from here on the arena stays mapped, whatever the daemon does.
        copies = [self._copy_of(span) for span in spans]
        if order.ready_blocks is None:
            return self._share_out(copies, after)
        blocks = 1 + max((span.blocks[-1] for span in spans if span.blocks), default=-1)
        step = _window_blocks(spans)
        found, begin, ready = _Found([], [], 0), 0, order.ready_blocks
        while ready < blocks:
            wanted = min(ready + step, blocks)
            answer = self._ask_for(order, wanted)
            found = found.and_(self._share_out([c.between(begin, ready) for c in copies], after))
            begin, ready = ready, _arrived(answer, order, wanted)
        return found.and_(self._share_out([c.between(begin, blocks) for c in copies], after))

    def _ask_for(self, order: LoadOrder, blocks: int) -> Future[Ready]:
        wait_s = max(0.0, order.give_up_at - time.monotonic())
        return self._client.submit(
            lambda remote: remote.ready(order.lease_id, blocks, wait_s=wait_s)
        )

    def _share_out(self, copies: Sequence[_Copy], after: Any) -> _Found:
        """Copy records by as many threads as the pages take."""
        copies = [copy for copy in copies if copy.records]
        if not copies:
            return _Found([], [], 0)
        started = time.perf_counter()
        with self._copying:
            found = self._copy_shares(copies, after)
        self._counters.add(load_seconds=time.perf_counter() - started)
        return found

    def _copy_shares(self, copies: Sequence[_Copy], after: Any) -> _Found:
        writers = self._pages.writers
        parts = writers * SHARES if writers > 1 else 1
        shares = iter(_shares(copies, parts))
        jobs: list[Future[_Found]] = []
        try:
            for _ in range(writers - 1):
                jobs.append(self._helpers.submit(self._carry_out, shares, after))
            found = self._carry_out(shares, after)
        finally:
            wait(jobs)  # while one still writes, the device blocks must not be anybody else's
        return reduce(_Found.and_, [job.result() for job in jobs], found)

    def _pages_of(self, span: LoadSpan) -> int:
        return self._shards.pages_of(Part(span.group, span.shard))

    def _copy_of(self, span: LoadSpan) -> _Copy:
        group = self._pages_of(span)
        most = self._pages.record_nbytes[group]
        least = 1 if self._pages.coded else most
        if any(not least <= slot.nbytes <= most for slot in span.slots):
            raise Unavailable("the stored records have another size than this engine's")
        records = [self._client.view(slot) for slot in span.slots]
        fines = [
            Fine(self._client.view(fine.slot), fine.checksum) if fine is not None else None
            for fine in span.fines or [None] * len(records)
        ]
        return _Copy(
            group,
            span.keys,
            records,
            span.checksums,
            span.device_blocks,
            fines,
            span.blocks,
        )

    def _carry_out(self, shares: Iterator[Sequence[_Copy]], after: Any) -> _Found:
        """Copy records, share by share as other threads leave some, and say what was wrong."""
        found = _Found([], [], 0)
        for copy in (copy for share in shares for copy in share):
            decoded = self._write(copy, after)
            checked = list(zip(copy.keys, decoded, copy.checksums, strict=True))
            corrupt = [key for key, each, expected in checked if each.base != expected]
            coarse = [key for key, each, _ in checked if each.refined is False]
            refined = sum(each.refined is True for each in decoded)
            found = found.and_(_Found(corrupt, coarse, refined))
        return found

    def _write(self, copy: _Copy, after: Any) -> Sequence[Decoded]:
        group, blocks, records = copy.group, copy.device_blocks, copy.records
        if self._pages.lossy:
            return self._pages.refine(group, blocks, records, copy.fines, after)
        return [Decoded(sum_) for sum_ in self._pages.write(group, blocks, records, after)]

    def _drop(self, namespace_id: NamespaceId, keys: list[BlockKey]) -> None:
        """Delete blocks found corrupt, so that nobody is offered them again. Best effort."""
        try:
            self._client.admin.delete(namespace_id, sorted(set(keys)), corrupt=True)
        except KVStoreError as error:
            logger.warning("drop=failed blocks=%d error=%r", len(keys), error)


def _shares(copies: Sequence[_Copy], parts: int) -> list[list[_Copy]]:
    """Cut records into parts of about as many bytes, each of few groups: every group of a part is a
    call, which takes the interpreter's lock from the other threads."""
    sizes = [len(record) for copy in copies for record in copy.records]
    begins = list(accumulate(sizes, initial=0))
    total = begins.pop()
    cuts = [bisect_left(begins, total * part // parts) for part in range(parts)]
    shares = []
    for begin, end in pairwise([*cuts, len(sizes)]):
        first, share = 0, []
        for copy in copies:
            count = len(copy.records)
            some = copy.cut(slice(max(0, begin - first), max(0, min(end - first, count))))
            if some.records:
                share.append(some)
            first += count
        shares.append(share)
    return shares


def _window_blocks(spans: Sequence[LoadSpan]) -> int:
    """Return how many blocks to copy at once of records that are still coming."""
    sizes = [slot.nbytes for span in spans for slot in span.slots]
    blocks = len({block for span in spans for block in span.blocks})
    return max(1, blocks * WINDOW_NBYTES // max(1, sum(sizes)))


def _arrived(answer: Future[Ready], order: LoadOrder, wanted: int) -> int:
    """Return how many blocks are there, once those that are wanted are. Raises Unavailable if they
    do not come; _GivenUp: because computing them is faster, or there is no more time."""
    until = min(order.give_up_at, order.deadline)
    try:
        ready = answer.result(max(0.0, until - time.monotonic()))
    except TimeoutError:
        answer.cancel()
        raise _GivenUp("the blocks have not come in time") from None
    if ready.blocks < wanted:
        kind = _GivenUp if ready.given_up else Unavailable
        raise kind(f"only {ready.blocks} of the blocks have come")
    return ready.blocks
