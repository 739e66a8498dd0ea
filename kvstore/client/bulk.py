"""Put and get of whole records: in place where the arena is mapped, else as byte streams.

Copies and checksums run in a small thread pool, a window of records at a time: one reserve (or
acquire), one pass over the bytes, one commit (or release) per window. What has to come up from
slower tiers is got in pieces, several in flight.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from kvstore.block import (
    BlockKey,
    Buffer,
    Committed,
    NamespaceId,
    Part,
    Span,
    check_keys,
)
from kvstore.checksum import checksum, copy_bytes, copy_in, copy_out
from kvstore.client.caller import Caller
from kvstore.errors import Incompatible, InvalidRequest, KVStoreError, SessionEnded
from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.transport.chunks import Scatter, gather
from kvstore.transport.messages import committed_of

if TYPE_CHECKING:
    from kvstore.client.async_client import AsyncClient
    from kvstore.rpc.v1.kvstore_pb2_grpc import KVStoreAsyncStub

T = TypeVar("T")
Taken = tuple[T | None, bool]  # a record, None if it is missing or corrupt; whether it is corrupt

logger = logging.getLogger(__name__)

STREAM_WINDOW_NBYTES = 64 << 20
LEASED_WINDOW_NBYTES = 256 << 20
PIECE_NBYTES = 16 << 20  # of what has to come up first
PIECES_IN_FLIGHT = 4
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

    def windows(self, nbytes: int) -> Iterator[tuple[slice, _Batch]]:
        """Cut into batches of bounded bytes and keys; yields which keys each has."""
        step = max(1, min(WINDOW_KEYS, nbytes // self.record_nbytes))
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
        for where, window in batch.windows(self._window_nbytes):
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
        taken = await self._taken(batch, wait_s, _take)
        await self._report(batch, taken)
        return [record for record, _ in taken]

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
        taken = await self._taken(batch, wait_s, partial(_take_into, verify=verify), views)
        await self._report(batch, taken)
        return [record is not None for record, _ in taken]

    async def _taken(
        self, batch: _Batch, wait_s: float, take: Callable[..., Taken[T]], *more: Sequence[Any]
    ) -> list[Taken[T]]:
        """Call `take` with the bytes, None for what is missing, and checksum of each block, and its
        item of `more`."""
        move = self._taken_in_place if self._client.local else self._taken_from_stream
        return await move(batch, wait_s, take, *more)

    @property
    def _window_nbytes(self) -> int:
        """What to move at once; a quarter of a mapped arena at most, half of what it lends."""
        mapped = sum(map(len, self._client.extents().values()))
        return min(LEASED_WINDOW_NBYTES, mapped // 4) if mapped else STREAM_WINDOW_NBYTES

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
            checksums = await self._map(_fill, records, targets)
        except BaseException:
            await self._client.release(grant.lease_id)
            raise
        return await self._client.commit(grant.lease_id, checksums, durable=durable)

    async def _taken_in_place(
        self,
        batch: _Batch,
        wait_s: float,
        take: Callable[..., Taken[T]],
        *more: Sequence[Any],
    ) -> list[Taken[T]]:
        """Take what is in the arena, a window at once; from the first large one on that is not all
        there, and may be waited for, piece by piece."""
        deadline = time.monotonic() + wait_s
        taken: list[Taken[T]] = []
        for where, window in batch.windows(self._window_nbytes):
            is_small = len(window.keys) * batch.record_nbytes <= PIECE_NBYTES
            if wait_s > 0 and not (is_small or await self._is_up(window)):
                rest = range(where.start, len(batch.keys))
                taken += [(None, False)] * len(rest)
                await self._take_pieces(batch, rest, deadline, taken, take, *more)
                break
            left_s = max(0.0, deadline - time.monotonic())
            taken += await self._leased(window, left_s, take, *(items[where] for items in more))
        return taken

    async def _is_up(self, batch: _Batch) -> bool:
        match = await self._client.match(batch.namespace_id, batch.keys)
        return match.resident_blocks == len(batch.keys)

    async def _take_pieces(
        self,
        batch: _Batch,
        wanted: range,
        deadline: float,
        taken: list[Taken[T]],
        take: Callable[..., Taken[T]],
        *more: Sequence[Any],
    ) -> None:
        """Fill in the `wanted` places of `taken`: one piece is copied while those behind it come
        up. All in flight together lease no more than a window."""
        blocks = max(1, self._window_nbytes // batch.record_nbytes)
        step = max(1, min(PIECE_NBYTES // batch.record_nbytes, blocks // PIECES_IN_FLIGHT))
        pieces = iter([slice(at, min(at + step, wanted.stop)) for at in wanted[::step]])

        async def take_some() -> None:
            for piece in pieces:
                left_s = max(0.0, deadline - time.monotonic())
                taken[piece] = await self._leased(
                    replace(batch, keys=batch.keys[piece]),
                    left_s,
                    take,
                    *(items[piece] for items in more),
                )

        await _together([take_some() for _ in range(min(PIECES_IN_FLIGHT, blocks // step))])

    async def _leased(
        self,
        batch: _Batch,
        wait_s: float,
        take: Callable[..., Taken[T]],
        *more: Sequence[Any],
    ) -> list[Taken[T]]:
        """Call `take` in threads with the slot and checksum of each block, and its item of `more`.

        If the lease had ended, the slots may have been somebody else's meanwhile: nothing of what
        was read counts.
        """
        grant = await self._client.acquire(
            batch.namespace_id, batch.keys, wait_s=wait_s, spans=batch.spans
        )
        held = False
        try:
            views = [self._client.view(slot) if slot else None for slot in grant.slots]
            result = await self._map(take, views, grant.checksums, *more)
        finally:
            (held,) = await self._client.release(grant.lease_id)
        return result if held else [(None, False)] * len(batch.keys)

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
            checksums=await self._map(checksum, records),
            durable=durable,
            wait_s=wait_s,
        )

        def call(stub: KVStoreAsyncStub, _: int, timeout_s: float) -> Awaitable[pb.CommitReply]:
            return stub.Put(_put_messages(header, records), timeout=timeout_s)

        extra_s = wait_s + batch.stream_s + (DURABLE_WAIT_S if durable else 0.0)
        return committed_of(await self._caller.call(call, wait_s=extra_s))

    async def _taken_from_stream(
        self, batch: _Batch, wait_s: float, take: Callable[..., Taken[T]], *more: Sequence[Any]
    ) -> list[Taken[T]]:
        taken: list[Taken[T]] = []
        for where, window in batch.windows(STREAM_WINDOW_NBYTES):
            records, checksums = await self._stream(window, wait_s)
            taken += await self._map(take, records, checksums, *(items[where] for items in more))
        return taken

    async def _stream(
        self, batch: _Batch, wait_s: float
    ) -> tuple[list[memoryview | None], list[int]]:
        """Receive records and their checksums, unverified."""
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

        return await self._caller.call(call, wait_s=wait_s + batch.stream_s)

    # ---- inside ------------------------------------------------------------------------------

    def _batch(self, namespace_id: NamespaceId, keys: Sequence[BlockKey], part: Part) -> _Batch:
        check_keys(keys)
        record_nbytes = self._client.namespace(namespace_id).record_nbytes(part)
        return _Batch(namespace_id, keys, part, record_nbytes)

    async def _report(self, batch: _Batch, taken: Sequence[Taken[Any]]) -> None:
        """Have the daemon drop blocks whose bytes are wrong, so that they are put anew."""
        corrupt = [key for key, (_, wrong) in zip(batch.keys, taken, strict=True) if wrong]
        self.corrupt_blocks += len(corrupt)
        for start in range(0, len(corrupt), WINDOW_KEYS):
            some = corrupt[start : start + WINDOW_KEYS]
            logger.error("corrupt_blocks=%d first=%s", len(some), some[0][:4].hex())
            try:
                await self._client.delete(batch.namespace_id, some, corrupt=True)
            except KVStoreError as error:
                logger.warning("corrupt_blocks=kept reason=%r", str(error))

    async def _map(self, work: Callable[..., T], *items: Sequence[Any]) -> list[T]:
        """Return `work` of each record, done by all threads at once."""
        loop = asyncio.get_running_loop()
        share = max(1, -(-len(items[0]) // COPY_THREADS))
        jobs = [
            loop.run_in_executor(self._copiers, _each, work, [i[at : at + share] for i in items])
            for at in range(0, len(items[0]), share)
        ]
        try:
            await _ended(jobs)
        except asyncio.CancelledError:
            # A thread cannot be stopped; while one still runs, the slots must stay ours.
            await _ended(jobs)
            raise
        return [result for job in jobs for result in job.result()]


async def _together(jobs: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run jobs until all have ended, or one has failed and the others were ended."""
    tasks = [asyncio.create_task(job) for job in jobs]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await _ended(tasks)
    for task in tasks:
        if not task.cancelled():
            task.result()


async def _ended(jobs: Sequence[asyncio.Future[Any]]) -> None:
    if jobs:
        await asyncio.wait(jobs)


def _each(work: Callable[..., T], items: Sequence[Sequence[Any]]) -> list[T]:
    return [work(*each) for each in zip(*items, strict=True)]


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


def _fill(record: memoryview, target: memoryview | None) -> int:
    """Copy a record into its slot and return the checksum of what was to be written.

    Of the source, not of the slot: then a stray write into the slot is found by every reader.
    """
    return 0 if target is None else copy_in(record, target)


def _take(view: memoryview | None, expected: int) -> Taken[bytes]:
    """Copy a record out, then verify the copy: what the caller gets is what was checked."""
    if view is None:
        return None, False
    record = bytes(view)
    corrupt = checksum(record) != expected
    return None if corrupt else record, corrupt


def _take_into(
    view: memoryview | None, expected: int, target: memoryview, *, verify: bool
) -> Taken[memoryview]:
    """The same, into memory of the caller's."""
    if view is None:
        return None, False
    if not verify:
        copy_bytes(view, target)
        return target, False
    corrupt = copy_out(view, target) != expected
    return None if corrupt else target, corrupt


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
