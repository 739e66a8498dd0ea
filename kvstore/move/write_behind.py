"""Carries the planner's moves out: arena to file in the background; `reads` does the way back.

Written behind at once: one task takes what was committed, writes it in parallel, covers the whole
batch by one fdatasync (group commit) and only then tells the planner that it is durable. Every
record is verified on its way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence, Set
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

from kvstore.decide.index import StoredBlock, StoredFrame
from kvstore.decide.planner import Planner, Write
from kvstore.format.codec import Codec, encode_run
from kvstore.format.frame import KILLED_MAX, NO_KEY, FrameHeader, FrameKind, RunBlock
from kvstore.metrics import Metrics
from kvstore.model.block import PAGE_NBYTES, BlockKey, NamespaceId, Part
from kvstore.model.checksum import checksum
from kvstore.model.errors import CorruptBlock, KVStoreError, Unavailable
from kvstore.move.file_reads import Reads, keep_pinned
from kvstore.move.namespace_notes import NamespaceNotes
from kvstore.move.policy_notes import PolicyNotes
from kvstore.system.background import keep_running
from kvstore.tier.dram import Arena
from kvstore.tier.file import (
    Devices,
    DiskFailed,
    DiskFull,
    FrameRecord,
    Mount,
    Placed,
    aligned_copy,
)

logger = logging.getLogger(__name__)

RETRY_S = 5.0  # how long after a first failure what could not be written is tried again
RETRY_MAX_S = 60.0  # it doubles up to here: a disk that is gone for long costs nothing
BATCHES_MAX = 3  # on their way down at once
EVICT_ROUNDS_MAX = 8
RECALL_STEP_RUNS = 8  # indexed before anybody else gets a turn: about a millisecond
CLOSE_S = 1.0  # for a writer to end; one that a hung device holds is left behind
_DISK_ERRORS = (DiskFailed, DiskFull)


class WriteBehind:
    """Moves between one arena and at most one file tier. Lives on the store's event loop.

    A `Listener` of the file tier's devices.
    """

    def __init__(
        self,
        planner: Planner,
        arena: Arena,
        file: Devices | None,
        *,
        codec: Codec,
        metrics: Metrics,
        group_commit_bytes: int,
        threads: int = 2,
        executor: Executor | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._planner = planner
        self._arena = arena
        self._file = file
        self._codec = codec
        self._metrics = metrics
        self.group_commit_bytes = group_commit_bytes
        self._now = now
        self._workers = executor or ThreadPoolExecutor(threads, thread_name_prefix="kvstore-codec")
        self.reads = Reads(
            planner, arena, file, metrics=metrics, workers=self._workers, now=self._now
        )
        self._finding_room = asyncio.Lock()
        self._wanted_nbytes = 0  # of the runs for which room is being found
        self._wake = asyncio.Event()
        self._progress: asyncio.Future[None] | None = None
        self._writer: asyncio.Task[None] | None = None
        self.on_written: Callable[[Write], None] = lambda write: None
        self._failing = False
        self._failures = 0
        self._left_out = 0  # records, ever, that the last flush has told of
        self._retry_s = RETRY_S
        self._retry_at = 0.0
        self._recalling: asyncio.Task[None] | None = None
        self._recall_began = 0.0
        self._policies = PolicyNotes(planner, file, self._now)
        self.namespace_notes = NamespaceNotes(planner, file, self._now)
        self.recovered_s = 0.0

    async def start(self) -> None:
        """Open the file tier, begin to index what it holds and to write behind."""
        if self._file is None:
            return
        began = time.monotonic()
        self._file.on_task_failed(self._metrics.task_failed)
        await self._file.open(self)
        await self._policies.load()
        await self.namespace_notes.load()
        self.recovered_s = time.monotonic() - began
        self._writer = self._keep("write_behind", self._write_behind)

    def _keep(self, name: str, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        return asyncio.create_task(keep_running(name, work, self._metrics.task_failed))

    async def close(self, drain_s: float) -> None:
        """Write what is dirty, for at most `drain_s`, and close the file tier."""
        if self._file is not None:
            if not await self.flush(self._now() + drain_s):
                logger.warning("drain=incomplete dirty_bytes=%d", self._planner.dirty.nbytes)
            if self._writer is not None:
                self._writer.cancel()
                await asyncio.wait([self._writer], timeout=CLOSE_S)
            await self.reads.ended(drain_s)
            if self._recalling is not None:
                self._recalling.cancel()
            await self._policies.save()
            await self.namespace_notes.close()
            await self._file.close()
        self._workers.shutdown(wait=False, cancel_futures=True)

    # ---- what was found on disk; devices that go and come back: see admission.Listener ----------

    def recall(self, keys: Sequence[BlockKey]) -> None:
        """Index what was found on disk of these blocks. Nothing to do once all of it is indexed."""
        if self._file is not None:
            self._index(self._file.recall(keys))

    @property
    def unrecalled_runs(self) -> int:
        """How many of the runs found on disk are not indexed yet."""
        return self._file.unrecalled_runs if self._file is not None else 0

    @property
    def recalling_s(self) -> float:
        """How long what was found on disk has been indexed; 0: all of it is."""
        return self._now() - self._recall_began if self.unrecalled_runs else 0.0

    async def recalled(self, deadline: float) -> bool:
        """Wait until everything found is indexed. False: the time ran out."""
        if self._recalling is not None and not self._recalling.done():
            await asyncio.wait([self._recalling], timeout=max(0.0, deadline - self._now()))
        return not self.unrecalled_runs

    @property
    def found_namespaces(self) -> Set[NamespaceId]:
        """The namespaces of what was found on disk."""
        return self._file.found_namespaces if self._file is not None else frozenset()

    def admitted(self) -> None:
        """Begin to index what is on devices that take part from now on."""
        if self._recalling is None or self._recalling.done():
            self._recalling = self._keep("recall", self._recall_all)

    async def withdrawn(self, mount: Mount) -> None:
        """Take the frames of a device out of the index."""
        for _ in self._planner.recovery.withdraw(mount.holds):
            await asyncio.sleep(0)
        self.wake()  # what the arena has of them is written to the others

    async def _recall_all(self) -> None:
        """Index everything, oldest first, a little at a time."""
        assert self._file is not None
        began = self._recall_began = self._now()
        await self._policies.load()  # before anything is found
        await self.namespace_notes.load()
        while self.unrecalled_runs:
            self._recall_oldest()
            await asyncio.sleep(0)
        self._evict_excess()  # not before: what is dead must leave before what is old
        logger.info("recall=complete s=%.3f", self._now() - began)

    def _recall_oldest(self) -> bool:
        """Index a few runs; return whether there were any left to index."""
        assert self._file is not None
        some = self._file.unrecalled_runs > 0
        self._index(self._file.recall_oldest(RECALL_STEP_RUNS))
        return some

    def _index(self, records: Sequence[FrameRecord]) -> None:
        for record in records:
            header, blocks = record.header, record.header.blocks
            frame = StoredFrame(
                record.location,
                header.part,
                header.codec_id,
                tuple(block.stored_nbytes for block in blocks),
                header.sequence,
            )
            self._planner.recovery.add(
                header.namespace_id,
                frame,
                [
                    (at, blocks[at].key, blocks[at].raw_nbytes, blocks[at].raw_checksum)
                    for at in record.live
                ],
                first_block=header.first_block,
                parent=header.parent,
            )
        if records:
            self._tell_progress()  # what waited to be written may have been found durable

    @property
    def record_nbytes_max(self) -> int | None:
        """The largest record that can be written behind; None: there is no file tier."""
        return self._file.max_frame_nbytes - PAGE_NBYTES if self._file is not None else None

    @property
    def capacity_bytes(self) -> int:
        """The cap of the file tier; 0: there is none."""
        return self._file.capacity_bytes if self._file is not None else 0

    def check_file_caps(self, capacity_bytes: int) -> None:
        """Raise ConfigError on a cap that the file tier cannot go to while it runs."""
        if self._file is not None:
            self._file.check_caps(capacity_bytes)

    def set_file_caps(self, capacity_bytes: int, free_bytes_min: int) -> None:
        """Change the caps of each directory; what is over them is evicted soon."""
        if self._file is not None:
            self._file.set_caps(capacity_bytes, free_bytes_min)
            self.wake()

    def over_cap(self) -> str:
        """Say by how much the file tier is over its cap, "" if it is not."""
        excess = 0
        if self._file is not None:
            excess = self._file.physical_nbytes - self._file.capacity_bytes
        return f"the file tier is {excess} bytes over file.capacity" if excess > 0 else ""

    def stats(self) -> dict[str, Any]:
        if self._file is None:
            return {"capacity_bytes": 0, "physical_bytes": 0}
        return {
            "capacity_bytes": self._file.capacity_bytes,
            "physical_bytes": self._file.physical_nbytes,
            "failed_writes": self._failures,
            "failed_reads": self.reads.failed,
            "state": "failing" if self._failing else "ok",
            "recovery_s": self.recovered_s,
            "devices": self._file.status(),
        }

    # ---- down: arena to file -------------------------------------------------------------------

    def wake(self) -> None:
        """There is something to write."""
        self._wake.set()

    def progress(self) -> asyncio.Future[None]:
        """Return a future that is done when the current batch is written, or has failed."""
        if self._progress is None:
            self._progress = asyncio.get_running_loop().create_future()
        return asyncio.shield(self._progress)

    def _tell_progress(self) -> None:
        progress, self._progress = self._progress, None
        if progress is not None:
            progress.set_result(None)

    async def settle(self, sequence: int, deadline: float) -> bool:
        """Wait until the file tier has answered for every commit up to `sequence`."""
        self.wake()
        while not self._planner.dirty.settled(sequence):
            timeout_s = deadline - self._now()
            if timeout_s <= 0:
                return False
            await asyncio.wait([self.progress()], timeout=timeout_s)
        return True

    async def flush(self, deadline: float) -> bool:
        """Wait until everything committed so far is durable. False if it is not, or if some of it
        never was, since the last flush: it left the arena before a write of it succeeded, or was
        not within the write budget.
        """
        if self._file is None:
            return False
        self._retry_at = 0.0  # asked for: a disk that fails is tried now
        self._planner.writes.retry_failed()
        self._planner.admission.offer_all()
        settled = await self.settle(self._planner.dirty.last, deadline)
        counts = self._planner.counts
        before, self._left_out = self._left_out, counts.never_durable + counts.unwritten
        return settled and not self._planner.dirty.any_failed and self._left_out == before

    async def bury(
        self, namespaces: Collection[NamespaceId], keys: Sequence[BlockKey] | None
    ) -> None:
        """Write tombstones for keys, or (None) for whole namespaces, and make them durable.

        Raises Unavailable if one device of the file tier cannot take them: then the blocks may come
        back after a restart, and the caller must be told so.
        """
        if self._file is None:
            return
        batches: list[tuple[BlockKey, ...]] = [()]
        kind = FrameKind.TOMBSTONE_NAMESPACE
        if keys is not None:
            kind = FrameKind.TOMBSTONE_KEYS
            batches = [tuple(keys[i : i + KILLED_MAX]) for i in range(0, len(keys), KILLED_MAX)]
        # All sequences at once: what is put while this waits for the disk is not to be killed.
        headers = [
            FrameHeader(
                kind=kind,
                sequence=self._file.take_sequence(),
                namespace_id=namespace_id,
                killed=killed,
            )
            for namespace_id in namespaces
            for killed in batches
        ]
        await self._file.bury(headers)

    async def _write_behind(self) -> None:
        """Write what is dirty, for ever. While the disk fails, one batch in a while tries it.

        What is committed meanwhile is answered at once as not written: it stays in the arena, may
        be evicted, and is written if it is still there when the disk has come back.
        """
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S):
                    await self._wake.wait()
            self._wake.clear()
            if not self.unrecalled_runs:
                self._evict_excess()
                await self._policies.save_now_and_then()
                await self.namespace_notes.tidy_now_and_then()
            if self._failing and self._now() >= self._retry_at:
                self._planner.writes.retry_failed()
            await self._write_queued()

    async def _write_queued(self) -> None:
        """Write until nothing is left. What fills a batch begins while others are on their way: the
        disk is not to pause while bytes are verified, or synced. Less than that waits for them, so
        that one sync covers more."""
        under_way: set[asyncio.Task[None]] = set()
        try:
            while True:
                if under_way and len(under_way) >= self._batches_wanted:
                    when = asyncio.FIRST_COMPLETED
                    ended, under_way = await asyncio.wait(under_way, return_when=when)
                    for batch in ended:
                        batch.result()
                    continue
                writes = self._planner.writes.take(self.group_commit_bytes)
                if not writes:
                    return
                if self._failing and self._now() < self._retry_at:
                    for write in writes:
                        self._planner.writes.failed(write)
                    self._tell_progress()
                else:
                    under_way.add(self._begin_batch(writes))
        finally:
            for batch in under_way:
                batch.cancel()
            if under_way:
                await asyncio.wait(under_way)

    @property
    def _batches_wanted(self) -> int:
        """How many batches are to be on their way now: one beside reads, which somebody waits for,
        and while the disk fails."""
        is_full = self._planner.dirty.queued_nbytes >= self.group_commit_bytes
        return BATCHES_MAX if is_full and not (self.reads.under_way or self._failing) else 1

    def _begin_batch(self, writes: Sequence[Write]) -> asyncio.Task[None]:
        """Return the task that writes runs, numbered before anything else runs: what is deleted
        from now on, a higher number kills."""
        file = self._file
        assert file is not None
        numbers = file.begin_runs(len(writes))
        batch = asyncio.get_running_loop().create_task(self._write_batch(writes, numbers))
        batch.add_done_callback(lambda _: file.end_runs(numbers))
        return batch

    async def _write_batch(self, writes: Sequence[Write], numbers: Sequence[int]) -> None:
        """Write runs, sync once, and settle each with the planner, whatever happens.

        What one device fails to take is written to the others.
        """
        assert self._file is not None
        began = self._now()
        failed = await self._write_and_sync(writes, numbers)
        for _ in self._file.devices[1:]:
            again = [write for write, error in failed if self._goes_elsewhere(write, error)]
            if not again:
                break
            failed = [each for each in failed if not self._goes_elsewhere(*each)]
            # Numbered in the step in which they were found wanted.
            numbers = self._file.begin_runs(len(again))
            try:
                failed += await self._write_and_sync(again, numbers)
            finally:
                self._file.end_runs(numbers)
        for write, error in failed:
            self._fail(write, error)
        self._metrics.write_behind_seconds.observe(self._now() - began)
        self._note_health([error for _, error in failed])
        self._tell_progress()

    async def _write_and_sync(
        self, writes: Sequence[Write], numbers: Sequence[int]
    ) -> list[tuple[Write, BaseException]]:
        assert self._file is not None
        runs = map(self._write_run, writes, numbers)
        results = await asyncio.gather(*runs, return_exceptions=True)
        places = [(r[0], r[1]) for r in results if not isinstance(r, BaseException)]
        frames = {(place.mount, header.namespace_id) for place, header in places}
        await self.namespace_notes.written(frames)
        failed: list[tuple[Write, BaseException]] = []
        lost: dict[Placed, KVStoreError]
        try:
            lost = await self._file.sync([place for place, _ in places])
        except Exception as bug:  # None may count as durable, nor wait for ever
            lost = {place: DiskFailed(f"not synced: {bug!r}") for place, _ in places}
            logger.exception("sync=bug")
        for write, result in zip(writes, results, strict=True):
            if isinstance(result, BaseException):
                failed.append((write, result))
            elif result[0] in lost or not result[0].mount.is_current:
                self._file.free(result[0])
                error = lost.get(result[0]) or DiskFailed("the device was taken out of use")
                failed.append((write, error))
            else:
                place, header = result
                stored_nbytes = tuple(block.stored_nbytes for block in header.blocks)
                self._planner.writes.done(
                    write, place, header.codec_id, stored_nbytes, header.sequence
                )
                self.on_written(write)
                self._metrics.bytes.labels("file", "write").inc(header.nbytes)
        return failed

    def _goes_elsewhere(self, write: Write, error: BaseException) -> bool:
        """Say whether to give a run to another device: not if something of it is deleted."""
        assert self._file is not None
        failed = isinstance(error, _DISK_ERRORS) and self._file.takes_writes
        return failed and self._planner.writes.is_wanted(write)

    def _fail(self, write: Write, error: BaseException) -> None:
        if not isinstance(error, KVStoreError):
            # A bug. The record stays in the arena; the writer lives on for the others.
            logger.error("write_behind=bug", exc_info=error)
        self._planner.writes.failed(write)
        self._failures += 1
        self._metrics.write_behind_errors.inc()
        if isinstance(error, _CorruptRun):
            self._metrics.corrupt_blocks.labels("write_behind").inc(len(error.keys))
            self._planner.writes.corrupt(write, error.keys)

    def _note_health(self, errors: Sequence[BaseException]) -> None:
        assert self._file is not None
        refused = any(isinstance(error, _DISK_ERRORS) for error in errors)
        if refused and not self._file.takes_writes:
            if self._now() >= self._retry_at:  # else a batch begun as early has failed just now
                self._retry_at = self._now() + self._retry_s
                self._retry_s = min(2 * self._retry_s, RETRY_MAX_S)
        else:
            self._retry_s, self._retry_at = RETRY_S, 0.0
        if bool(errors) != self._failing:
            self._failing = bool(errors)
            log = logger.warning if self._failing else logger.info
            log("file_tier=%s failed_writes=%d", "failing" if errors else "ok", self._failures)

    async def _write_run(self, write: Write, sequence: int) -> tuple[Placed, FrameHeader]:
        """Write one frame. Returns where it is; it is durable after the next sync."""
        assert self._file is not None
        loop = asyncio.get_running_loop()
        header, payload = await loop.run_in_executor(self._workers, self._encode, write, sequence)
        place = await self._room_for(header.nbytes)
        try:
            await self._file.write(place, [self._file.encode(place, header), *payload])
        except BaseException as error:
            keep_pinned(self._planner, write.held, error)
            self._file.free(place)
            raise
        return place, header

    def _encode(self, write: Write, sequence: int) -> tuple[FrameHeader, list[memoryview]]:
        """Verify and encode a run. Returns its header and page-aligned payload buffers."""
        raws = [self._arena.view(held.slot) for held in write.held]
        corrupt = [
            block.key
            for block, raw, record in zip(write.blocks, raws, write.stored, strict=True)
            if checksum(raw) != record.checksum
        ]
        if corrupt:
            raise _CorruptRun(corrupt)
        codec, stored = encode_run(self._codec, raws)
        checksums = [record.checksum for record in write.stored]
        if codec.id == 0:
            for held in write.held:
                self._arena.clear_padding(held.slot)
            payload = [self._arena.padded_view(held.slot) for held in write.held]
            stored_checksums = checksums
        else:
            payload = [aligned_copy(buffer) for buffer in stored]
            stored_checksums = [checksum(buffer) for buffer in stored]
        described = [
            RunBlock(block.key, len(raw), len(buffer), raw_sum, stored_sum)
            for block, raw, buffer, raw_sum, stored_sum in zip(
                write.blocks, raws, stored, checksums, stored_checksums, strict=True
            )
        ]
        return run_header(write.blocks[0], write.part, codec, described, sequence), payload

    async def _room_for(self, nbytes: int) -> Placed:
        """Find room in the file tier, evicting for it. Raises Unavailable if there is none.

        One run after the other, so that nobody takes what another one made room for; whose turn it
        is makes room for those who wait, too, because winning it back takes a while.
        """
        self._wanted_nbytes += nbytes
        try:
            async with self._finding_room:
                return await self._find_room(nbytes)
        finally:
            self._wanted_nbytes -= nbytes

    async def _find_room(self, nbytes: int) -> Placed:
        assert self._file is not None
        for _ in range(EVICT_ROUNDS_MAX):
            place = self._file.allocate(nbytes)
            if place is not None:
                return place
            coming = self._file.freeing_nbytes
            missing = self._wanted_nbytes - self._file.available_nbytes - coming
            if missing > 0 or not coming:
                coming += self._evict(max(missing, nbytes), self._file.helps)
            if not coming:
                break
            await self._file.settle()
        raise Unavailable("the file tier is full and nothing in it may leave now")

    def _evict_excess(self) -> None:
        """Get under the caps: one was cut, holes punched before a power cut are data again, or
        others fill the disk."""
        assert self._file is not None
        for mount in self._file.mounts:
            for _ in range(EVICT_ROUNDS_MAX):
                excess = -mount.tier.available_nbytes - mount.tier.freeing_nbytes
                if excess <= 0 or not mount.tier.holds_runs:
                    break
                if not self._evict(excess, mount.holds):
                    break

    def _evict(self, nbytes: int, helps: Callable[[Placed], bool]) -> int:
        """Make room for frames; returns the bytes that will come back, which may be fewer.

        What is oldest may not be indexed yet, and only what is indexed can leave.
        """
        coming = self._planner.eviction.evict_file(nbytes, helps)
        for _ in range(EVICT_ROUNDS_MAX):
            if coming or not self._recall_oldest():
                break
            coming = self._planner.eviction.evict_file(nbytes, helps)
        return coming


def run_header(
    first: StoredBlock, part: Part, codec: Codec, blocks: Sequence[RunBlock], sequence: int
) -> FrameHeader:
    """Return the header of the frame of a run that begins with `first`."""
    return FrameHeader(
        kind=FrameKind.RUN,
        sequence=sequence,
        namespace_id=first.namespace_id,
        part=part,
        first_block=first.block_index,
        parent=first.parent if first.parent != NO_KEY else None,
        codec_id=codec.id,
        blocks=tuple(blocks),
    )


class _CorruptRun(CorruptBlock):
    """Records in the arena do not match their checksums; the others of the run are retried."""

    def __init__(self, keys: list[BlockKey]) -> None:
        super().__init__(f"{len(keys)} records in the arena do not match their checksums")
        self.keys = keys
