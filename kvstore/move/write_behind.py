"""Write-behind: arena to file tier, in the background.

One task takes what was committed, writes it in parallel, covers the whole batch by one fdatasync
(group commit) and only then tells the planner that it is durable. Every record is verified before
it is written. The way back is `reads` (file_reads.py); what a restart finds is `recall`; `caps` are
those of the file tier.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

from kvstore.decide.planner import Planner, Write
from kvstore.format.codec import Codec
from kvstore.format.frame import FrameHeader
from kvstore.metrics import Metrics
from kvstore.model.block import BlockKey, NamespaceId
from kvstore.model.errors import KVStoreError
from kvstore.move.admission import offer_all
from kvstore.move.file_caps import FileCaps
from kvstore.move.file_reads import Reads, keep_pinned
from kvstore.move.file_room import FileRoom
from kvstore.move.losses import Losses
from kvstore.move.namespace_notes import NamespaceNotes
from kvstore.move.policy_notes import PolicyNotes
from kvstore.move.recall import Recall
from kvstore.move.retry import RETRY_S, Retry
from kvstore.move.run_encoding import CorruptRun, encode_write
from kvstore.move.tombstones import tombstones
from kvstore.system.background import keep_running, next_beat
from kvstore.system.steps import in_steps
from kvstore.tier.dram import Arena
from kvstore.tier.file import Devices, DiskFailed, DiskFull, Mount, Placed

logger = logging.getLogger(__name__)

BATCHES_MAX = 3  # in flight at once
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
        self._file = self.file = file
        self._codec = codec
        self._metrics = metrics
        self.group_commit_bytes = group_commit_bytes
        self._now = now
        self._workers = executor or ThreadPoolExecutor(threads, thread_name_prefix="kvstore-codec")
        self.reads = Reads(
            planner, arena, file, metrics=metrics, workers=self._workers, now=self._now
        )
        self._wake = asyncio.Event()
        self._progress: asyncio.Future[None] | None = None
        self._writer: asyncio.Task[None] | None = None
        self.on_written: Callable[[Write], None] = lambda write: None
        self.on_progress: Callable[[], None] = lambda: None  # a batch is written, or has failed
        self._failing, self._failures = False, 0
        self._losses = Losses(planner, now)
        self._retry = Retry(now)
        self._policies = PolicyNotes(planner, file, self._now)
        self.namespace_notes = NamespaceNotes(planner, file, self._now)
        self.recall = Recall(
            planner,
            file,
            prepare=self._load_notes,
            indexed=self._tell_progress,  # what waited to be written may have been found durable
            complete=self._evict_excess,  # what is dead must be evicted before what is old
            task_failed=metrics.task_failed,
            now=now,
        )
        self.caps = FileCaps(file, self.wake)
        self._room = FileRoom(planner, file, self.recall.index_oldest) if file is not None else None
        self.recovered_s = 0.0

    async def _load_notes(self) -> None:
        await self._policies.load()
        await self.namespace_notes.load()

    def _evict_excess(self) -> None:
        if self._room is not None:
            with self._planner.eviction.because(self.caps.reason):
                self._room.evict_excess()

    async def start(self) -> None:
        """Open the file tier, begin to index what it holds and to write behind."""
        if self._file is None:
            return
        began = time.monotonic()
        await self._file.open(self, self._metrics.task_failed)
        await self._load_notes()
        self.recovered_s = time.monotonic() - began
        writing = keep_running("write_behind", self._write_behind, self._metrics.task_failed)
        self._writer = asyncio.create_task(writing)

    async def close(self, drain_s: float) -> None:
        """Write what is dirty, for at most `drain_s`, and close the file tier."""
        if self._file is not None:
            _, written = await self._write_all(self._now() + drain_s)
            if not written:
                logger.warning("drain=incomplete dirty_bytes=%d", self._planner.dirty.nbytes)
            if self._writer is not None:
                self._writer.cancel()
                await asyncio.wait([self._writer], timeout=CLOSE_S)
            await self.reads.ended(drain_s)
            self.recall.cancel()
            await self._policies.save()
            await self.namespace_notes.close()
            await self._file.close()
        self._workers.shutdown(wait=False, cancel_futures=True)

    # ---- devices that go and come back: see admission.Listener ---------------------------------

    def admitted(self) -> None:
        """Begin to index what is on devices that take part from now on."""
        self.recall.start()

    async def withdrawn(self, mount: Mount) -> None:
        """Take the frames of a device out of the index."""
        for _ in self._planner.recovery.withdraw(mount.holds):
            await asyncio.sleep(0)
        self.wake()  # what the arena has of them is written to the others

    def stats(self) -> dict[str, Any]:
        if self._file is None:
            return {"capacity_bytes": 0, "physical_bytes": 0}
        return {
            "capacity_bytes": self._file.space.capacity_bytes,
            "physical_bytes": self._file.frames.physical_nbytes,
            "failed_writes": self._failures,
            "failed_reads": self.reads.failed,
            "state": "failing" if self._failing else "ok",
            "recovery_s": self.recovered_s,
            "devices": self._file.status(),
        }

    # ---- writes --------------------------------------------------------------------------------

    def wake(self) -> None:
        """There is something to write."""
        self._wake.set()

    def progress(self) -> asyncio.Future[None]:
        """Return a future that is done when the current batch is written, or has failed."""
        if self._progress is None:
            self._progress = asyncio.get_running_loop().create_future()
        return asyncio.shield(self._progress)

    def _tell_progress(self, *, room: bool = True) -> None:
        progress, self._progress = self._progress, None
        if progress is not None:
            progress.set_result(None)
        if room:
            self.on_progress()

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
        """Wait until everything committed so far is durable. False if it is not, because of the
        write budget too, or if some of it never was and left the arena: see `Losses.tell`."""
        if self._file is None:
            return False
        offered, written = await self._write_all(deadline)
        return not self._losses.tell() and offered and written

    async def _write_all(self, deadline: float) -> tuple[bool, bool]:
        """Queue what the arena alone has, and wait until what is queued is written. Returns whether
        all was queued: some may be kept out, or there is no more time; and whether it is written.
        """
        self._retry.at = 0.0  # asked for: a disk that fails is tried now
        offered = await offer_all(self._planner, deadline - self._now())
        dirty, retried, written = self._planner.dirty, -1, True
        while written and dirty.retried != retried:  # else another flush queued it anew
            retried = dirty.retried
            written = await self.settle(dirty.last, deadline) and not dirty.any_failed
        return offered, written

    async def bury(
        self, namespaces: Collection[NamespaceId], keys: Sequence[BlockKey] | None
    ) -> None:
        """Write tombstones for keys, or (None) for whole namespaces, and make them durable.

        Raises Unavailable if one device of the file tier cannot take them: then the blocks may come
        back after a restart, and the caller must be told so.
        """
        if self._file is None:
            return
        await self._file.tombstones.bury(tombstones(self._file, namespaces, keys))

    async def _write_behind(self) -> None:
        """Write what is dirty, for ever. While the disk fails, one batch in a while tries it.

        What is committed meanwhile is answered at once as not written: it stays in the arena, may
        be evicted, and is written if it is still there when the disk has come back.
        """
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(next_beat(RETRY_S)):
                    await self._wake.wait()
            self._wake.clear()
            if not self.recall.unrecalled_runs:
                self._evict_excess()
                await self._policies.save_now_and_then()
                await self.namespace_notes.tidy_now_and_then()
            if self._failing and self._retry.is_due:
                await in_steps(self._planner.writes.retry_failed())
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
                    self._tell_progress(room=False)  # what was waited for may be deleted
                    return
                if self._failing and not self._retry.is_due:
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
        numbers = file.sequences.begin_runs(len(writes))
        batch = asyncio.get_running_loop().create_task(self._write_batch(writes, numbers))
        batch.add_done_callback(lambda _: file.sequences.end_runs(numbers))
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
            numbers = self._file.sequences.begin_runs(len(again))
            try:
                failed += await self._write_and_sync(again, numbers)
            finally:
                self._file.sequences.end_runs(numbers)
        for write, error in failed:
            self._fail(write, error)
        self._note_batch(writes, self._now() - began, failed=len(failed))
        self._note_health([error for _, error in failed])
        self._tell_progress()

    def _note_batch(self, writes: Sequence[Write], took_s: float, *, failed: int) -> None:
        self._metrics.write_behind_seconds.observe(took_s)
        self.reads.slow.note(
            "save",
            took_s,
            {"disk": took_s},
            blocks=sum(len(write.blocks) for write in writes),
            nbytes=sum(write.nbytes for write in writes),
            namespace_id=writes[0].namespace_id,
            result=f"{failed} of {len(writes)} runs not written" if failed else "written behind",
        )

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
            lost = await self._file.frames.sync([place for place, _ in places])
        except Exception as bug:  # None may count as durable, nor wait for ever
            lost = {place: DiskFailed(f"not synced: {bug!r}") for place, _ in places}
            logger.exception("sync=bug")
        for write, result in zip(writes, results, strict=True):
            if isinstance(result, BaseException):
                failed.append((write, result))
            elif result[0] in lost or not result[0].mount.is_current:
                self._file.frames.free(result[0])
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
        failed = isinstance(error, _DISK_ERRORS) and self._file.admission.takes_writes
        return failed and self._planner.writes.is_wanted(write)

    def _fail(self, write: Write, error: BaseException) -> None:
        if not isinstance(error, KVStoreError):
            # A bug. The record stays in the arena; the writer lives on for the others.
            logger.error("write_behind=bug", exc_info=error)
        self._planner.writes.failed(write)
        self._failures += 1
        self._metrics.write_behind_errors.inc()
        if isinstance(error, CorruptRun):
            self._metrics.corrupt_blocks.labels("write_behind").inc(len(error.keys))
            self._planner.writes.corrupt(write, error.keys)

    def _note_health(self, errors: Sequence[BaseException]) -> None:
        assert self._file is not None
        refused = any(isinstance(error, _DISK_ERRORS) for error in errors)
        self._retry.note(refused=refused and not self._file.admission.takes_writes)
        if bool(errors) != self._failing:
            self._failing = bool(errors)
            log = logger.warning if self._failing else logger.info
            log("file_tier=%s failed_writes=%d", "failing" if errors else "ok", self._failures)

    async def _write_run(self, write: Write, sequence: int) -> tuple[Placed, FrameHeader]:
        """Write one frame. Returns where it is; it is durable after the next sync."""
        assert self._file is not None
        assert self._room is not None
        loop = asyncio.get_running_loop()
        header, payload = await loop.run_in_executor(
            self._workers, encode_write, self._arena, self._codec, write, sequence
        )
        place = await self._room.find(header.nbytes)
        frames = self._file.frames
        try:
            await frames.write(place, [frames.encode(place, header), *payload])
        except BaseException as error:
            keep_pinned(self._planner, write.held, error)
            frames.free(place)
            raise
        return place, header
