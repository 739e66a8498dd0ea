"""Loads: leased slots -> device pages, verified, in threads beside the engine's steps.

A load counts only if every record of this worker's shard matched its checksum while the lease was
held. That it was is known without asking when the lease's deadline has not passed: until then the
daemon gives the slots to nobody else. Past it, the daemon's answer to `release` decides. Anything
else is a failure of the *request*: the engine recomputes it. Whatever happens, every load is
reported exactly once, or its request would wait for ever.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, NamedTuple

from kvstore import Client
from kvstore.model.block import BlockKey, NamespaceId
from kvstore.model.errors import CorruptBlock, KVStoreError, Unavailable
from kvstore_vllm.counters import Counters
from kvstore_vllm.metadata import LoadOrder, LoadSpan

if TYPE_CHECKING:
    from kvstore_vllm.pages import Pages

logger = logging.getLogger(__name__)


class _Copy(NamedTuple):
    """Records of one group on their way from the arena into device blocks."""

    group: int
    keys: Sequence[BlockKey]
    records: Sequence[memoryview]
    checksums: Sequence[int]
    device_blocks: Sequence[int]

    def share(self, part: int, parts: int) -> _Copy:
        """Return one of `parts` about equal parts."""
        count = len(self.records)
        cut = slice(count * part // parts, count * (part + 1) // parts)
        return _Copy(
            self.group,
            self.keys[cut],
            self.records[cut],
            self.checksums[cut],
            self.device_blocks[cut],
        )


class Loader:
    """Owns the load thread of one worker."""

    def __init__(self, client: Client, pages: Pages, *, shard: int, counters: Counters) -> None:
        self._client = client
        self._pages = pages
        self._shard = shard
        self._counters = counters
        self._helpers = ThreadPoolExecutor(
            max(1, pages.writers - 1), thread_name_prefix="kvstore-load-helper"
        )
        self._orders: queue.SimpleQueue[tuple[LoadOrder, Any] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._pending = 0
        self._loaded: set[str] = set()
        self._failed: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._thread = threading.Thread(target=self._run, name="kvstore-load", daemon=True)
        self._thread.start()

    def put(self, order: LoadOrder) -> None:
        """Queue a load. Bounded by the requests the engine keeps waiting for loads."""
        with self._changed:
            self._pending += 1
        self._orders.put((order, self._pages.mark()))

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
        """Give the thread the interpreter until a load under way has ended, or for `wait_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._loaded or self._failed, timeout=wait_s)

    @property
    def pending(self) -> bool:
        return self._pending > 0

    def close(self, wait_s: float) -> None:
        self._orders.put(None)
        self._thread.join(timeout=wait_s)
        self._helpers.shutdown(wait=False)

    # The thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._pages.enter_thread()
        except Exception:  # if it cannot copy, it fails, and reports it
            logger.exception("load=unbound")
        while (item := self._orders.get()) is not None:
            order, after = item
            loaded = False
            try:
                self._load(order, after)
                loaded = True
            except KVStoreError as error:
                logger.warning("load=failed request=%s error=%r", order.request_id, error)
            except Exception:
                logger.exception("load=failed request=%s", order.request_id)
            finally:
                self._report(order, loaded)

    def _report(self, order: LoadOrder, loaded: bool) -> None:
        self._counters.add(**{"loads" if loaded else "loads_failed": 1})
        with self._changed:
            (self._loaded if loaded else self._failed).add(order.request_id)
            if not loaded:
                self._failed_blocks.add(order.first_block)
            self._pending -= 1
            self._changed.notify_all()

    def _load(self, order: LoadOrder, after: Any) -> None:
        """Copy and verify this shard's records. Raises if the result may not be used."""
        started = time.perf_counter()
        spans = [span for span in order.spans if span.shard == self._shard]
        slots = [slot for span in spans for slot in span.slots]
        try:
            self._client.connect()  # this process may not have mapped the arena yet
            self._check(order)
            corrupt = self._copy(spans, after)
            in_time = time.monotonic() < order.deadline
        finally:
            release = self._client.submit(lambda remote: remote.release(order.lease_id))
        # A block is accused of being corrupt only if the daemon says that the slot was its own.
        if (corrupt or not in_time) and not all(release.result()):
            raise Unavailable("the lease ended during the load")
        if corrupt:
            self._counters.add(corrupt_blocks=len(corrupt))
            self._drop(order.namespace_id, corrupt)
            raise CorruptBlock(
                f"{len(corrupt)} of {len(slots)} records do not match their checksums"
            )
        self._counters.add(
            loaded_blocks=len(slots),
            loaded_bytes=sum(slot.nbytes for slot in slots),
            load_seconds=time.perf_counter() - started,
        )

    def _check(self, order: LoadOrder) -> None:
        """Raise Unavailable if the leased slots cannot be what the engine was promised."""
        if not order.complete:
            raise Unavailable("the lease does not cover every block that was offered")
        if self._client.instance != order.instance:
            raise Unavailable("the daemon was restarted after the lease was granted")
        if time.monotonic() >= order.deadline:
            raise Unavailable("the lease ran out before the load began")

    def _copy(self, spans: Sequence[LoadSpan], after: Any) -> list[BlockKey]:
        """Copy all records, by as many threads as the pages take.

        Returns the keys whose record was not what its writer committed.
        """
        # All views at once: from here on the arena stays mapped, whatever the daemon does.
        copies = [self._copy_of(span) for span in spans]
        mine, *others = (
            [copy.share(part, self._pages.writers) for copy in copies]
            for part in range(self._pages.writers)
        )
        jobs = [self._helpers.submit(self._carry_out, share, after) for share in others]
        try:
            corrupt = self._carry_out(mine, after)
        finally:
            wait(jobs)  # while one still writes, the device blocks must not be anybody else's
        return corrupt + [key for job in jobs for key in job.result()]

    def _copy_of(self, span: LoadSpan) -> _Copy:
        most = self._pages.record_nbytes[span.group]
        least = 1 if self._pages.coded else most
        if any(not least <= slot.nbytes <= most for slot in span.slots):
            raise Unavailable("the stored records have another size than this engine's")
        records = [self._client.view(slot) for slot in span.slots]
        return _Copy(span.group, span.keys, records, span.checksums, span.device_blocks)

    def _carry_out(self, copies: Sequence[_Copy], after: Any) -> list[BlockKey]:
        """Copy, and return the keys of corrupt records."""
        corrupt = []
        for group, keys, records, checksums, device_blocks in copies:
            sums = self._pages.write(group, device_blocks, records, after)
            checked = zip(keys, sums, checksums, strict=True)
            corrupt += [key for key, found, expected in checked if found != expected]
        return corrupt

    def _drop(self, namespace_id: NamespaceId, keys: list[BlockKey]) -> None:
        """Delete blocks found corrupt, so that nobody is offered them again. Best effort."""
        try:
            self._client.admin.delete(namespace_id, sorted(set(keys)), corrupt=True)
        except KVStoreError as error:
            logger.warning("drop=failed blocks=%d error=%r", len(keys), error)
