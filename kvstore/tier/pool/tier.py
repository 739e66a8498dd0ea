"""The records of a pool: looked for, read and verified, written, removed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from kvstore.metrics import Metrics
from kvstore.model.block import PAGE_NBYTES, BlockKey, NamespaceId, Part
from kvstore.model.checksum import copy_in, copy_out
from kvstore.settings import PoolSettings
from kvstore.system.background import keep_running
from kvstore.system.threads import Threads, outlive
from kvstore.tier.pool.client import PoolClient
from kvstore.tier.pool.failure import MISSING, NO_ROOM, TOO_LARGE, PoolFailed, is_host_gone
from kvstore.tier.pool.memory import lane_nbytes
from kvstore.tier.pool.messages import NAMES_MAX, Operation
from kvstore.tier.pool.names import record_name
from kvstore.tier.pool.value import encode_page, parse_page, value_nbytes

logger = logging.getLogger(__name__)

WRONG, DEAD = -1, -2  # in the place of a checksum
THREADS = 2  # that copy and verify
AGAIN_S = 0.2  # until what was being put is removed once more
REMOVES_MAX = 2048  # names in one call
DROP_S = 5.0
DROPS_MAX = 16  # removals of wrong values at once
_REMOVED = (0, MISSING)


class PoolRecord(NamedTuple):
    """One record. nbytes: of it, without its page. floor: a value that was put no later is dead."""

    namespace_id: NamespaceId
    part: Part
    key: BlockKey
    nbytes: int
    floor: int = 0

    @property
    def name(self) -> str:
        return record_name(self.namespace_id, self.key, self.part)


class PoolWrite(NamedTuple):
    """A record to be put, where it is, what its writer said of it, and the time it is put at."""

    record: PoolRecord
    source: memoryview
    checksum: int
    block_index: int
    parent: BlockKey | None
    stamp: int = 1


class PoolTier:
    """The pool of one node. Times are seconds of `now`."""

    def __init__(self, settings: PoolSettings, metrics: Metrics, now: Callable[[], float]) -> None:
        self.nbytes_max = lane_nbytes(settings.buffer_bytes) - PAGE_NBYTES
        self._settings = settings
        self._metrics = metrics
        self._now = now
        self._client = PoolClient(settings, now, self._count, buffer_bytes=settings.buffer_bytes)
        # Memory that others use is in a process that does nothing else, so no hang costs it.
        self._giver = (
            PoolClient(
                settings,
                now,
                self._count,
                segment_bytes=settings.segment_bytes,
                buffer_bytes=0,
            )
            if settings.segment_bytes
            else None
        )
        self._threads = Threads(THREADS, thread_name_prefix="kvstore-pool")
        self._tasks: list[asyncio.Task[None]] = []
        self._drops: set[asyncio.Task[None]] = set()

    @property
    def up(self) -> bool:
        """Whether it is worth asking."""
        return self._client.up

    @property
    def connecting(self) -> bool:
        """Whether it has not been up yet, nor failed."""
        return self._client.state == "starting"

    @property
    def trips(self) -> int:
        """How often it has gone away."""
        return self._client.breaker.trips

    def start(self) -> None:
        """Begin to connect; a pool that does not answer delays nothing."""
        for client in filter(None, (self._giver, self._client)):
            work = keep_running("pool", client.run, self._metrics.task_failed)
            self._tasks.append(asyncio.create_task(work))

    async def close(self) -> None:
        """End its processes."""
        for task in (*self._tasks, *self._drops):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._drops, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def exists(self, names: Sequence[str], deadline: float) -> list[bool]:
        """Say of each whether the pool has it. Raises PoolFailed."""
        found: list[bool] = []
        for first in range(0, len(names), NAMES_MAX):
            part = names[first : first + NAMES_MAX]
            codes = await self._client.control(Operation.EXISTS, part, deadline)
            found += [code == 1 for code in codes]
        return found

    async def sizes(self, names: Sequence[str], deadline: float) -> list[int]:
        """Return the bytes of each record, 0 for what it has not. Raises PoolFailed."""
        codes = await self._client.control(Operation.SIZES, names, deadline)
        return [max(0, code - PAGE_NBYTES) for code in codes]

    async def get(
        self, wanted: Sequence[tuple[PoolRecord, memoryview]], deadline: float
    ) -> list[int]:
        """Read records into their targets, verified; return their checksums.

        Raises PoolFailed if one is missing, wrong or late. Once this has returned, raised or been
        cancelled, nothing writes into the targets any more.
        """
        checksums: list[int] = []
        for piece in self._pieces(wanted):
            async with self._client.lane(deadline) as lane:
                names = [record.name for record, _ in piece]
                sizes = [value_nbytes(record.nbytes) for record, _ in piece]
                codes = await lane.move(Operation.GET, names, sizes, deadline)
                self._check_got(names, sizes, codes)
                job = asyncio.get_running_loop().run_in_executor(
                    self._threads, _take_in, lane.view, piece
                )
                try:
                    found = await asyncio.shield(job)
                finally:
                    await outlive([job])
            self._check_found(names, found)
            checksums += found
            self._metrics.bytes.labels("pool", "read").inc(sum(sizes))
        return checksums

    def _pieces(
        self, wanted: Sequence[tuple[PoolRecord, memoryview]]
    ) -> Iterator[list[tuple[PoolRecord, memoryview]]]:
        """Cut a list of records into what fits a lane."""
        piece: list[tuple[PoolRecord, memoryview]] = []
        nbytes = 0
        for each in wanted:
            own = value_nbytes(each[0].nbytes)
            if own > self.nbytes_max + PAGE_NBYTES:
                raise PoolFailed("a record larger than the buffer's lanes", reason="missing")
            if piece and nbytes + own > self.nbytes_max + PAGE_NBYTES:
                yield piece
                piece, nbytes = [], 0
            piece.append(each)
            nbytes += own
        if piece:
            yield piece

    def _check_got(self, names: Sequence[str], sizes: Sequence[int], codes: Sequence[int]) -> None:
        """Raise PoolFailed unless every value came, of the size that it should have."""
        if list(codes) == list(sizes):
            return
        pairs = zip(names, sizes, codes, strict=True)
        wrong = [name for name, nbytes, code in pairs if code >= 0 and code != nbytes]
        wrong += [name for name, code in zip(names, codes, strict=True) if code == TOO_LARGE]
        if wrong:
            self._drop(wrong)
            raise PoolFailed(f"{len(wrong)} values of a wrong size", reason="corrupt")
        if any(map(is_host_gone, codes)):
            raise PoolFailed("a host that has some of it does not answer", reason="gone")
        raise PoolFailed("it has lost some of what it had", reason="missing")

    def _check_found(self, names: Sequence[str], found: Sequence[int]) -> None:
        """Raise PoolFailed unless every value is what was put, and was not deleted."""
        pairs = list(zip(names, found, strict=True))
        if wrong := [name for name, value in pairs if value == WRONG]:
            self._drop(wrong)
            raise PoolFailed(f"{len(wrong)} values are not what was put", reason="corrupt")
        if dead := [name for name, value in pairs if value == DEAD]:
            self._drop(dead, corrupt=False)
            raise PoolFailed(f"{len(dead)} values were deleted", reason="missing")

    def _drop(self, names: Sequence[str], *, corrupt: bool = True) -> None:
        """Remove values that are wrong, which is counted, or dead: right ones can be put then."""
        if corrupt:
            self._metrics.corrupt_blocks.labels("pool").inc(len(names))
        logger.warning("pool=%s values=%d", "corrupt" if corrupt else "deleted", len(names))
        if len(self._drops) < DROPS_MAX:
            task = asyncio.get_running_loop().create_task(self._drop_quietly(names))
            self._drops.add(task)
            task.add_done_callback(self._drops.discard)

    async def _drop_quietly(self, names: Sequence[str]) -> None:
        try:
            await self.remove(names, self._now() + DROP_S)
        except PoolFailed as error:
            logger.warning("pool=not_removed values=%d reason=%r", len(names), str(error))

    async def put(self, writes: Sequence[PoolWrite], deadline: float) -> PutResult:
        """Put records that fit a lane together, after their bytes were verified on the way.

        Raises PoolFailed: then it is not known which of them are there.
        """
        async with self._client.lane(deadline, puts=True) as lane:
            job = asyncio.get_running_loop().run_in_executor(
                self._threads, _lay_out, lane.view, list(writes)
            )
            try:
                good = await asyncio.shield(job)
            finally:
                await outlive([job])
            names = [write.record.name for write in good]
            sizes = [value_nbytes(write.record.nbytes) for write in good]
            codes = await lane.move(Operation.PUT, names, sizes, deadline) if good else []
        pairs = list(zip(good, codes, strict=True))
        done = [write for write, code in pairs if code == 0]
        self._metrics.bytes.labels("pool", "write").inc(
            sum(value_nbytes(write.record.nbytes) for write in done)
        )
        return PutResult(
            done,
            full=sum(code == NO_ROOM for code in codes),
            failed=[write for write, code in pairs if code not in (0, NO_ROOM)],
            corrupt=len(writes) - len(good),
        )

    async def remove(self, names: Sequence[str], deadline: float) -> None:
        """Remove values; when this returns, none of them is there. Raises PoolFailed."""
        left = list(names)
        while left:
            again: list[str] = []
            for first in range(0, len(left), REMOVES_MAX):
                part = left[first : first + REMOVES_MAX]
                codes = await self._client.control(Operation.REMOVE, part, deadline)
                again += [n for n, code in zip(part, codes, strict=True) if code not in _REMOVED]
            left = again
            if left and self._now() + AGAIN_S > deadline:
                raise PoolFailed(f"{len(left)} values are still being put", reason="slow")
            if left:  # being put by somebody: until that ends, nothing removes them
                await asyncio.sleep(AGAIN_S)

    async def purge(self, pattern: str, deadline: float) -> None:
        """Remove all values whose names match. Raises PoolFailed."""
        (code,) = await self._client.control(Operation.PURGE, [pattern], deadline)
        if code < 0:
            raise PoolFailed(f"the pool removes nothing: code {code}", reason="gone")

    def stats(self) -> dict[str, Any]:
        """Return what `kvstore status` shows of the connection."""
        client, giver = self._client, self._giver
        return {
            "url": self._settings.url,
            "state": client.state,
            "breaker": client.breaker.state.value,
            "trips": client.breaker.trips,
            "restarts": max(0, client.starts - 1),
            "hung": client.hung,
            "last_error": client.last_error,
            "buffer_bytes": self._settings.buffer_bytes,
            "segment_bytes": self._settings.segment_bytes,
            "segment_state": giver.state if giver is not None else "none",
            "segment_error": giver.last_error if giver is not None else "",
        }

    def _count(self, operation: str, outcome: str) -> None:
        self._metrics.pool_requests.labels(operation, outcome).inc()


class PutResult(NamedTuple):
    """done: what the pool has now. full: how many it had no room for. failed: of which it is not
    known. corrupt: how many did not match their checksum here."""

    done: list[PoolWrite]
    full: int
    failed: list[PoolWrite]
    corrupt: int


def _take_in(view: memoryview, piece: Sequence[tuple[PoolRecord, memoryview]]) -> list[int]:
    """Copy records out of a lane, each verified where it has arrived; return their checksums, or
    WRONG, or DEAD.

    Blocking.
    """
    found: list[int] = []
    at = 0
    for record, target in piece:
        page = bytes(view[at : at + PAGE_NBYTES])
        told = parse_page(
            memoryview(page),
            record.name,
            record.namespace_id,
            record.part,
            key=record.key,
            nbytes=record.nbytes,
        )
        begin = at + PAGE_NBYTES
        at = begin + record.nbytes
        if told is None:
            found.append(WRONG)
            continue
        expected, stamp = told
        if stamp <= record.floor:
            found.append(DEAD)
        else:
            good = copy_out(view[begin:at], target) == expected
            found.append(expected if good else WRONG)
    return found


def _lay_out(view: memoryview, writes: Sequence[PoolWrite]) -> list[PoolWrite]:
    """Copy records and their pages into a lane; return those whose bytes are what was put.

    Blocking.
    """
    good: list[PoolWrite] = []
    at = 0
    for write in writes:
        record = write.record
        begin = at + PAGE_NBYTES
        end = begin + record.nbytes
        if copy_in(write.source, view[begin:end]) != write.checksum:
            continue
        view[at:begin] = encode_page(
            record.name,
            record.namespace_id,
            record.part,
            key=record.key,
            parent=write.parent,
            block_index=write.block_index,
            nbytes=record.nbytes,
            checksum=write.checksum,
            stamp=write.stamp,
        )
        good.append(write)
        at = end
    return good
