"""A call that is cancelled while a thread works for it: what the thread did is kept."""

from __future__ import annotations

import asyncio
import errno
import threading
from pathlib import Path

import pytest

from kvstore.sealing import Sealing
from kvstore.testing.disks import FaultyDisk
from kvstore.tier.file import FileTier
from kvstore.tier.file.failure import DiskFailed
from tests.tier.file.frames import (
    MIB,
    SEALING,
    expected,
    live,
    opened,
    put,
    segments,
    tombstone,
    verify,
)


async def cancel_a_delete(tier: FileTier, disk: FaultyDisk) -> None:
    """Cancel one while a thread makes the file for it."""
    begun, go_on = threading.Event(), threading.Event()

    def slow(call: str) -> None:
        if call == "pwritev":
            begun.set()
            assert go_on.wait(10)

    disk.fault = slow
    deleting = asyncio.create_task(tier.frames.write_tombstone(tombstone(1, "a")))
    assert await asyncio.to_thread(begun.wait, 10)
    deleting.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await deleting
    disk.fault = None


@pytest.mark.parametrize("sealing", [None, SEALING])
def test_a_file_that_was_made_for_a_cancelled_call_is_used_by_the_next(
    tmp_path: Path, sealing: Sealing | None
) -> None:
    async def main() -> None:
        disk = FaultyDisk()
        async with opened(tmp_path, disk=disk, sealing=sealing) as (tier, _):
            await cancel_a_delete(tier, disk)
            await put(tier, 2, "b")
            await tier.durability.sync()
            (file,) = segments(tmp_path)
            assert list(disk.opened.values()).count(file) == 1
            assert not disk.unnamed
        assert not disk.opened
        async with opened(tmp_path, sealing=sealing) as (tier, recovered):
            assert live(recovered) == expected({"b": 2})
            await verify(tier, recovered.frames[0])

    asyncio.run(main())


def test_a_file_that_was_made_for_a_cancelled_call_leaves_with_the_tier(tmp_path: Path) -> None:
    async def main() -> None:
        disk = FaultyDisk()
        async with opened(tmp_path, disk=disk) as (tier, _):
            await cancel_a_delete(tier, disk)
            assert len(segments(tmp_path)) == 1
        assert not disk.opened
        assert not segments(tmp_path)

    asyncio.run(main())


def test_a_failed_sync_whose_caller_was_cancelled_is_told_to_the_next(tmp_path: Path) -> None:
    async def main() -> None:
        disk, begun, go_on = FaultyDisk(), threading.Event(), threading.Event()
        calls = 0

        def fails_once(call: str) -> None:
            nonlocal calls
            calls += call == "fdatasync"
            if call == "fdatasync" and calls == 1:
                begun.set()
                assert go_on.wait(10)
                raise OSError(errno.EIO, "once")

        async with opened(tmp_path, disk=disk) as (tier, _):
            extent = await put(tier, 1, "a")
            disk.fault = fails_once
            syncing = asyncio.create_task(tier.durability.sync([extent]))
            assert await asyncio.to_thread(begun.wait, 10)
            syncing.cancel()
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await syncing
            with pytest.raises(DiskFailed):
                await tier.durability.sync([extent])
            assert calls == 1
            other = await put(tier, 2, "b")
            await tier.durability.sync([other])

    asyncio.run(main())


def held_in(disk: FaultyDisk, call: str) -> tuple[threading.Event, threading.Event]:
    """Let the first call of that kind wait; return an event for that, and one that lets it go."""
    begun, go_on = threading.Event(), threading.Event()

    def slow(made: str) -> None:
        if made == call and not begun.is_set():
            begun.set()
            assert go_on.wait(10)

    disk.fault = slow
    return begun, go_on


@pytest.mark.parametrize("call", ["lock", "punch", "names"])
def test_an_opening_that_is_cancelled_keeps_no_lock(tmp_path: Path, call: str) -> None:
    async def main() -> None:
        disk = FaultyDisk()
        begun, go_on = held_in(disk, call)
        tier = FileTier(tmp_path, capacity_bytes=32 * MIB, segment_nbytes=MIB, disk=disk)
        opening = asyncio.create_task(tier.open())
        assert await asyncio.to_thread(begun.wait, 10)
        opening.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert not disk.opened
        async with opened(tmp_path) as (other, _):
            await put(other, 1, "a")

    asyncio.run(main())


def test_a_close_that_is_cancelled_is_carried_out(tmp_path: Path) -> None:
    async def main() -> None:
        disk = FaultyDisk()
        tier = FileTier(tmp_path, capacity_bytes=32 * MIB, segment_nbytes=MIB, disk=disk)
        await tier.open()
        await put(tier, 1, "a")
        begun, go_on = held_in(disk, "fdatasync")
        closing = asyncio.create_task(tier.close())
        assert await asyncio.to_thread(begun.wait, 10)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert disk.opened
        go_on.set()
        async with asyncio.timeout(10):
            while disk.opened:  # noqa: ASYNC110 - a thread closes it
                await asyncio.sleep(0.001)
        async with opened(tmp_path) as (_, recovered):
            assert live(recovered) == expected({"a": 1})

    asyncio.run(main())
