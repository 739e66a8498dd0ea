"""Put and Get as byte streams, for clients without shared memory.

A put's chunks go straight into arena slots, which are reserved as they arrive. A get is answered a
window at a time. What streams hold of memory and of the arena is bounded for all together.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
from collections.abc import AsyncIterator, Iterator, Sequence

from kvstore.decide.planner.leases import DAEMON_SESSION
from kvstore.metrics import Metrics
from kvstore.model.block import BlockKey, Committed, Grant, Namespace, NamespaceId, Part, Span
from kvstore.model.checksum import copy_out
from kvstore.model.errors import CorruptBlock, InvalidRequest, KVStoreError, Unavailable
from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.server.putting import Putting
from kvstore.server.stream_bounds import STALL_S, Held, Room, Turns, in_time
from kvstore.store.store import Store
from kvstore.system.bandwidth import Lane
from kvstore.system.patience import Patience

WINDOW_NBYTES = 1 << 20
# gRPC holds a message several times for as long as nobody reads it, and cannot be told to drop it.
SENT_CHUNK_NBYTES = 64 << 10
ROOM_S = 2 * STALL_S  # whoever stands still is gone by then
PUTTING_FRACTION = 0.5  # of the arena, for what streams have sent and nobody has committed
# What is written after a lease has ended could land in somebody else's slot.
LEASE_MARGIN = 0.8


class Streams:
    """Moves streamed records in and out of slots that the daemon leases to itself."""

    def __init__(self, store: Store, metrics: Metrics) -> None:
        self._store = store
        self._metrics = metrics
        self._puts = Turns()
        self._gets = Turns()
        self._copied = Room()
        self._reserved_nbytes = 0
        self._is_guest = False
        self.lane: Lane | None = None  # of a tenant among several

    def at(self, store: Store) -> Streams:
        """Return the streams of this tenant as a reader of another store: they take the places and
        the lane of its own gets."""
        guest = Streams(store, self._metrics)
        guest._gets, guest.lane, guest._is_guest = self._gets, self.lane, True
        return guest

    @property
    def copied(self) -> Room:
        """The records that gets have copied, and not sent."""
        return self._copied

    # ---- put -----------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def putting(
        self, messages: AsyncIterator[pb.PutRequest]
    ) -> AsyncIterator[AsyncIterator[pb.PutRequest]]:
        """Take a stream in: yield its messages, for as long as they come. Raises Unavailable."""
        async with self._puts.turn(), contextlib.aclosing(in_time(messages)) as timely:
            yield timely

    async def put(
        self,
        header: pb.PutHeader,
        messages: AsyncIterator[pb.PutRequest],
        *,
        namespace: Namespace,
        keys: Sequence[BlockKey],
        wait_s: float,
    ) -> Committed:
        """Store one part of consecutive blocks. All of it is verified before any is published."""
        if len(header.checksums) != len(keys):
            raise InvalidRequest(f"{len(header.checksums)} checksums for {len(keys)} keys")
        putting = Putting(self._store, header, namespace, keys, wait_s)
        try:
            async with asyncio.timeout(None) as limit:
                async for message in messages:
                    if self.lane is not None:
                        await self.lane.take(len(message.chunk))
                    await self._take(putting, memoryview(message.chunk))
                    if limit.when() is None:  # bytes that are refused have no more time than others
                        grants = putting.grants
                        lease_s = grants[0].deadline_s if grants else self._store.limits.lease_s
                        end = asyncio.get_running_loop().time() + lease_s * LEASE_MARGIN
                        limit.reschedule(end)
                putting.finish()
                await asyncio.to_thread(putting.verify)
            return await putting.commit()
        except CorruptBlock:
            self._metrics.corrupt_blocks.labels("put").inc()
            raise
        except TimeoutError as error:
            raise Unavailable(
                "the records took longer to arrive than a lease lasts", reason="slow_stream"
            ) from error
        finally:
            self._reserved_nbytes -= putting.held_nbytes
            putting.release()

    async def _take(self, putting: Putting, chunk: memoryview) -> None:
        """Reserve what the chunk is the first of, and write it there."""
        before = putting.held_nbytes
        room = int(self._store.arena.capacity_bytes * PUTTING_FRACTION) - self._reserved_nbytes
        try:
            await putting.write(chunk, room)
        finally:
            self._reserved_nbytes += putting.held_nbytes - before

    # ---- get -----------------------------------------------------------------------------------

    async def get(
        self,
        request: pb.GetRequest,
        *,
        namespace: Namespace,
        keys: Sequence[BlockKey],
        wait_s: float,
    ) -> AsyncIterator[pb.GetReply]:
        """Answer window by window. Its lease ends before anything of it is sent."""
        record_nbytes = namespace.fixed_nbytes(Part(request.group, request.shard))
        patience = Patience(wait_s)
        step = max(1, WINDOW_NBYTES // record_nbytes)
        async with self._gets.turn():
            for start in range(0, len(keys), step):
                some = keys[start : start + step]
                held = await self._copied.take(len(some) * record_nbytes, ROOM_S)
                with contextlib.closing(_Sending(held)) as sending:
                    yield await self._fill(sending, request, some, record_nbytes, patience)
                    while chunk := sending.next_chunk():
                        if self.lane is not None:
                            await self.lane.take(len(chunk))
                        with sending.watched():
                            yield pb.GetReply(chunk=chunk)

    async def _fill(
        self,
        sending: _Sending,
        request: pb.GetRequest,
        keys: Sequence[BlockKey],
        record_nbytes: int,
        patience: Patience,
    ) -> pb.GetReply:
        """Copy records of `keys` to be sent; return the header that goes before them."""
        namespace_id = NamespaceId(request.namespace_id)
        with patience.waiting() as wait_s:
            grant = await self._store.gets.acquire(
                DAEMON_SESSION,
                namespace_id,
                keys,
                wait_s=wait_s,
                spans=(Span(Part(request.group, request.shard), 0, len(keys)),),
                is_guest=self._is_guest,
            )
        try:
            found, sending.data = await asyncio.to_thread(self._copy_out, grant, record_nbytes)
        finally:
            lease_held = self._store.release(DAEMON_SESSION, [grant.lease_id])
        if lease_held != [True]:
            raise Unavailable("copying took longer than a lease lasts", reason="slow_stream")
        slots = zip(keys, grant.slots, found, strict=True)
        if wrong := [key for key, slot, is_right in slots if slot is not None and not is_right]:
            with contextlib.suppress(KVStoreError):
                await self._store.deletes.drop_wrong(namespace_id, wrong)
        return pb.GetReply(
            header=pb.GetHeader(found=found, checksums=grant.checksums, record_nbytes=record_nbytes)
        )

    def _copy_out(self, grant: Grant, record_nbytes: int) -> tuple[list[bool], memoryview]:
        """Copy what is there and right, back to back: what is sent is what was verified."""
        count = sum(slot is not None for slot in grant.slots)
        # Not from the heap: what is mapped goes back to the system as soon as it is let go of.
        target = memoryview(mmap.mmap(-1, max(1, count * record_nbytes)))
        found = []
        at = 0
        for slot, expected in zip(grant.slots, grant.checksums, strict=True):
            copied = slot is not None and slot.nbytes == record_nbytes  # else a frame was forged
            if slot is not None and copied:
                value = copy_out(self._store.view(slot), target[at : at + record_nbytes])
                copied = value == expected
            found.append(copied)
            at += record_nbytes * copied
        return found, target[:at]


class _Sending:
    """Cuts a window into messages, and lets go of it when its reader stands still."""

    def __init__(self, held: Held) -> None:
        self.data = memoryview(b"")
        self._held = held
        self._at = 0

    def next_chunk(self) -> bytes:
        chunk = bytes(self.data[self._at : self._at + SENT_CHUNK_NBYTES])
        self._at += len(chunk)
        return chunk

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the sending of one message. Raises Unavailable if it took too long."""
        alarm = asyncio.get_running_loop().call_later(STALL_S, self.close)
        try:
            yield
        finally:
            alarm.cancel()
        if not self._held.is_held:
            raise Unavailable(f"nothing was read for {STALL_S:g} s", reason="slow_stream")

    def close(self) -> None:
        self.data = memoryview(b"")
        self._held.give_back()
