"""Several directories, best one for each disk, as one file tier.

A frame is on one device, a tombstone on all. `admission.py` decides which devices take part. Each
has its own threads, so one that is slow holds up no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Any

from kvstore.format.frame import FrameHeader
from kvstore.model.block import BlockKey, NamespaceId
from kvstore.model.errors import ConfigError, KVStoreError
from kvstore.tier.base import Then
from kvstore.tier.file.devices.admission import Admission, Listener
from kvstore.tier.file.devices.device import Device, DeviceState, Mount, Placed
from kvstore.tier.file.devices.note import Note, read_note, write_note
from kvstore.tier.file.disk import Disk, RealDisk
from kvstore.tier.file.failure import DiskFailed, DiskFull
from kvstore.tier.file.found import FrameRecord
from kvstore.tier.file.space import Space
from kvstore.tier.file.tier import CLOSE_TIMEOUT_S, SEGMENT_NBYTES, FileTier

HANG_S = 10.0


class Devices:
    """The file tier that `kvstore.move` uses. Implements `Tier[Placed]`.

    capacity_bytes, free_bytes_min, segment_nbytes, threads: of each directory. hang_s: a call that
    takes longer takes its device out of use. disks: one for each path.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        capacity_bytes: int,
        free_bytes_min: int = 0,
        segment_nbytes: int = SEGMENT_NBYTES,
        direct: bool = True,
        threads: int = 4,
        hang_s: float = HANG_S,
        disks: Sequence[Disk] = (),
        executor: Executor | None = None,
    ) -> None:
        self._caps = (capacity_bytes, free_bytes_min)

        def make_tier(path: Path, disk: Disk) -> FileTier:
            capacity_bytes, free_bytes_min = self._caps
            return FileTier(
                path,
                capacity_bytes=capacity_bytes,
                free_bytes_min=free_bytes_min,
                segment_nbytes=segment_nbytes,
                direct=direct,
                threads=threads,
                disk=disk,
                executor=executor,
            )

        _check(paths)
        disks = disks or [RealDisk() for _ in paths]
        self.devices = [
            Device(path, disk, make_tier, executor) for path, disk in zip(paths, disks, strict=True)
        ]
        self.capacity_bytes = len(paths) * capacity_bytes
        self._segment_nbytes = segment_nbytes
        self.max_frame_nbytes = self.devices[0].make_tier().max_frame_nbytes
        self._admission = Admission(self.devices, hang_s=hang_s)

    def on_task_failed(self, failed: Callable[[str], None]) -> None:
        """Call `failed` when a background task meets an unexpected error. Set it before `open`."""
        self._admission.task_failed = failed

    def check_caps(self, capacity_bytes: int) -> None:
        """Raise ConfigError on a cap below which frames that fit now would not."""
        frame_nbytes = Space(capacity_bytes, self._segment_nbytes).frame_nbytes_max
        if frame_nbytes < self.max_frame_nbytes:
            raise ConfigError(
                f"file.capacity={capacity_bytes} is too small for frames of "
                f"{self.max_frame_nbytes} bytes, which fit now: it can go so low at a restart"
            )

    def set_caps(self, capacity_bytes: int, free_bytes_min: int) -> None:
        """Change the caps of each directory, those that are out of use included; frames over them
        are for the caller to evict."""
        self._caps = (capacity_bytes, free_bytes_min)
        self.capacity_bytes = len(self.devices) * capacity_bytes
        for mount in self.mounts:
            mount.tier.set_caps(capacity_bytes, free_bytes_min)

    @property
    def mounts(self) -> list[Mount]:
        """The devices from which frames are served."""
        return self._admission.mounts

    @property
    def physical_nbytes(self) -> int:
        """Bytes all segments in use really take, plus what is set aside and not yet written."""
        return sum(mount.tier.physical_nbytes for mount in self.mounts)

    @property
    def available_nbytes(self) -> int:
        """What frames may still take on the device with most room for them."""
        return max((mount.tier.available_nbytes for mount in self._writable()), default=0)

    @property
    def freeing_nbytes(self) -> int:
        """Freed bytes that become available without more frees."""
        return sum(mount.tier.freeing_nbytes for mount in self._writable())

    @property
    def takes_writes(self) -> bool:
        """Whether a device is not known to refuse them."""
        return any(mount.device.state is DeviceState.OK for mount in self.mounts)

    def helps(self, place: Placed) -> bool:
        """Say whether freeing a frame makes room for another."""
        return place.mount in self._writable()

    def status(self) -> list[dict[str, Any]]:
        """Return the state of each device, as plain values for stats."""
        return [device.status() for device in self.devices]

    @property
    def unrecalled_runs(self) -> int:
        """How many of the runs found on devices in use are not indexed yet."""
        return sum(mount.tier.unrecalled_runs for mount in self.mounts)

    @property
    def found_namespaces(self) -> Set[NamespaceId]:
        """The namespaces of all runs found on devices in use."""
        return frozenset().union(*(mount.tier.found_namespaces for mount in self.mounts))

    async def open(self, listener: Listener) -> None:
        """Lock the directories and find what is in them; `listener` hears of it, now and later.

        Raises ConfigError, Incompatible, and DiskFailed if no device works.
        """
        await self._admission.open(listener)

    def recall(self, keys: Sequence[BlockKey]) -> list[FrameRecord]:
        """Return the runs found that hold any of `keys`, on whichever device, each once ever.

        They are the caller's to index, and to `free`. Costs next to nothing when all are recalled.
        """
        return [record for mount in self.mounts for record in mount.recall(keys)]

    def recall_oldest(self, count: int) -> list[FrameRecord]:
        """Return up to `count` runs of the device that has the oldest one, by age: see `recall`.

        So all runs come about by age, and each device's own exactly.
        """
        left = [mount for mount in self.mounts if mount.tier.unrecalled_runs]
        if not left:
            return []
        return min(left, key=lambda mount: mount.tier.oldest_unrecalled).recall_oldest(count)

    def take_sequence(self) -> int:
        """Return the next frame's number, one count for all devices."""
        return self._admission.take_sequence()

    def begin_runs(self, count: int) -> list[int]:
        """Return numbers for frames of records. Until `end_runs`, when they are durable or never
        will be, tombstones that would kill them stay."""
        numbers = [self.take_sequence() for _ in range(count)]
        self._admission.writing.update(numbers)
        return numbers

    def end_runs(self, numbers: Sequence[int]) -> None:
        """See `begin_runs`."""
        self._admission.writing.difference_update(numbers)

    def allocate(self, nbytes: int) -> Placed | None:
        """Set `nbytes` aside where least is being written, then where most room is.

        None: no room under the caps now. Raises DiskFailed if no device is in use.
        """
        mounts = self._writable()
        if not mounts:
            raise DiskFailed("no device of the file tier is in use")
        mounts.sort(key=lambda each: (each.in_flight_nbytes, -each.tier.available_nbytes))
        for mount in mounts:
            extent = mount.tier.allocate(nbytes)
            if extent is not None:
                return Placed(mount, extent)
        return None

    def encode(self, place: Placed, header: FrameHeader) -> memoryview:
        """Return the aligned header page of the frame at `place`: the first buffer to write."""
        return place.mount.tier.encode(place.extent, header)

    async def write(self, place: Placed, buffers: Sequence[memoryview]) -> None:
        """Write a frame. Raises DiskFull, DiskFailed; of the latter DiskHung while a thread may
        still read `buffers`."""
        mount = place.mount
        mount.in_flight_nbytes += place.nbytes
        try:
            self._check_in_use(mount)
            await mount.unless_gone(mount.tier.write(place.extent, buffers))
        except (DiskFull, DiskFailed) as error:
            self._admission.write_failed(mount, error)
            raise
        finally:
            mount.in_flight_nbytes -= place.nbytes

    async def read(
        self,
        place: Placed,
        offset: int,
        targets: Sequence[memoryview],
        then: Then | None = None,
        parts: int = 1,
    ) -> None:
        """Fill `targets` from `offset` of the frame. Bytes are not verified, unless by `then`.

        Raises DiskFailed, of which DiskHung while a thread may still write to `targets`, or
        CorruptBlock.
        """
        mount = place.mount
        try:
            self._check_in_use(mount)
            await mount.unless_gone(mount.tier.read(place.extent, offset, targets, then, parts))
        except DiskFailed as error:
            self._admission.read_failed(place, error)
            raise

    def path_of(self, place: Placed) -> Path | None:
        """Return the file that a written frame lies in; None if its device is out of use.

        Until the frame is freed or the device taken out, the frame's bytes are there, from
        `place.extent.offset` on; and nothing else ever is."""
        return place.mount.tier.path_of(place.extent).absolute() if place.mount.is_current else None

    async def sync(self, places: Sequence[Placed]) -> dict[Placed, KVStoreError]:
        """Make written frames durable, all devices at once; return those that are not, and why."""
        by_mount: dict[Mount, list[Placed]] = {}
        for place in places:
            by_mount.setdefault(place.mount, []).append(place)
        lost: dict[Placed, KVStoreError] = {}
        for found in await asyncio.gather(*map(self._sync, by_mount, by_mount.values())):
            lost |= found
        return lost

    async def bury(self, headers: Sequence[FrameHeader]) -> None:
        """Write tombstones durably to every device.

        Raises DiskFull, DiskFailed if one does not take them: the others have them, and it gets
        them before it is used again, but after a restart what is on it may come back.
        """
        await self._admission.bury(headers)

    def free(self, place: Placed) -> None:
        """Give a frame up; on a device out of use it is judged again when that comes back."""
        if place.mount.is_current:
            place.mount.tier.free(place.extent)

    async def settle(self) -> None:
        """Wait until footers, holes and unlinks that are due now are done."""
        await asyncio.gather(*map(_settle, self.mounts))

    async def read_note(self) -> bytes:
        """Return the newest note that a directory in use has, nothing if there is none."""
        newest = Note(0, b"")
        for mount in self.mounts:
            look = partial(read_note, mount.device.watch.disk, mount.device.path)
            with contextlib.suppress(DiskFailed):
                newest = max(newest, await mount.unless_gone(mount.tier.run(look)))
        return newest.data

    async def write_note(self, data: bytes) -> None:
        """Leave a few MiB for the next life, in one directory. Raises DiskFull, DiskFailed."""
        for mount in self._writable()[:1]:
            disk, path = mount.device.watch.disk, mount.device.path
            await mount.unless_gone(mount.tier.run(partial(write_note, disk, path, data)))

    async def close(self, *, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Seal the tails and unlock, waiting at most about `timeout_s`, and for no hung device."""
        await self._admission.close()
        await asyncio.gather(*(mount.tier.close(timeout_s=timeout_s) for mount in self.mounts))

    def _writable(self) -> list[Mount]:
        """The devices that take writes; where none is known to, whoever retries tries them all."""
        sound = [mount for mount in self.mounts if mount.device.state is DeviceState.OK]
        return sound or self.mounts

    def _check_in_use(self, mount: Mount) -> None:
        if not mount.is_current:
            raise DiskFailed(f"{mount.device.path} is out of use: {mount.device.reason}")

    async def _sync(self, mount: Mount, places: Sequence[Placed]) -> dict[Placed, KVStoreError]:
        try:
            self._check_in_use(mount)
            await mount.unless_gone(mount.tier.sync([place.extent for place in places]))
        except (DiskFull, DiskFailed) as error:
            self._admission.write_failed(mount, error)
            return dict.fromkeys(places, error)
        except KVStoreError as error:
            return dict.fromkeys(places, error)
        return {}


async def _settle(mount: Mount) -> None:
    with contextlib.suppress(DiskFailed):  # a device that is out has nothing to settle
        await mount.unless_gone(mount.tier.settle())


def _check(paths: Sequence[Path]) -> None:
    seen: dict[str, Path] = {}
    for path in paths:
        other = seen.setdefault(os.path.realpath(path), path)
        if other is not path:
            raise ConfigError(f"file.path names one directory twice: {other} and {path}")
