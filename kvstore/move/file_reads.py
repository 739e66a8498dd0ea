"""File to arena, on demand: carries the planner's reads out, straight into arena slots.

Every record is verified on its way, by the thread that has read or decoded it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from itertools import accumulate
from typing import NamedTuple

from kvstore.decide.index import HeldSlot, StoredFrame, StoredPart
from kvstore.decide.planner import Check, Planner, Read
from kvstore.decide.slow_log import SlowLog, Waits
from kvstore.format.codec import decodes_to
from kvstore.metrics import Metrics
from kvstore.model.block import PAGE_NBYTES, padded
from kvstore.model.checksum import checksum, checksum_of, checksums, leaves_of
from kvstore.model.errors import CorruptBlock, KVStoreError
from kvstore.model.pair import belongs, named_base
from kvstore.system.bandwidth import Lane, OverQuota
from kvstore.system.threads import ended
from kvstore.tier.base import Then
from kvstore.tier.dram import Arena
from kvstore.tier.file import Devices, DiskHung, WrongTag, aligned_buffer

logger = logging.getLogger(__name__)

PARTS = 2  # of a record that is read alone


class RawFile(NamedTuple):
    """A frame's payload in a file: its absolute path, and the offset of each position in it."""

    path: str
    offsets: tuple[int, ...]


class Reads:
    """Reads from at most one file tier into one arena. Lives on the event loop.

    failed: reads ever, for another reason than what they read.
    """

    def __init__(
        self,
        planner: Planner,
        arena: Arena,
        file: Devices | None,
        *,
        metrics: Metrics,
        workers: Executor,
        now: Callable[[], float],
    ) -> None:
        """workers: decode and verify; the caller's, like everything else here."""
        self._planner = planner
        self._arena = arena
        self._file = file
        self._metrics = metrics
        self._workers = workers
        self._now = now
        self._reads: dict[StoredPart, asyncio.Task[None]] = {}
        self.failed = 0
        self.over_quota = 0  # never begun: its tenant has used its bandwidth
        self.slow = SlowLog(now)  # of the node
        self.lane: Lane | None = None  # of a tenant among several

    async def ended(self, timeout_s: float) -> None:
        """Wait until none is on its way, for at most so long."""
        await ended(set(self._reads.values()), timeout_s)

    @property
    def under_way(self) -> int:
        """Frames that are being read, or wait for a place."""
        return len(set(self._reads.values()))

    def start(self, read: Read) -> None:
        """Carry a read out in the background; `of` finds it again."""
        task = asyncio.get_running_loop().create_task(self._read(read))
        for record in read.stored:
            self._reads[record] = task

    def brings(self, records: Sequence[StoredPart]) -> bool:
        """Say whether all of `records` are being read."""
        return all(record in self._reads for record in records)

    def of(self, records: Sequence[StoredPart]) -> list[asyncio.Task[None]]:
        """Return the tasks that are bringing any of `records` up, in the order they began."""
        wanted = set(records)
        found = (task for record, task in self._reads.items() if record in wanted)
        return list(dict.fromkeys(found))

    async def _read(self, read: Read) -> None:
        bad: Sequence[int] = read.positions
        unpaired: Sequence[int] = ()
        corrupt = False
        began = self._now()
        waits = Waits(self._now)
        try:
            if self.lane is not None:
                with waits.on("turn"):
                    await self.lane.take(_span_nbytes(read))
            with waits.on("other reads"):
                await read.extent.mount.reading.acquire()
            try:
                with waits.on("disk"):
                    bad, corrupt = await self._fetch(read), True
            finally:
                read.extent.mount.reading.release()
            unpaired = self._unpaired(read)
        except CorruptBlock:
            corrupt = True  # the file is gone or too short
        except OverQuota:
            self.over_quota += 1
        except KVStoreError as error:
            keep_pinned(self._planner, read.held, error)
            self.failed += 1
            self._metrics.read_errors.inc()
            logger.warning("read=failed blocks=%d reason=%r", len(read.blocks), str(error))
        finally:
            for record in read.stored:
                del self._reads[record]
            self._planner.reads.done(read, [*bad, *unpaired], corrupt=corrupt)
            self._metrics.promote_seconds.observe(self._now() - began)
            self._note_slow(read, self._now() - began, waits, lost=len({*bad, *unpaired}))
        self._metrics.promotions.inc(len(read.blocks) - len({*bad, *unpaired}))
        if unpaired:
            self._metrics.corrupt_blocks.labels("pair").inc(len(unpaired))
        if bad and corrupt:
            self._metrics.corrupt_blocks.labels("promote").inc(len(bad))
            logger.warning("blocks=corrupt count=%d key=%s", len(bad), read.blocks[0].key[:4].hex())

    def _note_slow(self, read: Read, took_s: float, waits: Waits, *, lost: int) -> None:
        blocks = len(read.blocks)
        self.slow.note(
            "load",
            took_s,
            waits.seconds,
            blocks=blocks,
            nbytes=_span_nbytes(read),
            namespace_id=read.blocks[0].namespace_id,
            result=f"{lost} of {blocks} not loaded" if lost else "loaded",
        )

    def _unpaired(self, read: Read) -> list[int]:
        """Return the positions of fine parts that belong to another base than the one here."""
        named = [
            named_base(self._arena.view(held.slot)) if record.fine else None
            for record, held in zip(read.stored, read.held, strict=True)
        ]
        return self._planner.reads.unpaired(read, named)

    async def _fetch(self, read: Read) -> list[int]:
        """Bring the bytes up. Returns the positions that do not match their checksums."""
        assert self._file is not None
        sizes = [padded(nbytes) for nbytes in read.frame.stored_nbytes]
        first, last = read.positions[0], read.positions[-1]
        begin = PAGE_NBYTES + sum(sizes[:first])
        self._metrics.bytes.labels("file", "read").inc(sum(sizes[first : last + 1]))
        if read.frame.codec_id == 0:
            slots = dict(zip(read.positions, read.held, strict=True))
            targets = [
                self._arena.padded_view(slots[at].slot)
                if at in slots
                else aligned_buffer(sizes[at])
                for at in range(first, last + 1)
            ]
            if len(self._reads) == 1:  # this record, and nothing else
                return await self._fetch_parts(read, begin, targets[0])
            bad: list[int] = []
            wrong = await self._fill(read, begin, targets, lambda _: bad.extend(self._verify(read)))
            return sorted({*bad, *wrong})
        buffer = aligned_buffer(sum(sizes[first : last + 1]))
        wrong = await self._fill(read, begin, [buffer])
        loop = asyncio.get_running_loop()
        bad = await loop.run_in_executor(self._workers, self._decode, read, buffer, sizes)
        return sorted({*bad, *wrong})

    async def _fill(
        self,
        read: Read,
        begin: int,
        targets: Sequence[memoryview],
        then: Then | None = None,
        parts: int = 1,
    ) -> list[int]:
        """Read from the file. Returns which of the positions have a wrong tag."""
        assert self._file is not None
        try:
            await self._file.frames.read(read.extent, begin, targets, then, parts)
        except WrongTag as error:
            return [position for position in read.positions if position in error.positions]
        return []

    async def _fetch_parts(self, read: Read, begin: int, target: memoryview) -> list[int]:
        """Bring one record up by several threads: alone, one would leave the disk half idle."""
        assert self._file is not None
        (position,), (record,), (held,) = read.positions, read.stored, read.held
        view = self._arena.view(held.slot)
        leaves: dict[int, list[int]] = {}

        def sum_up(part: slice) -> None:
            leaves[part.start] = leaves_of(view[part])

        wrong = await self._fill(read, begin, [target], sum_up, PARTS)
        found = checksum_of([leaf for at in sorted(leaves) for leaf in leaves[at]])
        return wrong if wrong or found == record.checksum else [position]

    def raw_file(self, frame: StoredFrame) -> RawFile | None:
        """Return where the bytes of a frame that stores them as they were put lie in a file; None
        if its device is out of use, or the frame is encrypted. That is good for as long as the
        frame is pinned."""
        assert self._file is not None
        path = self._file.frames.path_of(frame.extent)
        if path is None:
            return None
        sizes = map(padded, frame.stored_nbytes)
        begin = frame.extent.extent.offset + PAGE_NBYTES
        return RawFile(str(path), tuple(accumulate(sizes, initial=begin)))

    async def check(self, check: Check) -> list[int]:
        """Read a frame into memory of its own; return the positions that are not what was put, or
        belong to another base.

        Raises DiskFailed: then nothing is known of it.
        """
        assert self._file is not None
        loop = asyncio.get_running_loop()
        frame, bad = check.frame, []
        sizes = [padded(nbytes) for nbytes in frame.stored_nbytes]
        buffer = aligned_buffer(max(sizes))
        bases = self._planner.checks.bases(check)
        for position, record, base in zip(check.positions, check.stored, bases, strict=True):
            begin = PAGE_NBYTES + sum(sizes[:position])
            try:
                await self._file.frames.read(frame.extent, begin, [buffer[: sizes[position]]])
            except CorruptBlock:  # the file is gone or too short
                bad.append(position)
                continue
            self._metrics.bytes.labels("file", "scrub").inc(sizes[position])
            stored = buffer[: frame.stored_nbytes[position]]
            job = loop.run_in_executor(
                self._workers, _is_good, frame.codec_id, stored, record, base
            )
            if not await job:
                bad.append(position)
        return bad

    def view(self, held: HeldSlot) -> memoryview:
        """Return the bytes of a slot that somebody holds."""
        return self._arena.view(held.slot)

    async def matches(self, held: HeldSlot, expected: int) -> bool:
        """Say whether the bytes in a slot, which the caller has pinned, have a checksum."""
        loop = asyncio.get_running_loop()
        view = self._arena.view(held.slot)
        return await loop.run_in_executor(self._workers, checksum, view) == expected

    def _verify(self, read: Read) -> list[int]:
        found = checksums([self._arena.view(held.slot) for held in read.held])
        checked = zip(read.positions, read.stored, found, strict=True)
        return [position for position, record, each in checked if each != record.checksum]

    def _decode(self, read: Read, buffer: memoryview, sizes: Sequence[int]) -> list[int]:
        first = read.positions[0]
        bad = []
        for position, record, held in zip(read.positions, read.stored, read.held, strict=True):
            at = sum(sizes[first:position])
            stored = buffer[at : at + read.frame.stored_nbytes[position]]
            target = self._arena.view(held.slot)
            if not decodes_to(read.frame.codec_id, stored, target, record.checksum):
                bad.append(position)
        return bad


def _span_nbytes(read: Read) -> int:
    """Return what a read takes from the disk, in bytes."""
    first, last = read.positions[0], read.positions[-1]
    return sum(map(padded, read.frame.stored_nbytes[first : last + 1]))


def keep_pinned(planner: Planner, held: Sequence[HeldSlot], error: BaseException) -> None:
    """Keep slots from reuse for as long as the thread of a hung call may touch them."""
    if isinstance(error, DiskHung) and not error.call.done():
        pins = contextlib.ExitStack()
        pins.enter_context(planner.pinned(held))
        error.call.add_done_callback(lambda _: pins.close())


def _is_good(codec_id: int, stored: memoryview, record: StoredPart, base: int | None) -> bool:
    """Return whether stored bytes are what was put, without keeping what they decode to.

    base: of a fine part, the checksum of its base: one of another base is not good either.
    """
    if codec_id == 0:
        return checksum(stored) == record.checksum and belongs(stored, base)
    decoded = memoryview(bytearray(record.nbytes))
    good = decodes_to(codec_id, stored, decoded, record.checksum)
    return good and belongs(decoded, base)
