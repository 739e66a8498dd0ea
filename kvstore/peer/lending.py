"""READs of peers, answered: leases on the event loop, bytes in threads.

At most `serve_reads` at once, and so many bytes a second; beyond that a peer is told `busy`. While
engines of this host copy, threads that send rest between pieces: engines come first. Of several
tenants, none has more than half of the reads, and each has a bandwidth of its own. A peer that does
not read ends its own read, after 2 s.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from kvstore.model.block import Span
from kvstore.model.errors import InvalidRequest, KVStoreError
from kvstore.model.member import NodeId
from kvstore.model.tenant import TenantId
from kvstore.peer.base import (
    READ_NBYTES_MAX,
    LentRecord,
    Loan,
    PeerBusy,
    PeerGone,
    PeerIncompatible,
    PeerSlow,
)
from kvstore.peer.bulk import Bulk
from kvstore.peer.control import refusal_of
from kvstore.peer.lenders import Lenders
from kvstore.peer.messages import Keys, PartsBody, decode_parts, encode, encode_read_head, tenant_of
from kvstore.peer.seal import TAG_NBYTES
from kvstore.peer.send import Dispatch
from kvstore.peer.wire import HELD, NOT_HELD, Frame, Kind
from kvstore.peer.yielding import Turns, Yielding
from kvstore.system.bandwidth import TokenBucket
from kvstore.system.threads import Threads, ended, outlive

logger = logging.getLogger(__name__)

IDLE_S = 90.0  # longer than the borrower keeps an idle connection
SEND_S_MAX = 30.0  # of one answer, whatever its borrower allows
RATE_WAIT_S_MAX = 1.0
SENT_TO_MAX = 16384  # nodes, of each tenant one, whose bytes are remembered
STOP_S_MAX = 3.0  # that a thread is waited for; where a disk hangs, it may never end


class Lending:
    """The reads of all peers. `serve` each bulk connection; `close` ends the threads.

    sent_nbytes: by node and tenant, of those that read last. lent: told of each read.
    """

    def __init__(
        self,
        lenders: Lenders,
        instance: Callable[[], str],
        *,
        serve_reads: int,
        bytes_per_s: int = 0,
        refused: Callable[[str], None],
        lent: Callable[[TenantId, int], None] = lambda tenant, nbytes: None,
    ) -> None:
        self._lenders = lenders
        self._lent = lent
        self._instance = instance
        self._reads_max = serve_reads
        self._refused = refused
        self._bucket = TokenBucket(bytes_per_s)
        self._threads = Threads(serve_reads, thread_name_prefix="kvstore-lend")
        self._readers = Threads(serve_reads, thread_name_prefix="kvstore-ahead")
        self._yielding = Yielding(lenders.engines_busy)
        self.reads = 0
        self._reads_of: Counter[TenantId] = Counter()
        self.draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self.sent_nbytes: Counter[tuple[NodeId, TenantId]] = Counter()

    def busy(self, tenant: TenantId) -> bool:
        """Say whether one more read of a tenant's blocks would be refused."""
        return self.draining or self.reads >= self._reads_max or self._has_part(tenant)

    def _has_part(self, tenant: TenantId) -> bool:
        """Say whether a tenant has the part of the reads that it may have beside others."""
        return len(self._lenders) > 1 and self._reads_of[tenant] >= max(1, self._reads_max // 2)

    async def ended(self, within_s: float) -> bool:
        """Wait until no read is under way, for so long at most; say whether none is."""
        try:
            async with asyncio.timeout(within_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def set_rate(self, bytes_per_s: int) -> None:
        if bytes_per_s != self._bucket.bytes_per_s:
            self._bucket = TokenBucket(bytes_per_s)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._readers.shutdown(wait=False, cancel_futures=True)

    async def serve(self, bulk: Bulk, node: NodeId) -> None:
        """Answer one bulk connection until it ends. Raises PeerError, TimeoutError."""
        while True:
            async with asyncio.timeout(IDLE_S):
                frame = await bulk.receive()
            if frame is None:
                return
            if frame.kind != Kind.READ:
                error = InvalidRequest("on a bulk connection there are reads only")
                await self._refuse(bulk, frame, error)
                continue
            try:
                with ExitStack() as held:
                    held.enter_context(self.permit())
                    await self._answer(bulk, frame, node, held)
            except (InvalidRequest, PeerBusy, PeerIncompatible) as error:
                await self._refuse(bulk, frame, error)

    async def _refuse(self, bulk: Bulk, frame: Frame, error: KVStoreError) -> None:
        refusal = refusal_of(error)
        self._refused(refusal.reason)
        await bulk.send(Frame(Kind.ERROR, frame.id, encode(refusal)))

    @contextmanager
    def permit(self) -> Iterator[None]:
        """Be one of the reads that run. Raises PeerBusy."""
        if self.draining:
            raise PeerBusy("this daemon is about to stop", reason="draining")
        if self.reads >= self._reads_max:
            raise PeerBusy(f"{self._reads_max} reads of peers are under way")
        self.reads += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.reads -= 1
            if not self.reads:
                self._idle.set()

    async def _answer(self, bulk: Bulk, frame: Frame, node: NodeId, held: ExitStack) -> None:
        """Answer one READ. Raises InvalidRequest, PeerBusy and PeerIncompatible before anything is
        sent. held: what is let go of when it has ended."""
        keys, body = decode_parts(frame.body)
        tenant = tenant_of(body.tenant)
        deadline = time.monotonic() + min(frame.timeout_s, SEND_S_MAX)
        held.enter_context(self.permit_of(tenant))
        await self.pace()
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                loan = await self.lend(keys, body, node)
        except KVStoreError as error:
            await self._refuse(bulk, frame, error)
            return
        except TimeoutError:
            raise PeerBusy("what a read asks for was not found in its time") from None
        lent = held.enter_context(ExitStack())
        lent.callback(loan.release)
        nbytes = self.take(loan, body)
        await self._send(bulk, frame, loan.records, deadline, node, held=held)
        is_held = loan.held()
        lent.close()
        await self._send_held(bulk, held=is_held)
        self.note_lent(node, tenant, nbytes)

    @contextmanager
    def permit_of(self, tenant: TenantId) -> Iterator[None]:
        """Be one of a tenant's reads. Raises PeerBusy."""
        if self._has_part(tenant):
            raise PeerBusy("a tenant's part of the reads is under way")
        self._reads_of[tenant] += 1
        try:
            yield
        finally:
            self._reads_of[tenant] -= 1
            if not self._reads_of[tenant]:
                del self._reads_of[tenant]

    async def lend(self, keys: Keys, body: PartsBody, node: NodeId) -> Loan:
        """Lease what a node asks for. Raises KVStoreError: PeerIncompatible for a tenant that is
        not here."""
        lender = self._lenders.of(tenant_of(body.tenant))
        return await lender.lend(keys.namespace_id, keys.keys, body.spans, body.refined, node)

    def take(self, loan: Loan, body: PartsBody) -> int:
        """Return how many bytes are lent, which then count for the pace. Raises InvalidRequest."""
        nbytes = _check_loan(loan, body)
        self._bucket.take(nbytes)
        return nbytes

    def note_lent(self, node: NodeId, tenant: TenantId, nbytes: int) -> None:
        """Count a read that was served."""
        sent = self.sent_nbytes
        sent[node, tenant] = sent.pop((node, tenant), 0) + nbytes  # the last one now
        if len(sent) > SENT_TO_MAX:
            del sent[next(iter(sent))]
        self._lent(tenant, nbytes)

    async def pace(self) -> None:
        """Wait for what may be lent in a second. Raises PeerBusy."""
        wait_s = self._bucket.wait_s(time.monotonic())
        if wait_s > RATE_WAIT_S_MAX:
            raise PeerBusy("what may be lent in a second is lent", retry_after_s=wait_s)
        if wait_s:
            await asyncio.sleep(wait_s)

    async def _send(
        self,
        bulk: Bulk,
        frame: Frame,
        records: Sequence[LentRecord | None],
        deadline: float,
        node: NodeId,
        *,
        held: ExitStack,
    ) -> None:
        """Send head and records by a thread. It has ended when this returns or raises, or else
        `held` is its own until it has: a disk hangs."""
        sizes = [record.nbytes if record is not None else 0 for record in records]
        checksums = [record.checksum if record is not None else 0 for record in records]
        head = encode_read_head(self._instance(), sizes, checksums)
        start = bulk.encode(Frame(Kind.REPLY, frame.id, head))
        name = f"node {node[:8]}"
        dispatch = Dispatch(bulk, start, records, name, readers=self._readers, turns=self._turns)
        bulk.lend_to_thread()
        job = self._threads.submit(dispatch.run)
        end = asyncio.wrap_future(job)
        late = True
        try:
            await ended([end], max(0.0, deadline - time.monotonic()))
            late = not end.done()
        finally:
            if late:
                job.cancel()
                dispatch.stop()
                await outlive([end], STOP_S_MAX)
                end.add_done_callback(_known)
            if end.done():
                bulk.take_back()
            else:
                logger.warning("lending=hangs node=%s", node[:8])
                kept = held.pop_all()
                end.add_done_callback(lambda _: kept.close())
        if late:
            raise PeerSlow(f"node {node[:8]} did not read an answer in time", reason="deadline")
        try:
            end.result()
        except OSError as error:
            logger.warning("lending=failed reason=%r", str(error))
            raise PeerGone(f"a file could not be read: {error}", reason="failed") from error

    def _turns(self) -> Turns:
        return Turns(self._yielding, lambda: self.reads)

    async def _send_held(self, bulk: Bulk, *, held: bool) -> None:
        data = HELD if held else NOT_HELD
        if bulk.sealer is not None:
            data = bytes(bulk.sealer.seal(data, memoryview(bytearray(1 + TAG_NBYTES))))
        await bulk.send_bytes(data)


def _known(end: asyncio.Future[None]) -> None:
    """Take the error of a thread that was stopped: nobody else asks for it."""
    if not end.cancelled():
        end.exception()


def _check_loan(loan: Loan, body: PartsBody) -> int:
    """Return how many bytes are lent. Raises InvalidRequest for more than one READ may ask."""
    nbytes = sum(record.nbytes for record in loan.records if record is not None)
    if nbytes > READ_NBYTES_MAX and _blocks(body.spans) > 1:
        raise InvalidRequest(f"a read of {nbytes} bytes; the limit is {READ_NBYTES_MAX}")
    return nbytes


def _blocks(spans: Sequence[Span]) -> int:
    return max((s.end for s in spans), default=0) - min((s.begin for s in spans), default=0)
