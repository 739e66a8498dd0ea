"""Records as byte streams over gRPC, for clients that cannot map the arena."""

from __future__ import annotations

import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Sequence
from typing import TYPE_CHECKING

from kvstore.client.batch import STREAM_BYTES_PER_S, Batch
from kvstore.client.caller import DURABLE_WAIT_S, Caller
from kvstore.client.copying import Copiers, Taken, Wanted
from kvstore.client.pieces import Memory, joined
from kvstore.model.block import Committed
from kvstore.model.checksum import checksum
from kvstore.model.errors import Incompatible, InvalidRequest
from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.system.patience import Patience
from kvstore.transport.chunks import Scatter, gather
from kvstore.transport.messages import committed_of

if TYPE_CHECKING:
    from kvstore.rpc.v1.kvstore_pb2_grpc import KVStoreAsyncStub


class Streams:
    """Moves records for a client that does not map the arena."""

    def __init__(self, caller: Caller, copiers: Copiers) -> None:
        self._caller = caller
        self._copiers = copiers

    async def put(
        self, batch: Batch, records: Sequence[Memory], durable: bool, patience: Patience
    ) -> Committed:
        whole = [joined(record) for record in records]
        header = pb.PutHeader(
            namespace_id=batch.namespace_id,
            keys=b"".join(batch.keys),
            first_block=batch.first_block,
            parent=batch.parent or b"",
            group=batch.part.group,
            shard=batch.part.shard,
            checksums=await self._copiers.map(checksum, whole),
            durable=durable,
            wait_s=patience.left_s,
            tokens=batch.tokens.packed if batch.tokens else b"",
            lora_name=batch.tokens.lora_name if batch.tokens else "",
        )

        def call(stub: KVStoreAsyncStub, _: int, timeout_s: float) -> Awaitable[pb.CommitReply]:
            return stub.Put(_put_messages(header, whole), timeout=timeout_s)

        busy_s = batch.stream_s + (DURABLE_WAIT_S if durable else 0.0)
        with patience.waiting(busy_s) as wait_s:
            reply = await self._caller.call(
                call, wait_s=wait_s + busy_s, namespace_id=batch.namespace_id
            )
        done = committed_of(reply)
        if done.refused:  # it has waited, but nothing tells for how long
            patience.end()
        return done

    async def take(
        self, batch: Batch, window_nbytes: int, patience: Patience, wanted: Wanted
    ) -> list[Taken]:
        """Receive a window, then copy and verify it."""
        taken: list[Taken] = []
        for where, window in batch.windows(window_nbytes):
            records, checksums = await self._received(window, patience)
            taken += await self._copiers.take(records, checksums, wanted[where])
        return taken

    async def _received(
        self, batch: Batch, patience: Patience
    ) -> tuple[list[memoryview | None], list[int]]:
        """Receive records and their checksums, unverified."""
        request = pb.GetRequest(
            namespace_id=batch.namespace_id,
            keys=b"".join(batch.keys),
            group=batch.part.group,
            shard=batch.part.shard,
            wait_s=patience.left_s,
        )

        async def call(
            stub: KVStoreAsyncStub, _: int, timeout_s: float
        ) -> tuple[list[memoryview | None], list[int]]:
            return await _read_stream(stub.Get(request, timeout=timeout_s), batch)

        began, wait_s = time.monotonic(), patience.left_s + batch.stream_s
        received = await self._caller.call(call, wait_s=wait_s, namespace_id=batch.namespace_id)
        nbytes = sum(len(record) for record in received[0] if record is not None)
        patience.spend(time.monotonic() - began - nbytes / STREAM_BYTES_PER_S)
        return received


async def _put_messages(
    header: pb.PutHeader, records: Sequence[memoryview]
) -> AsyncIterator[pb.PutRequest]:
    yield pb.PutRequest(header=header)
    for chunk in gather(records):
        yield pb.PutRequest(chunk=chunk)


async def _read_stream(
    replies: AsyncIterable[pb.GetReply], batch: Batch
) -> tuple[list[memoryview | None], list[int]]:
    """Put the windows of a Get together. Raises Incompatible if the daemon does not keep the order
    that the protocol gives."""
    views: list[memoryview | None] = []
    checksums: list[int] = []
    scatter = Scatter([], batch.record_nbytes)
    try:
        async for reply in replies:
            if reply.WhichOneof("message") == "chunk":
                scatter.write(memoryview(reply.chunk))
                continue
            scatter.finish()
            header = reply.header
            if header.record_nbytes != batch.record_nbytes or len(header.found) > len(
                batch.keys
            ) - len(views):
                raise Incompatible("the daemon answers other records than were asked for")
            window = [
                memoryview(bytearray(batch.record_nbytes)) if found else None
                for found in header.found
            ]
            views += window
            checksums += header.checksums
            scatter = Scatter([view for view in window if view], batch.record_nbytes)
        scatter.finish()
    except InvalidRequest as error:
        raise Incompatible(f"the daemon broke off or sent too much: {error}") from error
    if not len(views) == len(checksums) == len(batch.keys):
        raise Incompatible(f"the daemon answered {len(views)} of {len(batch.keys)} keys")
    return views, checksums
