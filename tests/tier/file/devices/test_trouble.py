"""A device that fails, hangs or refuses writes: the others serve on, and it comes back."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest

from kvstore.model.errors import ConfigError
from kvstore.testing.disks import FaultyDisk, failing
from kvstore.testing.tier import pages
from kvstore.tier.file import Devices, DeviceState, DiskFailed, DiskFull, DiskHung, FileTier
from tests.tier.file.devices.several import (
    HANG_S,
    fill_both,
    fill_other,
    hanging,
    on,
    quick,
    read,
    state_of,
    two,
    use,
)
from tests.tier.file.frames import MIB, FrameIndex, bury, expected, live, put, put_on, recover
from tests.torture.volume import Volume


def test_a_device_that_cannot_be_read_is_out_until_it_can(tmp_path: Path) -> None:
    async def main() -> None:
        async with two(tmp_path) as (tier, index, disks):
            await fill_both(tier, index, "abcdef")
            lost, everything = on(index, tier.devices[0]), index.sequences
            disks[0].fault = lambda call: failing(call, errno.EIO)(call)
            victim = sorted(lost)[0]
            with pytest.raises(DiskFailed):
                await read(tier, index, victim)
            assert state_of(tier, 0) is DeviceState.FAILED
            await index.until(lambda: not on(index, tier.devices[0]))
            await fill_other(tier, index, "xyz")
            disks[0].fault = None
            await index.until(lambda: state_of(tier, 0) is DeviceState.OK)
            added = set(expected(dict.fromkeys("xyz", 0)))
            # What could not be read is not trusted again.
            assert set(index.live) == set(everything) - {victim} | added
            for name in index.live:
                await read(tier, index, name)

    asyncio.run(main())


@pytest.mark.parametrize("recalled", [False, True])
def test_what_was_not_trusted_once_is_not_when_the_device_was_out_again(
    tmp_path: Path, recalled: bool
) -> None:
    """Neither what could not be read, nor what a failed sync may have lost, though it was freed."""

    class Deaf(FrameIndex):
        def admitted(self) -> None:
            if recalled:
                super().admitted()

    async def main() -> None:
        async with two(tmp_path, disks=quick()) as (tier, index, _):
            await fill_both(tier, index, "abcdef")
        disks = quick()
        tier = Devices([tmp_path / "a", tmp_path / "b"], capacity_bytes=32 * MIB, disks=disks)
        index = Deaf(tier)
        await tier.open(index)
        FrameIndex.admitted(index)
        device, before = tier.devices[0], set(index.live)
        assert device.mount is not None
        extent = await put(device.mount.tier, tier.sequences.take(), ["lost"])
        disks[0].fault = lambda call: failing(call, errno.EIO)(call)
        with pytest.raises(DiskFailed):
            await device.mount.tier.durability.sync([extent])
        device.mount.tier.frames.free(extent)
        await device.mount.tier.upkeep.settle()  # its hole is not punched
        suspects = set()
        for _ in range(2):
            disks[0].fault = lambda call: failing(call, errno.EIO)(call)
            while not on(index, device):
                index.take(device.mount.placed(device.mount.tier.recall.take_oldest(1)))
            suspects.add(min(on(index, device)))
            with pytest.raises(DiskFailed):
                await read(tier, index, min(on(index, device)))
            await index.until(lambda: not on(index, device) and device.state is DeviceState.FAILED)
            disks[0].fault = None
            await index.until(lambda: device.state is DeviceState.OK)
        FrameIndex.admitted(index)
        assert set(index.live) == before - suspects
        await tier.close()

    asyncio.run(main())


def test_the_only_device_is_not_taken_out_for_a_read_that_fails(tmp_path: Path) -> None:
    async def main() -> None:
        disk = FaultyDisk()
        tier = Devices([tmp_path], capacity_bytes=MIB, disks=[disk])
        index = FrameIndex(tier)
        await tier.open(index)
        place = await put_on(tier, index, "a")
        disk.fault = failing("preadv", errno.EIO)
        with pytest.raises(DiskFailed):
            await tier.frames.read(place, 4096, [pages(4096)])
        disk.fault = None
        await tier.frames.read(place, 4096, [pages(4096)])
        await tier.close()

    asyncio.run(main())


@pytest.mark.parametrize("call", ["preadv", "pwritev", "fdatasync"])
def test_a_device_that_hangs_is_out_and_its_calls_end_but_their_buffers_are_known(
    tmp_path: Path, call: str
) -> None:
    async def main() -> None:
        async with two(tmp_path, hang_s=HANG_S, disks=quick()) as (tier, index, disks):
            await fill_both(tier, index, "abcdef")
            everything, lost = set(index.live), on(index, tier.devices[0])
            disks[0].fault, _, go_on = hanging(call)
            try:
                with pytest.raises(DiskHung) as caught:
                    await use(tier, index, call)
                assert not caught.value.call.done(), "a thread may still touch the buffers"
                assert state_of(tier, 0) is DeviceState.HUNG
                await index.until(lambda: not on(index, tier.devices[0]))
                await fill_other(tier, index, "xyz")
                with pytest.raises(DiskFailed):
                    await bury(tier, index, "x")
            finally:
                go_on.set()
            await asyncio.wait([caught.value.call])
            disks[0].fault = None
            await index.until(lambda: state_of(tier, 0) is DeviceState.OK)
            added = set(expected(dict.fromkeys("yz", 0)))
            late = set(expected({"never durable": 0}))  # durable after all, when the sync came back
            assert set(index.live) - late == everything | added
            assert lost <= on(index, tier.devices[0])

    asyncio.run(main())


@pytest.mark.parametrize(
    ("call", "code", "state", "outcome"),
    [
        ("pwritev", errno.ENOSPC, DeviceState.FULL, DiskFull),
        ("pwritev", errno.EROFS, DeviceState.READ_ONLY, DiskFailed),
        ("pwritev", errno.EIO, DeviceState.FAILING, DiskFailed),
        ("fdatasync", errno.EIO, DeviceState.FAILING, DiskFailed),
    ],
)
def test_a_device_that_refuses_writes_is_still_read(
    tmp_path: Path, call: str, code: int, state: DeviceState, outcome: type[Exception]
) -> None:
    async def main() -> None:
        async with two(tmp_path) as (tier, index, disks):
            await fill_both(tier, index, "abcdef")
            everything = set(index.live)
            disks[0].fault = failing(call, code)
            with pytest.raises(outcome):
                await use(tier, index, "pwritev")
            assert state_of(tier, 0) is state
            assert tier.admission.takes_writes
            await fill_other(tier, index, "xyz")
            for name in everything:
                await read(tier, index, name)
            disks[0].fault = None
            await index.until(lambda: state_of(tier, 0) is DeviceState.OK)
            assert everything < set(index.live)

    asyncio.run(main())


@pytest.mark.skipif(not Volume.possible(), reason="only root may mount a file system")
def test_a_file_system_that_turns_read_only_is_still_read(tmp_path: Path) -> None:
    async def main(volume: Volume) -> None:
        paths = [volume.path / "a", tmp_path / "b"]
        tier = Devices(paths, capacity_bytes=16 * MIB)
        index = FrameIndex(tier)
        await tier.open(index)
        await fill_both(tier, index, "abcdef")
        volume.turn_read_only()
        with pytest.raises(DiskFailed):
            await use(tier, index, "pwritev")
        assert state_of(tier, 0) is DeviceState.READ_ONLY
        await fill_other(tier, index, "xyz")
        for name in index.live:
            await read(tier, index, name)
        with pytest.raises(DiskFailed):
            await bury(tier, index, "nobody")
        before = set(index.live)
        await tier.close()
        volume.restore_power()
        tier = Devices(paths, capacity_bytes=16 * MIB)
        index = FrameIndex(tier)
        await tier.open(index)
        assert set(index.live) == before
        assert state_of(tier, 0) is DeviceState.OK
        await tier.close()

    with Volume() as volume:
        asyncio.run(main(volume))


def test_a_device_is_not_unlocked_while_a_thread_still_punches_or_unlinks(tmp_path: Path) -> None:
    """Else frames would vanish which whoever takes the directory next has found there."""

    async def main() -> None:
        disk = FaultyDisk()
        tier = FileTier(tmp_path, capacity_bytes=MIB, disk=disk)
        await tier.open()
        extent = await put(tier, 1, "a")
        await put(tier, 2, "b")
        await tier.durability.sync()
        disk.fault, punching, go_on = hanging("punch")
        tier.frames.free(extent)
        await asyncio.to_thread(punching.wait)
        leaving = asyncio.create_task(tier.abandon())
        done, _ = await asyncio.wait([leaving], timeout=0.2)
        with pytest.raises(ConfigError, match="another kvstore daemon"):
            await FileTier(tmp_path, capacity_bytes=MIB).open()
        assert not done
        go_on.set()
        await leaving
        again = FileTier(tmp_path, capacity_bytes=MIB)
        assert live(await recover(again)) == expected({"b": 2})
        await again.close()

    asyncio.run(main())


def test_close_does_not_wait_for_a_device_that_hangs(tmp_path: Path) -> None:
    async def main() -> None:
        async with two(tmp_path, hang_s=HANG_S, disks=quick()) as (tier, index, disks):
            await fill_both(tier, index, "abcdef")
            disks[0].fault, _, go_on = hanging("preadv")
            try:
                with pytest.raises(DiskHung) as caught:
                    await use(tier, index, "preadv")
                await tier.close(timeout_s=5)
                assert not caught.value.call.done()
            finally:
                go_on.set()
            await asyncio.wait([caught.value.call])

    asyncio.run(main())
