"""Frames on several devices: where each is placed, and which failures take a device out."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from kvstore.format.frame import FrameHeader
from kvstore.model.errors import KVStoreError
from kvstore.tier.base import Then
from kvstore.tier.file.devices.admission import Admission
from kvstore.tier.file.devices.device import Mount, Placed
from kvstore.tier.file.devices.space import DeviceSpace
from kvstore.tier.file.failure import DiskFailed, DiskFull


class DeviceFrames:
    """Implements `Tier[Placed]`. A frame is on one device."""

    def __init__(self, admission: Admission, space: DeviceSpace) -> None:
        self._admission = admission
        self._space = space

    @property
    def capacity_bytes(self) -> int:
        """The cap of all directories together."""
        return self._space.capacity_bytes

    @property
    def physical_nbytes(self) -> int:
        """Bytes all segments in use really take, plus what is set aside and not yet written."""
        return sum(mount.tier.frames.physical_nbytes for mount in self._admission.mounts)

    def allocate(self, nbytes: int) -> Placed | None:
        """Set `nbytes` aside where least is being written, then where most room is.

        None: no room under the caps now. Raises DiskFailed if no device is in use.
        """
        mounts = self._admission.writable
        if not mounts:
            raise DiskFailed("no device of the file tier is in use")
        mounts.sort(key=lambda each: (each.in_flight_nbytes, -each.tier.space.available_nbytes))
        for mount in mounts:
            extent = mount.tier.frames.allocate(nbytes)
            if extent is not None:
                return Placed(mount, extent)
        return None

    def encode(self, place: Placed, header: FrameHeader) -> memoryview:
        """Return the aligned header page of the frame at `place`: the first buffer to write."""
        return place.mount.tier.frames.encode(place.extent, header)

    async def write(self, place: Placed, buffers: Sequence[memoryview]) -> None:
        """Write a frame. Raises DiskFull, DiskFailed; of the latter DiskHung while a thread may
        still read `buffers`."""
        mount = place.mount
        mount.in_flight_nbytes += place.nbytes
        try:
            _check_in_use(mount)
            await mount.unless_gone(mount.tier.frames.write(place.extent, buffers))
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
            _check_in_use(mount)
            reading = mount.tier.frames.read(place.extent, offset, targets, then, parts)
            await mount.unless_gone(reading)
        except DiskFailed as error:
            self._admission.read_failed(place, error)
            raise

    def path_of(self, place: Placed) -> Path | None:
        """Return the file that a written frame lies in; None if its device is out of use, or the
        frame is sealed.

        The frame's bytes are there, from `place.extent.offset` on, until the frame is freed or the
        device is taken out. Nothing else is ever written to that range."""
        mount = place.mount
        path = mount.tier.frames.path_of(place.extent) if mount.is_current else None
        return path.absolute() if path is not None else None

    async def sync(self, places: Sequence[Placed]) -> dict[Placed, KVStoreError]:
        """Make written frames durable, all devices at once; return those that are not, and why."""
        by_mount: dict[Mount, list[Placed]] = {}
        for place in places:
            by_mount.setdefault(place.mount, []).append(place)
        lost: dict[Placed, KVStoreError] = {}
        for found in await asyncio.gather(*map(self._sync, by_mount, by_mount.values())):
            lost |= found
        return lost

    async def _sync(self, mount: Mount, places: Sequence[Placed]) -> dict[Placed, KVStoreError]:
        try:
            _check_in_use(mount)
            await mount.unless_gone(mount.tier.durability.sync([each.extent for each in places]))
        except (DiskFull, DiskFailed) as error:
            self._admission.write_failed(mount, error)
            return dict.fromkeys(places, error)
        except KVStoreError as error:
            return dict.fromkeys(places, error)
        return {}

    def free(self, place: Placed) -> None:
        """Give a frame up. On a device out of use, recovery judges it when the device is back."""
        if place.mount.is_current:
            place.mount.tier.frames.free(place.extent)


def _check_in_use(mount: Mount) -> None:
    if not mount.is_current:
        raise DiskFailed(f"{mount.device.path} is out of use: {mount.device.reason}")
