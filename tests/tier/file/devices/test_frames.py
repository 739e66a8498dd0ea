"""Frames of several directories: where they go, how they are found, what is left free."""

from __future__ import annotations

import asyncio
import errno
import threading
from pathlib import Path

import pytest

from kvstore.testing.disks import FaultyDisk, failing
from kvstore.testing.tier import pages
from kvstore.tier.file import Devices, DeviceState, DiskFailed
from tests.tier.file.devices.several import fill_both, on, read, state_of, two
from tests.tier.file.frames import MIB, NAMESPACE, FrameIndex, expected, key, put_on, run


@pytest.mark.parametrize("crash", [False, True])
def test_frames_of_both_devices_come_back_under_one_numbering(tmp_path: Path, crash: bool) -> None:
    async def main() -> None:
        async with two(tmp_path, crash=crash) as (tier, index, _):
            await fill_both(tier, index, "abcdef")
            before = index.sequences
        assert before == expected({"a": 1, "b": 2, "c": 3, "d": 4, "e": 5, "f": 6})
        async with two(tmp_path) as (tier, index, _):
            assert index.sequences == before
            assert tier.sequences.take() == 7
            assert [each["state"] for each in tier.status()] == ["ok", "ok"]
            for name in index.live:
                await read(tier, index, name)

    asyncio.run(main())


def test_writes_go_where_least_is_under_way(tmp_path: Path) -> None:
    async def main() -> None:
        async with two(tmp_path) as (tier, _, disks):
            go_on = threading.Event()
            disks[0].fault = lambda call: None if call != "pwritev" else go_on.wait(20) and None
            writes = []
            for name in "abcde":
                header, payload = run(tier.sequences.take(), [name])
                place = tier.frames.allocate(header.nbytes)
                assert place is not None
                page = tier.frames.encode(place, header)
                writing = asyncio.create_task(tier.frames.write(place, [page, *payload]))
                writes.append((place, writing))
                await asyncio.sleep(0)
            by_device = [place.mount.device for place, _ in writes]
            assert 0 < by_device.count(tier.devices[0]) <= 3
            fast = [write for place, write in writes if place.mount.device is tier.devices[1]]
            await asyncio.wait(fast)  # while the other device still holds its own
            go_on.set()
            await asyncio.wait([write for _, write in writes])
            assert await tier.frames.sync([place for place, _ in writes]) == {}

    asyncio.run(main())


def test_only_the_frames_of_a_failed_sync_are_lost(tmp_path: Path) -> None:
    async def main() -> None:
        async with two(tmp_path) as (tier, _, disks):
            places = []
            for name in "abcd":
                header, payload = run(tier.sequences.take(), [name])
                place = tier.frames.allocate(header.nbytes)
                assert place is not None
                await tier.frames.write(place, [tier.frames.encode(place, header), *payload])
                places.append(place)
            disks[1].fault = failing("fdatasync", errno.EIO)
            lost = await tier.frames.sync(places)
            assert set(lost) == {p for p in places if p.mount.device is tier.devices[1]}
            assert 0 < len(lost) < len(places)
            disks[1].fault = None

    asyncio.run(main())


def test_keys_are_recalled_from_every_device_and_the_others_by_age(tmp_path: Path) -> None:
    class Deaf(FrameIndex):
        def admitted(self) -> None: ...

    async def main() -> None:
        async with two(tmp_path) as (tier, index, _):
            await fill_both(tier, index, "abcdef")
            await put_on(tier, index, "ab")
        tier = Devices([tmp_path / "a", tmp_path / "b"], capacity_bytes=32 * MIB)
        await tier.open(Deaf(tier))
        assert tier.recall.unrecalled_runs == 7
        assert tier.recall.found_namespaces == {NAMESPACE}
        asked = tier.recall.take([key("a"), key("b")])
        assert {record.header.sequence for record in asked} == {1, 2, 7}
        assert len({record.location.mount for record in asked}) == 2
        assert tier.recall.take([key("a")]) == []
        others = [r.header.sequence for _ in range(4) for r in tier.recall.take_oldest(1)]
        assert others == [3, 4, 5, 6]
        assert tier.recall.take_oldest(1) == []
        await tier.close()

    asyncio.run(main())


def test_what_is_not_recalled_of_a_device_leaves_with_it(tmp_path: Path) -> None:
    class Deaf(FrameIndex):
        def admitted(self) -> None: ...

    async def main() -> None:
        async with two(tmp_path) as (tier, index, _):
            await fill_both(tier, index, "abcdef")
            kept = on(index, tier.devices[1])
        disks = FaultyDisk(), FaultyDisk()
        tier = Devices([tmp_path / "a", tmp_path / "b"], capacity_bytes=32 * MIB, disks=disks)
        index = Deaf(tier)
        await tier.open(index)
        victim = next(
            r
            for r in tier.recall.take_oldest(1) + tier.recall.take_oldest(1)
            if r.location.mount.device is tier.devices[0]
        )
        disks[0].fault = lambda call: failing(call, errno.EIO)(call)
        with pytest.raises(DiskFailed):
            await tier.frames.read(victim.location, 4096, [pages(4096)])
        FrameIndex.admitted(index)
        assert set(index.live) < kept
        disks[0].fault = None
        await index.until(lambda: state_of(tier, 0) is DeviceState.OK)
        FrameIndex.admitted(index)
        assert len(index.live) == 4, "all but what could not be read and what was recalled before"
        await tier.close()

    asyncio.run(main())


def test_what_others_need_of_the_disk_is_left_free(tmp_path: Path) -> None:
    async def main() -> None:
        disk = FaultyDisk()
        disk.free = 20 * MIB
        tier = Devices([tmp_path], capacity_bytes=64 * MIB, free_bytes_min=16 * MIB, disks=[disk])
        await tier.open(FrameIndex(tier))
        count = 0
        while tier.frames.allocate(MIB) is not None:
            count += 1
        assert 1 <= count <= 3, "4 MiB are left, some of it for tombstones and footers"
        disk.free = 8 * MIB
        await tier.mounts[0].tier.health.measure_free()
        assert tier.space.available_nbytes < -7 * MIB, "so much has to be given back"
        await tier.close()

    asyncio.run(main())
