"""Several directories, best one for each disk, as one file tier.

A frame is on one device, a tombstone on all. Each device has its own threads, so one that is slow
holds up no other. `Devices` opens and closes them; its parts can be read alone:

    frames      the life of a frame, on the device where it was placed  (frames.py)
    recall      the runs that a start found                             (recall.py)
    space       the room, and the caps of each directory                (space.py)
    sequences   the numbers of frames, one count for all devices        (sequences.py)
    tombstones  deletes, written to every device                        (tombstones.py)
    admission   which devices take part, and their health               (admission.py)
    notes       a few MiB for the next start                            (note.py)
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from kvstore.model.errors import ConfigError
from kvstore.sealing import Sealing
from kvstore.tier.file.devices.admission import Admission, Listener
from kvstore.tier.file.devices.device import Device, Mount
from kvstore.tier.file.devices.frames import DeviceFrames
from kvstore.tier.file.devices.note import HISTORY, RECENT, Notes
from kvstore.tier.file.devices.recall import DeviceRecall
from kvstore.tier.file.devices.sequences import Sequences
from kvstore.tier.file.devices.space import DeviceSpace
from kvstore.tier.file.devices.tombstones import Tombstones
from kvstore.tier.file.disk import Disk, RealDisk
from kvstore.tier.file.failure import DiskFailed
from kvstore.tier.file.tier import CLOSE_TIMEOUT_S, SEGMENT_NBYTES, FileTier

HANG_S = 10.0


class Devices:
    """The file tier of a node.

    capacity_bytes, free_bytes_min, segment_nbytes, threads: of each directory. hang_s: a call that
    takes longer takes its device out of use. disks: one for each path. sealing: encrypts them.
    turns: what runs the I/O of each path, if not threads of its own: several tenants share a disk.
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
        turns: Sequence[Executor] = (),
        sealing: Sealing | None = None,
    ) -> None:
        shared = dict(zip(paths, turns, strict=False))

        def make_tier(path: Path, disk: Disk) -> FileTier:
            capacity_bytes, free_bytes_min = self.space.caps
            return FileTier(
                path,
                capacity_bytes=capacity_bytes,
                free_bytes_min=free_bytes_min,
                segment_nbytes=segment_nbytes,
                direct=direct,
                threads=threads,
                disk=disk,
                executor=shared.get(path, executor),
                sealing=sealing,
            )

        _check(paths)
        disks = disks or [RealDisk() for _ in paths]
        self.devices = [
            Device(path, disk, make_tier, executor) for path, disk in zip(paths, disks, strict=True)
        ]
        self.sequences = Sequences()
        self.admission = Admission(self.devices, self.sequences, hang_s=hang_s)
        self.space = DeviceSpace(
            self.admission,
            capacity_bytes=capacity_bytes,
            free_bytes_min=free_bytes_min,
            segment_nbytes=segment_nbytes,
        )
        self.frames = DeviceFrames(self.admission, self.space)
        self.recall = DeviceRecall(self.admission)
        self.tombstones = Tombstones(self.devices, self.admission.write_failed)
        self.notes = Notes(self.admission)
        self.history = Notes(self.admission, HISTORY)
        self.recent = Notes(self.admission, RECENT)

    async def open(
        self, listener: Listener, task_failed: Callable[[str], None] = lambda _: None
    ) -> None:
        """Lock the directories and find what is in them; `listener` is told, now and later.

        task_failed: called with the name of a background task that meets an unexpected error.

        Raises ConfigError, Incompatible, and DiskFailed if no device works.
        """
        await self.admission.open(listener, task_failed)

    @property
    def mounts(self) -> list[Mount]:
        """The devices from which frames are served."""
        return self.admission.mounts

    def status(self) -> list[dict[str, Any]]:
        """Return the state of each device, as plain values for stats."""
        return [device.status() for device in self.devices]

    async def settle(self) -> None:
        """Wait until footers, holes and unlinks that are due now are done."""
        await asyncio.gather(*map(_settle, self.mounts))

    async def close(self, *, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Seal the tails and unlock, waiting at most about `timeout_s`, and for no hung device."""
        await self.admission.close()
        await asyncio.gather(*(mount.tier.close(timeout_s=timeout_s) for mount in self.mounts))


async def _settle(mount: Mount) -> None:
    with contextlib.suppress(DiskFailed):  # a device out of use has nothing to settle
        await mount.unless_gone(mount.tier.upkeep.settle())


def _check(paths: Sequence[Path]) -> None:
    seen: dict[str, Path] = {}
    for path in paths:
        other = seen.setdefault(os.path.realpath(path), path)
        if other is not path:
            raise ConfigError(f"file.path names one directory twice: {other} and {path}")
