"""Deletes on all devices: each device gets every tombstone, later if it is out of use now."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from kvstore.format.frame import FrameHeader
from kvstore.model.errors import KVStoreError
from kvstore.tier.file.devices.device import Device, Mount
from kvstore.tier.file.failure import DiskFailed, DiskFull
from kvstore.tier.file.tier import FileTier

MISSED_MAX = 4096  # tombstones kept for a device; after more, it is emptied before it is used again


class Tombstones:
    """write_failed: told of each device that did not take one."""

    def __init__(
        self,
        devices: Sequence[Device],
        write_failed: Callable[[Mount, DiskFull | DiskFailed], None],
    ) -> None:
        self._devices = devices
        self._write_failed = write_failed

    async def bury(self, headers: Sequence[FrameHeader]) -> None:
        """Write tombstones durably to every device.

        headers: their sequences were taken since the caller last waited for anything.

        Raises DiskFull, DiskFailed if a device does not take them. The others have them then, and
        this one gets them before it is used again. After a restart, deleted blocks on it may be
        found again.
        """
        errors: list[KVStoreError | None] = []
        burials = []
        # Noted for all before the first await: a device may be about to be admitted.
        for device in self._devices:
            if device.mount is not None:
                device.mount.tier.recall.kill(headers)
                burials.append(self._bury_on(device.mount, headers))
                continue
            _missed(device, headers)
            errors.append(
                DiskFailed(
                    f"{device.path} is out of use, deleted blocks on it may be served again: "
                    "delete again when it is in use (`kvstore status`), or take it out of file.path"
                )
            )
        for error in [*await asyncio.gather(*burials), *errors]:
            if error is not None:
                raise error

    async def _bury_on(self, mount: Mount, headers: Sequence[FrameHeader]) -> KVStoreError | None:
        try:
            await mount.unless_gone(_bury(mount.tier, headers))
        except KVStoreError as error:
            _missed(mount.device, headers)
            # Whatever it was, such as no thread for it: the device takes what it missed, and is
            # used again then.
            failure = error if isinstance(error, DiskFull | DiskFailed) else DiskFailed(str(error))
            self._write_failed(mount, failure)
            return error
        return None


async def catch_up(mount: Mount) -> None:
    """Write the tombstones that a device has missed. When this returns, it has missed none."""
    device = mount.device
    while missed := device.missed:
        device.missed = {}
        headers = list(missed.values())
        mount.tier.recall.kill(headers)
        try:
            await mount.unless_gone(_bury(mount.tier, headers))
        except BaseException:
            device.missed = missed | device.missed
            raise


def _missed(device: Device, headers: Sequence[FrameHeader]) -> None:
    for header in headers:  # a repeated delete is kept once, with its last number
        device.missed[header.namespace_id, header.killed] = header
    if len(device.missed) > MISSED_MAX:
        device.missed, device.is_stranger = {}, True


async def _bury(tier: FileTier, headers: Sequence[FrameHeader]) -> None:
    await tier.durability.sync([await tier.frames.write_tombstone(header) for header in headers])
