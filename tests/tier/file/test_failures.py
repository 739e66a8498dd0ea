from __future__ import annotations

import asyncio
import errno
import logging
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.model.errors import ConfigError, CorruptBlock, InvalidRequest, Unavailable
from kvstore.testing.disks import FaultyDisk, failing
from kvstore.testing.tier import pages
from kvstore.tier.file import DiskFailed, DiskFull, FileTier
from tests.tier.file.frames import (
    MIB,
    expected,
    killed,
    live,
    opened,
    put,
    run,
    segments,
    tombstone,
    verify,
)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB of its own."""
    path = tmp_path / "small"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(path)]
    try:
        subprocess.run(mount, check=True, capture_output=True, timeout=10)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"may not mount: {error}")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True, timeout=10)


async def fill_up(tier: FileTier) -> dict[object, int]:
    """Put frames until the disk, not the cap, says no. The failed frame is freed."""
    stored: dict[object, int] = {}
    for sequence in range(1, 1000):
        header, payload = run(sequence, [sequence], nbytes=150_000)
        extent = tier.frames.allocate(header.nbytes)
        assert extent is not None
        try:
            await tier.frames.write(extent, [tier.frames.encode(extent, header), *payload])
        except DiskFull:
            tier.frames.free(extent)
            return stored
        stored[sequence] = sequence
    raise AssertionError("the disk never fills up")


async def bury_until_full(tier: FileTier) -> int:
    for count in range(1000):
        try:
            await tier.frames.write_tombstone(tombstone(2000 + count, ["nobody"]))
        except DiskFull:
            return count
    raise AssertionError("the disk never fills up")


def test_a_full_disk_is_an_outcome_and_the_tier_goes_on(tmp_path: Path) -> None:
    async def main() -> None:
        disk = FaultyDisk()
        async with opened(tmp_path, disk=disk) as (tier, _):
            disk.budget_nbytes = 3_300_000
            stored = await fill_up(tier)
            assert len(stored) > 15
            disk.budget_nbytes = None
            await put(tier, 500, ["later"])
            await tier.upkeep.settle()
        async with opened(tmp_path) as (tier, recovered):
            assert live(recovered) == expected({**stored, "later": 500})
            for record in recovered.frames:
                await verify(tier, record)

    asyncio.run(main())


def test_a_failed_write_can_be_repeated_in_place(tmp_path: Path) -> None:
    async def main() -> None:
        disk = FaultyDisk()
        async with killed(tmp_path, disk=disk) as (tier, _):
            header, payload = run(1, "a")
            extent = tier.frames.allocate(header.nbytes)
            assert extent is not None
            page = tier.frames.encode(extent, header)
            for code, outcome in ((errno.ENOSPC, DiskFull), (errno.EIO, DiskFailed)):
                disk.fault = failing("pwritev", code)
                with pytest.raises(outcome):
                    await tier.frames.write(extent, [page, *payload])
            disk.fault = None
            await tier.frames.write(extent, [page, *payload])
            await tier.durability.sync()
        async with opened(tmp_path) as (_, recovered):
            assert live(recovered) == expected({"a": 1})

    asyncio.run(main())


def test_a_real_full_file_system(small_disk: Path) -> None:
    async def main() -> None:
        async with opened(small_disk, capacity_bytes=64 * MIB) as (tier, _):
            stored = await fill_up(tier)
            assert len(stored) > 15
            assert await bury_until_full(tier) < 200
        async with opened(small_disk, capacity_bytes=64 * MIB) as (tier, recovered):
            assert live(recovered) == expected(stored)
            for record in recovered.frames[:5]:
                tier.frames.free(record.location)
            await tier.upkeep.settle()
            await put(tier, recovered.next_sequence, ["again"], nbytes=150_000)
            await tier.durability.sync()

    asyncio.run(main())


def test_a_read_only_file_system_says_what_to_do(small_disk: Path) -> None:
    remount = ["mount", "-o", "remount,ro", str(small_disk)]
    subprocess.run(remount, check=True, capture_output=True, timeout=10)
    with pytest.raises(ConfigError, match="make it writable"):
        asyncio.run(FileTier(small_disk, capacity_bytes=MIB).open())


@pytest.mark.parametrize("call", ["lock", "open"])
def test_a_directory_without_permission_says_what_to_do(tmp_path: Path, call: str) -> None:
    async def main() -> None:
        disk = FaultyDisk()
        disk.fault = failing(call, errno.EACCES)
        with pytest.raises(ConfigError, match="make it writable"):
            await FileTier(tmp_path, capacity_bytes=MIB, disk=disk).open()
        assert not disk.opened

    asyncio.run(main())


def test_a_path_that_is_a_file_says_what_to_do(tmp_path: Path) -> None:
    async def main() -> None:
        (tmp_path / "file").touch()
        for path in (tmp_path / "file", tmp_path / "file" / "below"):
            with pytest.raises(ConfigError, match="not a directory"):
                await FileTier(path, capacity_bytes=MIB).open()

    asyncio.run(main())


def test_one_daemon_at_a_time(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (tier, _):
            await put(tier, 1, "a")
            with pytest.raises(ConfigError, match="used by another kvstore daemon"):
                await FileTier(tmp_path, capacity_bytes=MIB).open()
            await put(tier, 2, "b")
        async with opened(tmp_path) as (_, recovered):
            assert live(recovered) == expected({"a": 1, "b": 2})

    asyncio.run(main())


def test_without_o_direct_it_says_so_once_and_works(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        disk = FaultyDisk()
        disk.fault = failing("open_direct", errno.EINVAL)
        with caplog.at_level(logging.WARNING):
            async with opened(tmp_path, disk=disk) as (tier, _):
                await put(tier, 1, "a")
        async with opened(tmp_path, disk=disk) as (tier, recovered):
            await verify(tier, recovered.frames[0])

    asyncio.run(main())
    said = [line for line in caplog.messages if "no O_DIRECT" in line]
    assert len(said) == 2  # once per open


def test_o_direct_refuses_crooked_memory_with_a_reason(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (tier, _):
            extent = await put(tier, 1, "a", nbytes=8192)
            crooked = pages(3 * 4096)[100:4196]
            with pytest.raises(InvalidRequest, match="page-aligned"):
                await tier.frames.read(extent, 4096, [crooked])
            with pytest.raises(InvalidRequest, match="whole pages"):
                await tier.frames.read(extent, 4096, [pages(4096)[:100]])

    asyncio.run(main())


def test_an_unreadable_device_fails_the_read_alone(tmp_path: Path) -> None:
    async def main() -> None:
        disk = FaultyDisk()
        async with opened(tmp_path, disk=disk) as (tier, _):
            extent = await put(tier, 1, "a", nbytes=4096)
            disk.fault = failing("preadv", errno.EIO)
            with pytest.raises(DiskFailed):
                await tier.frames.read(extent, 4096, [pages(4096)])
            disk.fault = None
            await tier.frames.read(extent, 4096, [pages(4096)])

    asyncio.run(main())


def test_a_segment_that_somebody_removed_is_a_corrupt_block(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (tier, _):
            extent = await put(tier, 1, "a", nbytes=4096)
            segments(tmp_path)[0].unlink()
            with pytest.raises(CorruptBlock):
                await tier.frames.read(extent, 4096, [pages(4096)])

    asyncio.run(main())


def test_a_failed_fdatasync_is_told_to_everybody_who_waits_and_its_segment_is_given_up(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        disk = FaultyDisk()
        async with killed(tmp_path, disk=disk) as (tier, _):
            lost = await put(tier, 1, "a")
            disk.fault = failing("fdatasync", errno.EIO)
            outcomes = await asyncio.gather(
                tier.durability.sync(), tier.durability.sync(), return_exceptions=True
            )
            assert [type(outcome) for outcome in outcomes] == [DiskFailed, DiskFailed]
            disk.fault = None
            kept = await put(tier, 2, "b")
            await tier.durability.sync()
            assert kept.segment > lost.segment
            tier.frames.free(lost)

    asyncio.run(main())


def test_a_failed_fdatasync_behind_a_seal_is_told_by_the_next_sync(tmp_path: Path) -> None:
    async def main() -> None:
        disk = FaultyDisk()
        async with killed(tmp_path, disk=disk) as (tier, _):
            disk.fault = failing("fdatasync", errno.EIO)
            for n in range(1, 5):
                await put(tier, n, [n], nbytes=400_000)
            await tier.upkeep.settle()
            disk.fault = None
            with pytest.raises(DiskFailed):
                await tier.durability.sync()
            await tier.durability.sync()

    asyncio.run(main())


def test_sync_covers_new_files_and_their_directory(tmp_path: Path) -> None:
    async def main() -> None:
        calls: list[str] = []
        disk = FaultyDisk()
        async with killed(tmp_path, disk=disk) as (tier, _):
            disk.fault = calls.append
            await put(tier, 1, "a")
            assert "fdatasync" not in calls
            await tier.durability.sync()
            assert calls[-2:] == ["fdatasync", "sync_directory"] or calls[-2:] == [
                "sync_directory",
                "fdatasync",
            ]
            calls.clear()
            await tier.durability.sync()  # nothing new
            assert calls == []
            await put(tier, 2, "b")
            await tier.durability.sync()
            assert calls.count("fdatasync") == 1
            assert calls.count("sync_directory") == 0

    asyncio.run(main())


@pytest.mark.parametrize("call", ["unlink", "punch"])
def test_upkeep_that_fails_costs_space_only(tmp_path: Path, call: str) -> None:
    async def main() -> None:
        disk = FaultyDisk()
        async with opened(tmp_path, disk=disk) as (tier, _):
            extents = [await put(tier, n, [n], nbytes=300_000) for n in range(1, 10)]
            disk.fault = failing(call, errno.EIO)
            for extent in extents[:-1]:
                tier.frames.free(extent)
            await tier.upkeep.settle()
            disk.fault = None
            await put(tier, 20, ["on"])
        async with opened(tmp_path) as (tier, recovered):
            assert live(recovered).items() >= expected({9: 9, "on": 20}).items()

    asyncio.run(main())


def test_close_is_bounded_when_the_disk_hangs(tmp_path: Path) -> None:
    async def main() -> None:
        disk = FaultyDisk()
        hung, go_on = threading.Event(), threading.Event()

        def hang(call: str) -> None:
            if call == "pwritev":
                hung.set()
                go_on.wait(20)

        tier = FileTier(tmp_path, capacity_bytes=MIB, disk=disk)
        await tier.open()
        disk.fault = hang
        write = asyncio.ensure_future(put(tier, 1, "a"))
        assert await asyncio.to_thread(hung.wait, 10)
        await tier.close(timeout_s=0.05)
        with pytest.raises(ConfigError, match="used by another"):  # a thread may still write
            await FileTier(tmp_path, capacity_bytes=MIB).open()
        go_on.set()
        with pytest.raises(Unavailable):
            await write
        with pytest.raises(Unavailable):
            await tier.durability.sync()
        disk.kill()

    asyncio.run(main())


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_disk_that_fails_under_the_close_is_logged_and_the_directory_is_unlocked(
    tmp_path: Path, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        disk = FaultyDisk()
        async with opened(tmp_path, disk=disk) as (tier, _):
            await put(tier, 1, "a")
            disk.fault = failing("sync_directory", code)
        assert not disk.opened
        async with opened(tmp_path) as (_, recovered):
            assert live(recovered) == expected({"a": 1})

    asyncio.run(main())
    assert [line for line in caplog.messages if "not synced" in line]


def test_a_closed_tier_answers_unavailable(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (tier, _):
            extent = await put(tier, 1, "a", nbytes=4096)
        await tier.close()
        assert tier.frames.allocate(4096) is None
        with pytest.raises(Unavailable):
            await tier.frames.read(extent, 4096, [pages(4096)])
        with pytest.raises(Unavailable):
            await tier.frames.write_tombstone(tombstone(2, "a"))

    asyncio.run(main())


def test_a_failed_fdatasync_that_somebody_else_met_is_told_to_who_asks_for_the_frame(
    tmp_path: Path,
) -> None:
    """As when a delete syncs between a batch's writes and the batch's own sync."""

    async def main() -> None:
        disk = FaultyDisk()
        async with opened(tmp_path, disk=disk) as (tier, _):
            lost = await put(tier, 1, ["lost"])
            disk.fault = failing("fdatasync", errno.EIO)
            with pytest.raises(DiskFailed):
                await tier.durability.sync()
            disk.fault = None
            kept = await put(tier, 2, ["kept"])
            await tier.durability.sync([kept])
            with pytest.raises(DiskFailed):
                await tier.durability.sync([lost])

    asyncio.run(main())


def test_a_failed_fdatasync_behind_a_seal_is_not_repeated_by_who_waits_for_it(
    tmp_path: Path,
) -> None:
    """A second fdatasync of the same file would succeed, and lie."""

    async def main() -> None:
        disk = FaultyDisk()
        failed: list[str] = []

        def fail_once(call: str) -> None:
            if call == "fdatasync" and not failed:
                failed.append(call)
                raise OSError(errno.EIO, "once")

        async with opened(tmp_path, disk=disk) as (tier, _):
            disk.fault = fail_once
            first = await put(tier, 1, ["first"], nbytes=900_000)
            await put(tier, 2, ["second"], nbytes=900_000)  # fills the segment: it is sealed
            for _ in range(20):
                await asyncio.sleep(0)
            with pytest.raises(DiskFailed):
                await tier.durability.sync([first])

    asyncio.run(main())


def test_a_segment_that_could_be_neither_made_nor_removed_is_made_later(tmp_path: Path) -> None:
    """The disk dies between making the file and its first page, and comes back."""

    def dead(call: str) -> None:
        if call in ("pwritev", "unlink"):
            raise OSError(errno.EIO, "dead")

    async def main() -> None:
        disk = FaultyDisk()
        async with opened(tmp_path, disk=disk) as (tier, _):
            header, payload = run(1, [1])
            extent = tier.frames.allocate(header.nbytes)
            assert extent is not None
            disk.fault = dead
            with pytest.raises(DiskFailed, match="dead"):
                await tier.frames.write(extent, [tier.frames.encode(extent, header), *payload])
            assert len(segments(tmp_path)) == 1
            disk.fault = None
            await tier.frames.write(extent, [tier.frames.encode(extent, header), *payload])
            await tier.durability.sync([extent])
            assert len(segments(tmp_path)) == 1
        async with opened(tmp_path) as (tier, recovered):
            assert live(recovered) == expected({1: 1})

    asyncio.run(main())
