"""Several directories as one tier, on disks that fail when they are told to."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from kvstore.testing.disks import FaultyDisk
from kvstore.testing.tier import pages
from kvstore.tier.file import Device, Devices, DeviceState, DiskFailed
from tests.tier.file.frames import MIB, FrameIndex, put_on, run

HANG_S = 0.3


@asynccontextmanager
async def two(
    path: Path, *, crash: bool = False, **settings: Any
) -> AsyncIterator[tuple[Devices, FrameIndex, tuple[FaultyDisk, FaultyDisk]]]:
    """Open a tier over two directories; crash: end it as a kill -9 does."""
    disks = settings.setdefault("disks", (FaultyDisk(), FaultyDisk()))
    tier = Devices(
        [path / "a", path / "b"], **{"capacity_bytes": 32 * MIB, "segment_nbytes": MIB, **settings}
    )
    index = FrameIndex(tier)
    await tier.open(index)
    try:
        yield tier, index, disks
    finally:
        if crash:
            await tier.settle()
            for disk in disks:
                disk.kill()
        with contextlib.suppress(DiskFailed):
            await tier.close(timeout_s=2)
        for disk in disks:
            if not disk.dead:
                disk.kill()


def quick() -> tuple[FaultyDisk, FaultyDisk]:
    """Return disks that do not hang because somebody else's fsync takes long."""
    return FaultyDisk(syncs=False), FaultyDisk(syncs=False)


def state_of(tier: Devices, number: int) -> DeviceState:
    return tier.devices[number].state


async def fill_both(tier: Devices, index: FrameIndex, names: str) -> None:
    """Put each name in a frame of its own, on both devices in turn."""
    for name in names:
        await put_on(tier, index, [name])
    used = {place.mount.device for _, place in index.live.values()}
    assert len(used) == 2, "the device with more room is taken"


async def fill_other(tier: Devices, index: FrameIndex, names: str) -> None:
    """Put names while one device is out: all go to the other one."""
    for name in names:
        place = await put_on(tier, index, [name])
        assert place.mount.device.state is DeviceState.OK


async def read(tier: Devices, index: FrameIndex, name: bytes) -> None:
    await tier.frames.read(index.live[name][1], 4096, [pages(4096)])  # type: ignore[index]


def on(index: FrameIndex, device: Device) -> set[bytes]:
    return {key for key, (_, place) in index.live.items() if place.mount.device is device}


async def use(tier: Devices, index: FrameIndex, call: str) -> None:
    """Make the first device do a call; raises what became of it."""
    if call == "preadv":
        place = next(p for _, p in index.live.values() if p.mount.device is tier.devices[0])
        await tier.frames.read(place, 4096, [pages(4096)])
        return
    header, payload = run(tier.sequences.take(), ["never durable"])
    places = [tier.frames.allocate(header.nbytes)]
    while places[-1] is not None and places[-1].mount.device is not tier.devices[0]:
        places.append(tier.frames.allocate(header.nbytes))
    place = places.pop()
    assert place is not None
    for other in places:
        assert other is not None
        tier.frames.free(other)
    await tier.frames.write(place, [tier.frames.encode(place, header), *payload])
    for error in (await tier.frames.sync([place])).values():
        raise error


def hanging(call: str) -> tuple[Callable[[str], None], threading.Event, threading.Event]:
    """Return a fault that blocks in `call`, an event for that, and one that lets it go on."""
    hung, go_on = threading.Event(), threading.Event()

    def fault(made: str) -> None:
        if made == call:
            hung.set()
            go_on.wait(30)

    return fault, hung, go_on
