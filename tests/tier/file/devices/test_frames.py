"""Frames of several directories: where they go, how they are found again, and what is left free."""

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
from tests.tier.file.frames import MIB, NAMESPACE, Frames, expected, key, put_on, run


@pytest.mark.parametrize("crash", [False, True])
def test_frames_of_both_devices_come_back_under_one_numbering(tmp_path: Path, crash: bool) -> None:
    async def main() -> None:
        async with two(tmp_path, crash=crash) as (tier, index, _):
            await fill_both(tier, index, "abcdef")
            before = index.sequences
        assert before == expected({"a": 1, "b": 2, "c": 3, "d": 4, "e": 5, "f": 6})
        async with two(tmp_path) as (tier, index, _):
            assert index.sequences == before
            assert tier.take_sequence() == 7
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
                header, payload = run(tier.take_sequence(), [name])
                place = tier.allocate(header.nbytes)
                assert place is not None
                page = tier.encode(place, header)
                writes.append((place, asyncio.create_task(tier.write(place, [page, *payload]))))
                await asyncio.sleep(0)
            by_device = [place.mount.device for place, _ in writes]
            assert 0 < by_device.count(tier.devices[0]) <= 3
            fast = [write for place, write in writes if place.mount.device is tier.devices[1]]
            await asyncio.wait(fast)  # while the other device still holds its own
            go_on.set()
            await asyncio.wait([write for _, write in writes])
            assert await tier.sync([place for place, _ in writes]) == {}

    asyncio.run(main())


def test_only_the_frames_of_a_failed_sync_are_lost(tmp_path: Path) -> None:
    async def main() -> None:
        async with two(tmp_path) as (tier, _, disks):
            places = []
            for name in "abcd":
                header, payload = run(tier.take_sequence(), [name])
                place = tier.allocate(header.nbytes)
                assert place is not None
                await tier.write(place, [tier.encode(place, header), *payload])
                places.append(place)
            disks[1].fault = failing("fdatasync", errno.EIO)
            lost = await tier.sync(places)
            assert set(lost) == {p for p in places if p.mount.device is tier.devices[1]}
            assert 0 < len(lost) < len(places)
            disks[1].fault = None

    asyncio.run(main())


def test_keys_are_recalled_from_every_device_and_the_others_by_age(tmp_path: Path) -> None:
    class Deaf(Frames):
        def admitted(self) -> None: ...

    async def main() -> None:
        async with two(tmp_path) as (tier, index, _):
            await fill_both(tier, index, "abcdef")
            await put_on(tier, index, "ab")
        tier = Devices([tmp_path / "a", tmp_path / "b"], capacity_bytes=32 * MIB)
        await tier.open(Deaf(tier))
        assert tier.unrecalled_runs == 7
        assert tier.found_namespaces == {NAMESPACE}
        asked = tier.recall([key("a"), key("b")])
        assert {record.header.sequence for record in asked} == {1, 2, 7}
        assert len({record.location.mount for record in asked}) == 2
        assert tier.recall([key("a")]) == []
        others = [r.header.sequence for _ in range(4) for r in tier.recall_oldest(1)]
        assert others == [3, 4, 5, 6]
        assert tier.recall_oldest(1) == []
        await tier.close()

    asyncio.run(main())


def test_what_is_not_recalled_of_a_device_leaves_with_it(tmp_path: Path) -> None:
    class Deaf(Frames):
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
            for r in tier.recall_oldest(1) + tier.recall_oldest(1)
            if r.location.mount.device is tier.devices[0]
        )
        disks[0].fault = lambda call: failing(call, errno.EIO)(call)
        with pytest.raises(DiskFailed):
            await tier.read(victim.location, 4096, [pages(4096)])
        Frames.admitted(index)
        assert set(index.live) < kept
        disks[0].fault = None
        await index.until(lambda: state_of(tier, 0) is DeviceState.OK)
        Frames.admitted(index)
        assert len(index.live) == 4, "all but what could not be read and what was recalled before"
        await tier.close()

    asyncio.run(main())


def test_what_others_need_of_the_disk_is_left_free(tmp_path: Path) -> None:
    async def main() -> None:
        disk = FaultyDisk()
        disk.free = 20 * MIB
        tier = Devices([tmp_path], capacity_bytes=64 * MIB, free_bytes_min=16 * MIB, disks=[disk])
        await tier.open(Frames(tier))
        count = 0
        while tier.allocate(MIB) is not None:
            count += 1
        assert 1 <= count <= 3, "4 MiB are left, some of it for tombstones and footers"
        disk.free = 8 * MIB
        await tier.mounts[0].tier.measure_free()
        assert tier.available_nbytes < -7 * MIB, "so much has to be given back"
        await tier.close()

    asyncio.run(main())
