"""Put and Get as byte streams, for clients without shared memory.

A put's chunks go straight into arena slots, and a get is answered a window at a time, so a stream
needs little memory beside its slots, however large the batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from kvstore.block import BlockKey, Committed, Grant, Namespace, NamespaceId, Part, Span
from kvstore.checksum import checksum
from kvstore.errors import CorruptBlock, InvalidRequest, Unavailable
from kvstore.obs import Metrics
from kvstore.planner.leases import DAEMON_SESSION
from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.store import Store
from kvstore.transport.chunks import Scatter, gather
from kvstore.transport.messages import parent_of

WINDOW_NBYTES = 4 << 20
# What is written after a lease has ended could land in somebody else's slot.
LEASE_MARGIN = 0.8


class Streams:
    """Moves streamed records in and out of slots that the daemon leases to itself."""

    def __init__(self, store: Store, metrics: Metrics) -> None:
        self._store = store
        self._metrics = metrics

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
        part = Part(header.group, header.shard)
        record_nbytes = namespace.record_nbytes(part)
        if len(header.checksums) != len(keys):
            raise InvalidRequest(f"{len(header.checksums)} checksums for {len(keys)} keys")
        grant = await self._store.reserve(
            DAEMON_SESSION,
            NamespaceId(header.namespace_id),
            keys,
            first_block=header.first_block,
            parent=parent_of(header.parent),
            spans=(Span(part, 0, len(keys)),),
            wait_s=wait_s,
        )
        try:
            async with asyncio.timeout(grant.deadline_s * LEASE_MARGIN):
                await self._fill(grant, messages, record_nbytes)
                await asyncio.to_thread(self._verify, grant, header.checksums)
            return await self._store.commit(
                DAEMON_SESSION, grant.lease_id, header.checksums, durable=header.durable
            )
        except CorruptBlock:
            self._metrics.corrupt_blocks.labels("put").inc()
            raise
        except TimeoutError as error:
            raise Unavailable(
                "the records took longer to arrive than a lease lasts", reason="slow_stream"
            ) from error
        finally:
            # After a commit this finds nothing to release.
            self._store.release(DAEMON_SESSION, [grant.lease_id])

    async def _fill(
        self, grant: Grant, messages: AsyncIterator[pb.PutRequest], record_nbytes: int
    ) -> None:
        views = [self._store.view(slot) if slot else None for slot in grant.slots]
        scatter = Scatter(views, record_nbytes)
        async for message in messages:
            scatter.write(memoryview(message.chunk))
        scatter.finish()

    def _verify(self, grant: Grant, checksums: Sequence[int]) -> None:
        for index, (slot, expected) in enumerate(zip(grant.slots, checksums, strict=True)):
            if slot is not None and checksum(self._store.view(slot)) != expected:
                raise CorruptBlock(f"record {index} does not match its checksum: send it again")

    async def get(
        self,
        request: pb.GetRequest,
        *,
        namespace: Namespace,
        keys: Sequence[BlockKey],
        wait_s: float,
    ) -> AsyncIterator[pb.GetReply]:
        """Answer window by window. Its lease ends before anything of it is sent."""
        part = Part(request.group, request.shard)
        record_nbytes = namespace.record_nbytes(part)
        step = max(1, WINDOW_NBYTES // record_nbytes)
        for start in range(0, len(keys), step):
            grant = await self._store.acquire(
                DAEMON_SESSION,
                NamespaceId(request.namespace_id),
                keys[start : start + step],
                wait_s=wait_s,
                spans=(Span(part, 0, len(keys[start : start + step])),),
            )
            try:
                chunks = await asyncio.to_thread(self._copy_out, grant)
            finally:
                held = self._store.release(DAEMON_SESSION, [grant.lease_id])
            if held != [True]:
                raise Unavailable("copying took longer than a lease lasts", reason="slow_stream")
            yield pb.GetReply(
                header=pb.GetHeader(
                    found=[slot is not None for slot in grant.slots],
                    checksums=grant.checksums,
                    record_nbytes=record_nbytes,
                )
            )
            for chunk in chunks:
                yield pb.GetReply(chunk=chunk)

    def _copy_out(self, grant: Grant) -> list[bytes]:
        return list(gather(self._store.view(slot) for slot in grant.slots if slot))
