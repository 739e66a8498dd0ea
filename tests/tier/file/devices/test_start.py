"""Which directories a start takes in, empties or refuses, and which it waits for."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstore.model.errors import ConfigError
from kvstore.testing.disks import FaultyDisk, failing
from kvstore.tier.file import Devices, DeviceState, DiskFailed
from tests.tier.file.devices.several import (
    fill_both,
    fill_other,
    hanging,
    on,
    quick,
    read,
    state_of,
    two,
)
from tests.tier.file.frames import MIB, SEALING, FrameIndex, bury, expected, put_on
from tests.tier.file.test_old_keys import copy_keys, rotate


def test_without_a_missing_device_the_others_serve_and_nothing_is_written_in_its_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with two(tmp_path) as (tier, index, _):
            await fill_both(tier, index, "abcdef")
            held = on(index, tier.devices[1])
            everything = set(index.live)
        (tmp_path / "b").rename(tmp_path / "gone")
        with caplog.at_level(logging.WARNING):
            async with two(tmp_path) as (tier, index, _):
                assert state_of(tier, 1) is DeviceState.MISSING
                assert set(index.live) == everything - held
                await fill_other(tier, index, "xyz")
        assert not (tmp_path / "b").exists(), "it may be the mount point"
        assert len([line for line in caplog.messages if "device=missing" in line]) == 1

    asyncio.run(main())


def test_a_missing_device_is_taken_in_when_it_comes_back(tmp_path: Path) -> None:
    async def main() -> None:
        async with two(tmp_path) as (tier, index, _):
            await fill_both(tier, index, "abcdef")
            device = tier.devices[1]
            lost, kept = on(index, device), on(index, tier.devices[0])
        (tmp_path / "b").rename(tmp_path / "gone")
        async with two(tmp_path) as (tier, index, _):
            names = {k: n for n in "abcdef" for k in expected({n: 0})}
            deleted, again = sorted(lost)[:2]
            with pytest.raises(DiskFailed):
                await bury(tier, index, [names[deleted], names[again]])
            newer = await put_on(tier, index, [names[again]])
            (tmp_path / "gone").rename(tmp_path / "b")
            await index.until(lambda: state_of(tier, 1) is DeviceState.OK)
            assert set(index.live) == kept | lost - {deleted}
            assert index.live[again][1] == newer
            for name in index.live:
                await read(tier, index, name)
        shutil.rmtree(tmp_path / "a")  # what it missed was written to it
        (tmp_path / "b" / "DEVICE").touch()
        async with two(tmp_path) as (_, index, _):
            assert deleted not in index.live

    asyncio.run(main())


@pytest.mark.parametrize(
    ("call", "number"), [("lock", 1), ("sync_directory", 2)], ids=["opening", "enlisting"]
)
def test_an_opening_that_is_cancelled_leaves_no_directory_locked(
    tmp_path: Path, call: str, number: int
) -> None:
    async def main() -> None:
        for name in "ab":
            (tmp_path / name).mkdir()
        disks, begun, go_on, made = quick(), threading.Event(), threading.Event(), Counter[str]()

        def fault(each: str) -> None:
            made[each] += 1
            if (each, made[each]) == (call, number):
                begun.set()
                assert go_on.wait(10)

        disks[1].fault = fault
        tier = Devices([tmp_path / "a", tmp_path / "b"], capacity_bytes=MIB, disks=disks)
        opening = asyncio.create_task(tier.open(FrameIndex(tier)))
        assert await asyncio.to_thread(begun.wait, 10)
        opening.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert not disks[0].opened
        assert not disks[1].opened
        async with two(tmp_path) as (again, _, _):
            assert len(again.mounts) == 2

    asyncio.run(main())


def test_a_start_that_is_refused_leaves_no_directory_locked(tmp_path: Path) -> None:
    """One directory is still being opened when the other turns out to be none."""

    async def main() -> None:
        disks = quick()
        (tmp_path / "a").touch()
        tier = Devices([tmp_path / "a", tmp_path / "b"], capacity_bytes=MIB, disks=disks, hang_s=1)
        disks[1].fault, begun, go_on = hanging("punch")
        opening = asyncio.create_task(tier.open(FrameIndex(tier)))
        assert await asyncio.to_thread(begun.wait, 10)
        asyncio.get_running_loop().call_later(0.5, go_on.set)  # the other one is looked at before
        with pytest.raises(ConfigError, match="not a directory"):
            await opening
        assert not disks[1].opened

    asyncio.run(main())


def test_one_directory_named_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "a").mkdir()
    with pytest.raises(ConfigError, match="twice"):
        Devices([tmp_path / "a", tmp_path / "link"], capacity_bytes=MIB)


def test_two_tiers_that_were_never_one_become_one(tmp_path: Path) -> None:
    async def main() -> None:
        for name in "ab":
            tier = Devices([tmp_path / name], capacity_bytes=MIB)
            index = FrameIndex(tier)
            await tier.open(index)
            await put_on(tier, index, [name])
            await tier.close()
        async with two(tmp_path) as (_, index, _):
            assert set(index.live) == set(expected({"a": 0, "b": 0}))

    asyncio.run(main())


def test_a_directory_the_tier_was_used_without_is_emptied(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It knows nothing of what was deleted meanwhile, and no tombstone was kept for it."""

    async def main() -> None:
        async with two(tmp_path) as (tier, index, _):
            await fill_both(tier, index, "abcdef")
            kept = on(index, tier.devices[0])
        tier = Devices([tmp_path / "a"], capacity_bytes=MIB)
        await tier.open(FrameIndex(tier))
        await tier.close()
        for _ in range(2):
            async with two(tmp_path) as (_, index, _):
                assert set(index.live) == kept

    asyncio.run(main())
    assert ["emptied" in line for line in caplog.messages].count(True) == 1


def test_nothing_is_written_to_an_emptied_directory_that_the_others_do_not_know_of(
    tmp_path: Path,
) -> None:
    """At the next start it would be emptied again."""

    async def main() -> None:
        async with two(tmp_path) as (tier, index, _):
            await fill_both(tier, index, "abcdef")
        tier = Devices([tmp_path / "a"], capacity_bytes=MIB)
        await tier.open(FrameIndex(tier))
        await tier.close()
        (tmp_path / "b").rename(tmp_path / "gone")
        async with two(tmp_path) as (tier, index, disks):
            kept = set(index.live)
            disks[0].fault = failing("unlink", errno.EIO)  # of the mark that it was left out
            (tmp_path / "gone").rename(tmp_path / "b")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(
                    index.until(lambda: state_of(tier, 1) is DeviceState.OK), 0.5
                )
            assert tier.devices[1].mount is None
            disks[0].fault = None
            await index.until(lambda: state_of(tier, 1) is DeviceState.OK)
            while on(index, tier.devices[1]) == set():
                await put_on(tier, index, [f"after {len(index.live)}"])
            before = set(index.live)
            assert before > kept
        async with two(tmp_path) as (_, index, _):
            assert set(index.live) == before

    asyncio.run(main())


def test_without_any_device_the_start_is_refused_with_what_to_do(tmp_path: Path) -> None:
    async def main() -> None:
        async with two(tmp_path):
            pass
        for name in "ab":
            (tmp_path / name / "DEVICE").unlink()
        with pytest.raises(ConfigError, match="touch"):
            async with two(tmp_path):
                pass
        (tmp_path / "a" / "DEVICE").touch()
        async with two(tmp_path) as (tier, _, _):
            assert state_of(tier, 1) is DeviceState.MISSING

    asyncio.run(main())


def test_a_device_that_fails_at_the_start_is_let_in_later(tmp_path: Path) -> None:
    async def main() -> None:
        async with two(tmp_path) as (tier, index, _):
            await fill_both(tier, index, "abcdef")
            before = set(index.live)
        disks = FaultyDisk(), FaultyDisk()
        disks[1].fault = failing("open", errno.EIO)
        async with two(tmp_path, disks=disks) as (tier, index, _):
            assert state_of(tier, 1) is DeviceState.FAILED
            assert set(index.live) < before
            disks[1].fault = None
            await index.until(lambda: state_of(tier, 1) is DeviceState.OK)
            assert set(index.live) == before

    asyncio.run(main())


def test_a_bad_sector_on_every_device_keeps_nobody_from_starting(tmp_path: Path) -> None:
    class BadSector(FaultyDisk):
        """Refuses to read the end of every file but the small ones it is tried out with."""

        def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if offset and offset + 4096 >= self.sizes(fd).nbytes:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().preadv(fd, buffers, offset)

    async def main() -> None:
        async with two(tmp_path) as (tier, index, _):
            await fill_both(tier, index, "abcdef")
            before = index.sequences
        async with two(tmp_path, disks=(BadSector(), BadSector())) as (tier, index, _):
            assert index.sequences == before
            assert [each["state"] for each in tier.status()] == ["ok", "ok"]

    asyncio.run(main())


def test_a_directory_with_older_keys_than_its_segments_is_refused(tmp_path: Path) -> None:
    """Nor is the tier opened without it: only the operator can put its keys back."""

    async def main() -> None:
        async with two(tmp_path, sealing=SEALING):
            pass
        copy_keys(tmp_path / "b", tmp_path / "old")
        rotate(tmp_path / "b")
        async with two(tmp_path, sealing=SEALING) as (tier, index, _):
            await fill_both(tier, index, "abcdef")
            before = index.sequences
        copy_keys(tmp_path / "b", tmp_path / "new")
        copy_keys(tmp_path / "old", tmp_path / "b")
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"put the newer KEYS\.a and KEYS\.b back"):
                async with two(tmp_path, sealing=SEALING):
                    pass
        copy_keys(tmp_path / "new", tmp_path / "b")
        async with two(tmp_path, sealing=SEALING) as (_, index, _):
            assert index.sequences == before

    asyncio.run(main())
