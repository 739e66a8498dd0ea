"""One directory of several: its state and since when, and the tier that serves from it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence, Set
from concurrent.futures import Executor, ThreadPoolExecutor
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from kvstore.format.frame import FrameHeader
from kvstore.model.block import BlockKey, NamespaceId
from kvstore.system.threads import outlive
from kvstore.tier.file.devices.watch import Watch
from kvstore.tier.file.disk import Disk
from kvstore.tier.file.failure import DiskFailed, DiskHung
from kvstore.tier.file.found import FrameRecord
from kvstore.tier.file.segment import FileExtent, FramePlace
from kvstore.tier.file.tier import FileTier

T = TypeVar("T")
_log = logging.getLogger(__name__)


class DeviceState(StrEnum):
    """The values are in metrics and stats."""

    OK = "ok"
    # It is read, and written only if no other device is any better:
    FULL = "full"  # its file system has no room, even below the cap
    READ_ONLY = "read_only"
    FAILING = "failing"  # writes fail
    # Nothing is served from it:
    MISSING = "missing"  # not mounted
    FAILED = "failed"  # reads fail
    HUNG = "hung"  # it does not answer


class Mount:
    """A device from one admission to the moment it is taken out of use.

    gone: done from that moment on. in_flight_nbytes: being written. reading: places for readers,
    who queue for them in the order of their prefixes. There are more places than threads, so that
    no thread waits for the event loop.
    """

    __slots__ = ("device", "gone", "in_flight_nbytes", "measuring", "reading", "tier")

    def __init__(self, device: Device, tier: FileTier) -> None:
        self.device = device
        self.tier = tier
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.in_flight_nbytes = 0
        self.reading = asyncio.Semaphore(tier.threads + -(-tier.threads // 2))
        self.measuring: asyncio.Task[None] | None = None

    @property
    def is_current(self) -> bool:
        return self.device.mount is self

    def holds(self, place: Placed) -> bool:
        """Say whether a frame is on this device, as mounted now."""
        return place.mount is self

    def placed(self, records: Sequence[FrameRecord]) -> list[FrameRecord]:
        """Return records of this directory with places of the whole tier."""
        return [FrameRecord(Placed(self, r.location), r.header, r.live) for r in records]

    async def on_disk(self, work: Callable[[Disk, Path], T]) -> T:
        """Do something with the directory itself, in a thread of the tier. Raises DiskFailed.

        If cancelled, it returns at once, and the work goes on: it has no buffers of the caller's.
        """
        return await self.answer_of(self.begin(work))

    def begin(self, work: Callable[[Disk, Path], T]) -> asyncio.Future[T]:
        """Begin `work` as `on_disk` does. It ends when the disk answers, whoever waits for it."""
        if not self.is_current:
            raise DiskFailed(f"{self.device.path} is out of use")
        doing = partial(work, self.device.watch.disk, self.device.path)
        return asyncio.ensure_future(self.tier.run(doing))

    async def unless_gone(self, work: Coroutine[Any, Any, T]) -> T:
        """Do `work`, a call of the tier. Raises DiskHung when the device is taken out before.

        If cancelled, it returns only when no thread touches the buffers of the call any more.
        """
        call: asyncio.Future[T] = asyncio.ensure_future(work)
        try:
            return await self.answer_of(call)
        except asyncio.CancelledError:
            call.cancel()
            await outlive([call])
            raise

    async def answer_of(self, call: asyncio.Future[T]) -> T:
        """Return what a call returns. Raises DiskHung when the device is taken out before. Who is
        cancelled leaves the call alone."""
        call.add_done_callback(_look_at)
        either: list[asyncio.Future[Any]] = [call, self.gone]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if call.done():
            return call.result()
        raise DiskHung(call)


class Placed(NamedTuple):
    """A place of the tier: a frame on one device, as it was mounted when the frame was found."""

    mount: Mount
    extent: FileExtent

    @property
    def nbytes(self) -> int:
        return self.extent.nbytes

    def __repr__(self) -> str:
        return f"{self.mount.device.path} {self.extent}"


class Device:
    """One configured directory. mount: None while nothing is served from it."""

    def __init__(
        self,
        path: Path,
        disk: Disk,
        make_tier: Callable[[Path, Disk], FileTier],
        executor: Executor | None = None,
    ) -> None:
        self.path = path
        self.looker = executor or ThreadPoolExecutor(1, thread_name_prefix="kvstore-device")
        self.watch = Watch(disk)
        self.mount: Mount | None = None
        self.state = DeviceState.OK
        self.reason = ""
        self.since = time.monotonic()
        self.retry_s = 0.0
        self.suspects: Set[FramePlace] = frozenset()  # of its last mount: not to be recalled
        self.refusals = 0
        # Tombstones to be written before it is used again, by what they kill.
        self.missed: dict[tuple[NamespaceId, tuple[BlockKey, ...]], FrameHeader] = {}
        self.is_numbered = False  # the tier's numbers are higher than all on it
        self.is_stranger = False  # it missed answered deletes: to be emptied, see also roster.py
        self.task: asyncio.Task[None] | None = None  # tries it again
        self.leaving: asyncio.Task[None] | None = None  # ends when the last call has come back
        self._make_tier = make_tier

    def make_tier(self) -> FileTier:
        return self._make_tier(self.path, self.watch.disk)

    def note(self, state: DeviceState, reason: str = "") -> None:
        """Change the state, with one line in the log."""
        if state is self.state:
            return
        log = _log.info if state is DeviceState.OK else _log.warning
        log("device=%s path=%s was=%s reason=%r", state, self.path, self.state, reason)
        self.state, self.reason, self.since = state, reason, time.monotonic()

    def status(self) -> dict[str, Any]:
        """Return plain values for stats. Bytes, seconds."""
        tier = self.mount.tier if self.mount is not None else None
        return {
            "path": str(self.path),
            "state": str(self.state),
            "reason": self.reason,
            "since_s": time.monotonic() - self.since,
            "physical_bytes": tier.frames.physical_nbytes if tier is not None else 0,
        }


def _look_at(call: asyncio.Future[Any]) -> None:
    """Retrieve the error, so that asyncio does not log it: nobody else awaits a hung call."""
    if not call.cancelled():
        call.exception()
