"""Put and get of whole records: in place where the arena is mapped, else as byte streams.

Copies and checksums run in a small thread pool, a window of records at a time: one reserve (or
acquire), one pass over the bytes, one commit (or release) per window.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import numpy as np

from kvstore.block import (
    BlockKey,
    Buffer,
    Committed,
    NamespaceId,
    Part,
    Span,
    check_keys,
)
from kvstore.checksum import checksum
from kvstore.client.caller import Caller
from kvstore.errors import Incompatible, InvalidRequest, KVStoreError, SessionEnded
from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.transport.chunks import Scatter, gather
from kvstore.transport.messages import committed_of

if TYPE_CHECKING:
    from kvstore.client.async_client import AsyncClient
    from kvstore.rpc.v1.kvstore_pb2_grpc import KVStoreAsyncStub

T = TypeVar("T")
P = ParamSpec("P")
Found = tuple[list[bytes | None], list[BlockKey]]  # records, and the keys of corrupt ones
Filled = tuple[list[bool], list[BlockKey]]  # which targets were filled; keys as above

logger = logging.getLogger(__name__)

WINDOW_NBYTES = 64 << 20
WINDOW_KEYS = 1024
DURABLE_WAIT_S = 30.0
STREAM_BYTES_PER_S = 50e6  # slowest stream that is still waited for
COPY_THREADS = 2


@dataclass(frozen=True, slots=True)
class _Batch:
    """Consecutive blocks of one prefix, where they stand in it, and which part of them is meant."""

    namespace_id: NamespaceId
    keys: Sequence[BlockKey]
    part: Part
    record_nbytes: int
    first_block: int = 0
    parent: BlockKey | None = None

    def windows(self) -> Iterator[tuple[slice, _Batch]]:
        """Cut into batches of bounded bytes and keys; yields which keys each has."""
        step = max(1, min(WINDOW_KEYS, WINDOW_NBYTES // self.record_nbytes))
        for start in range(0, len(self.keys), step):
            where = slice(start, start + step)
            yield (
                where,
                replace(
                    self,
                    keys=self.keys[where],
                    first_block=self.first_block + start,
                    parent=self.keys[start - 1] if start else self.parent,
                ),
            )

    @property
    def spans(self) -> tuple[Span, ...]:
        return (Span(self.part, 0, len(self.keys)),)

    @property
    def stream_s(self) -> float:
        return len(self.keys) * self.record_nbytes / STREAM_BYTES_PER_S


class Bulk:
    """Moves records for one client."""

    def __init__(self, client: AsyncClient, caller: Caller) -> None:
        self.corrupt_blocks = 0
        self._client = client
        self._caller = caller
        self._copiers = ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="kvstore-copy")

    def close(self) -> None:
        self._copiers.shutdown(wait=False, cancel_futures=True)

    async def put(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        records: Sequence[Buffer],
        *,
        part: Part,
        first_block: int,
        parent: BlockKey | None,
        durable: bool,
        wait_s: float,
    ) -> Committed:
        check_keys([parent] if parent else [])
        batch = replace(
            self._batch(namespace_id, keys, part), first_block=first_block, parent=parent
        )
        views = _flat(records, batch)
        await self._client.connect()
        committed = existing = refused = 0
        safe = durable
        for where, window in batch.windows():
            done = await self._put_window(window, views[where], durable, wait_s)
            committed += done.committed
            existing += done.existing
            refused += done.refused
            safe = safe and done.durable
        return Committed(committed, existing, refused, safe)

    async def get(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        *,
        part: Part,
        wait_s: float,
    ) -> list[bytes | None]:
        batch = self._batch(namespace_id, keys, part)
        await self._client.connect()
        found: list[bytes | None] = []
        for _, window in batch.windows():
            move = self._get_local if self._client.local else self._get_remote
            records, corrupt = await move(window, wait_s)
            found += records
            if corrupt:
                await self._report(window, corrupt)
        return found

    async def get_into(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        targets: Sequence[Buffer],
        *,
        part: Part,
        wait_s: float,
        verify: bool,
    ) -> list[bool]:
        batch = self._batch(namespace_id, keys, part)
        views = _flat(targets, batch)
        if any(view.readonly for view in views):
            raise InvalidRequest("a target cannot be written to")
        await self._client.connect()
        filled: list[bool] = []
        for where, window in batch.windows():
            move = self._fill_local if self._client.local else self._fill_remote
            done, corrupt = await move(window, views[where], wait_s, verify)
            filled += done
            if corrupt:
                await self._report(window, corrupt)
        return filled

    async def _put_window(
        self, batch: _Batch, records: Sequence[memoryview], durable: bool, wait_s: float
    ) -> Committed:
        for last in (False, True):
            try:
                move = self._put_local if self._client.local else self._put_remote
                return await move(batch, records, durable, wait_s)
            except SessionEnded:  # putting again is harmless: what is stored already stays
                if last:
                    raise
        raise AssertionError("the last round returns or raises")

    # ---- in place ----------------------------------------------------------------------------

    async def _put_local(
        self, batch: _Batch, records: Sequence[memoryview], durable: bool, wait_s: float
    ) -> Committed:
        grant = await self._client.reserve(
            batch.namespace_id,
            batch.keys,
            first_block=batch.first_block,
            parent=batch.parent,
            spans=batch.spans,
            wait_s=wait_s,
        )
        try:
            targets = [self._client.view(slot) if slot else None for slot in grant.slots]
            checksums = await self._in_thread(_fill, records, targets)
        except BaseException:
            await self._client.release(grant.lease_id)
            raise
        return await self._client.commit(grant.lease_id, checksums, durable=durable)

    async def _get_local(self, batch: _Batch, wait_s: float) -> Found:
        found, held = await self._leased(batch, wait_s, partial(_verified, batch.keys))
        return found if held else ([None] * len(batch.keys), [])

    async def _fill_local(
        self, batch: _Batch, targets: Sequence[memoryview], wait_s: float, verify: bool
    ) -> Filled:
        copy = partial(_filled, batch.keys, targets, verify=verify)
        filled, held = await self._leased(batch, wait_s, copy)
        return filled if held else ([False] * len(batch.keys), [])

    async def _leased(
        self,
        batch: _Batch,
        wait_s: float,
        read: Callable[[Sequence[memoryview | None], Sequence[int]], T],
    ) -> tuple[T, bool]:
        """Have `read` look at the leased slots and their checksums, in a thread.

        False: the lease had ended, so the slots may have been somebody else's meanwhile, and
        nothing of what was read counts.
        """
        grant = await self._client.acquire(
            batch.namespace_id, batch.keys, wait_s=wait_s, spans=batch.spans
        )
        held = False
        try:
            views = [self._client.view(slot) if slot else None for slot in grant.slots]
            result = await self._in_thread(read, views, grant.checksums)
        finally:
            (held,) = await self._client.release(grant.lease_id)
        return result, held

    # ---- streams -----------------------------------------------------------------------------

    async def _put_remote(
        self, batch: _Batch, records: Sequence[memoryview], durable: bool, wait_s: float
    ) -> Committed:
        header = pb.PutHeader(
            namespace_id=batch.namespace_id,
            keys=b"".join(batch.keys),
            first_block=batch.first_block,
            parent=batch.parent or b"",
            group=batch.part.group,
            shard=batch.part.shard,
            checksums=await self._in_thread(_checksums, records),
            durable=durable,
            wait_s=wait_s,
        )

        def call(stub: KVStoreAsyncStub, _: int, timeout_s: float) -> Awaitable[pb.CommitReply]:
            return stub.Put(_put_messages(header, records), timeout=timeout_s)

        extra_s = wait_s + batch.stream_s + (DURABLE_WAIT_S if durable else 0.0)
        return committed_of(await self._caller.call(call, wait_s=extra_s))

    async def _get_remote(self, batch: _Batch, wait_s: float) -> Found:
        request = pb.GetRequest(
            namespace_id=batch.namespace_id,
            keys=b"".join(batch.keys),
            group=batch.part.group,
            shard=batch.part.shard,
            wait_s=wait_s,
        )

        async def call(
            stub: KVStoreAsyncStub, _: int, timeout_s: float
        ) -> tuple[list[memoryview | None], list[int]]:
            return await _read_stream(stub.Get(request, timeout=timeout_s), batch)

        records, checksums = await self._caller.call(call, wait_s=wait_s + batch.stream_s)
        return await self._in_thread(_verified, batch.keys, records, checksums)

    async def _fill_remote(
        self, batch: _Batch, targets: Sequence[memoryview], wait_s: float, verify: bool
    ) -> Filled:
        records, corrupt = await self._get_remote(batch, wait_s)
        for record, target in zip(records, targets, strict=True):
            if record is not None:
                target[:] = record
        return [record is not None for record in records], corrupt

    # ---- inside ------------------------------------------------------------------------------

    def _batch(self, namespace_id: NamespaceId, keys: Sequence[BlockKey], part: Part) -> _Batch:
        check_keys(keys)
        record_nbytes = self._client.namespace(namespace_id).record_nbytes(part)
        return _Batch(namespace_id, keys, part, record_nbytes)

    async def _report(self, batch: _Batch, corrupt: list[BlockKey]) -> None:
        """Have the daemon drop blocks whose bytes are wrong, so that they are put anew."""
        self.corrupt_blocks += len(corrupt)
        logger.error("corrupt_blocks=%d first=%s", len(corrupt), corrupt[0][:4].hex())
        try:
            await self._client.delete(batch.namespace_id, corrupt)
        except KVStoreError as error:
            logger.warning("corrupt_blocks=kept reason=%r", str(error))

    async def _in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._copiers, partial(work, *args, **kwargs))


def _flat(records: Sequence[Buffer], batch: _Batch) -> list[memoryview]:
    """Return the records as bytes. Raises InvalidRequest unless they fit keys and namespace."""
    if len(records) != len(batch.keys):
        raise InvalidRequest(f"{len(records)} records for {len(batch.keys)} keys")
    views = []
    for index, record in enumerate(records):
        view = memoryview(record)
        if not view.c_contiguous or view.nbytes != batch.record_nbytes:
            raise InvalidRequest(
                f"record {index} has {view.nbytes} bytes; {batch.record_nbytes} in one piece are "
                f"what the namespace says of group {batch.part.group}"
            )
        views.append(view.cast("B"))
    return views


def _fill(records: Sequence[memoryview], targets: Sequence[memoryview | None]) -> list[int]:
    """Copy records into their slots and return the checksums of what was to be written.

    Of the source, not of the slot: then a stray write into the slot is found by every reader.
    """
    checksums = []
    for record, target in zip(records, targets, strict=True):
        if target is None:
            checksums.append(0)
            continue
        _copy(record, target)
        checksums.append(checksum(record))
    return checksums


def _checksums(records: Sequence[memoryview]) -> list[int]:
    return [checksum(record) for record in records]


def _verified(
    keys: Sequence[BlockKey], views: Sequence[memoryview | None], checksums: Sequence[int]
) -> Found:
    """Copy records out, then verify the copies: what the caller gets is what was checked."""
    records: list[bytes | None] = []
    corrupt = []
    for view, expected, key in zip(views, checksums, keys, strict=True):
        record = bytes(view) if view is not None else None
        if record is not None and checksum(record) != expected:
            corrupt.append(key)
            record = None
        records.append(record)
    return records, corrupt


def _filled(
    keys: Sequence[BlockKey],
    targets: Sequence[memoryview],
    views: Sequence[memoryview | None],
    checksums: Sequence[int],
    *,
    verify: bool,
) -> Filled:
    """Copy records into the caller's memory, then verify the copies if asked to."""
    filled, corrupt = [], []
    for key, target, view, expected in zip(keys, targets, views, checksums, strict=True):
        if view is not None:
            _copy(view, target)
        right = view is not None and (not verify or checksum(target) == expected)
        if view is not None and not right:
            corrupt.append(key)
        filled.append(right)
    return filled, corrupt


def _copy(source: memoryview, target: memoryview) -> None:
    """Copy bytes. numpy lets other threads run meanwhile, a slice assignment does not."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


async def _put_messages(
    header: pb.PutHeader, records: Sequence[memoryview]
) -> AsyncIterator[pb.PutRequest]:
    yield pb.PutRequest(header=header)
    for chunk in gather(records):
        yield pb.PutRequest(chunk=chunk)


async def _read_stream(
    replies: AsyncIterable[pb.GetReply], batch: _Batch
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
