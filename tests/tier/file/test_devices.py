"""Several directories as one tier: devices that are missing, fail, hang, fill up and come back."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvstore.model.errors import ConfigError
from kvstore.testing.disks import FaultyDisk, failing
from kvstore.testing.tier import pages
from kvstore.tier.file import (
    Device,
    Devices,
    DeviceState,
    DiskFailed,
    DiskFull,
    DiskHung,
    FileTier,
    admission,
)
from tests.tier.file.frames import (
    MIB,
    NAMESPACE,
    Frames,
    bury,
    expected,
    key,
    live,
    put,
    put_on,
    recover,
    run,
)
from tests.torture.volume import Volume

HANG_S = 0.3


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try devices again at once, and for as long as it takes."""
    monkeypatch.setattr(admission, "RETRY_S", 0.01)
    monkeypatch.setattr(admission, "RETRY_MAX_S", 0.02)


@asynccontextmanager
async def two(
    path: Path, *, crash: bool = False, **settings: Any
) -> AsyncIterator[tuple[Devices, Frames, tuple[FaultyDisk, FaultyDisk]]]:
    """Open a tier over two directories; crash: end it as a kill -9 does."""
    disks = settings.setdefault("disks", (FaultyDisk(), FaultyDisk()))
    tier = Devices(
        [path / "a", path / "b"], **{"capacity_bytes": 32 * MIB, "segment_nbytes": MIB, **settings}
    )
    index = Frames(tier)
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


async def fill_both(tier: Devices, index: Frames, names: str) -> None:
    """Put each name in a frame of its own, on both devices in turn."""
    for name in names:
        await put_on(tier, index, [name])
    used = {place.mount.device for _, place in index.live.values()}
    assert len(used) == 2, "the device with more room is taken"


async def read(tier: Devices, index: Frames, name: bytes) -> None:
    await tier.read(index.live[name][1], 4096, [pages(4096)])  # type: ignore[index]


def on(index: Frames, device: Device) -> set[bytes]:
    return {key for key, (_, place) in index.live.items() if place.mount.device is device}


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


@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize("survivor", ["a", "b"])
def test_an_answered_delete_holds_whichever_single_device_is_left(
    tmp_path: Path, crash: bool, survivor: str
) -> None:
    async def main() -> None:
        async with two(tmp_path, crash=crash) as (tier, index, _):
            await fill_both(tier, index, "abcdef")
            await bury(tier, index, "abc")
        shutil.rmtree(tmp_path / ({"a", "b"} - {survivor}).pop())
        async with two(tmp_path) as (_, index, _):
            assert set(index.live) <= set(expected(dict.fromkeys("def", 0)))

    asyncio.run(main())


def test_a_delete_that_a_device_out_of_use_misses_is_not_answered(tmp_path: Path) -> None:
    """Else it could come back: at a start without the device that has the tombstone."""

    async def main() -> None:
        async with two(tmp_path) as (tier, index, _):
            await fill_both(tier, index, "abcdef")
        (tmp_path / "b").rename(tmp_path / "gone")
        async with two(tmp_path) as (tier, index, _):
            with pytest.raises(DiskFailed, match="out of use"):
                await bury(tier, index, "abcdef")
            assert index.live == {}
            (tmp_path / "gone").rename(tmp_path / "b")
            await index.until(lambda: state_of(tier, 1) is DeviceState.OK)
            assert index.live == {}, "it was told, after all"
            await bury(tier, index, "abcdef")

    asyncio.run(main())


def test_a_delete_while_a_device_is_taken_in_holds_for_what_is_not_in_the_index_yet(
    tmp_path: Path,
) -> None:
    class Late(Frames):
        """Recalls nothing of a device that is back."""

        def admitted(self) -> None:
            if not self.live:
                super().admitted()

    async def main() -> None:
        async with two(tmp_path) as (tier, index, _):
            await fill_both(tier, index, "abcdef")
        (tmp_path / "b").rename(tmp_path / "gone")
        tier = Devices([tmp_path / "a", tmp_path / "b"], capacity_bytes=32 * MIB)
        late = Late(tier)
        await tier.open(late)
        (tmp_path / "gone").rename(tmp_path / "b")
        await late.until(lambda: state_of(tier, 1) is DeviceState.OK)
        assert tier.unrecalled_runs
        await bury(tier, late, "abc")
        Frames.admitted(late)
        assert set(late.live) == set(expected(dict.fromkeys("def", 0)))
        await tier.close()

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


def test_what_a_device_missed_beyond_all_bounds_is_all_that_was_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MISSED_MAX", 3)

    async def main() -> None:
        async with two(tmp_path) as (tier, index, _):
            await fill_both(tier, index, "abcdef")
            kept = on(index, tier.devices[0])
        (tmp_path / "b").rename(tmp_path / "gone")
        async with two(tmp_path) as (tier, index, _):
            for name in range(4):
                with pytest.raises(DiskFailed):
                    await bury(tier, index, [name])
            (tmp_path / "gone").rename(tmp_path / "b")
            await index.until(lambda: state_of(tier, 1) is DeviceState.OK)
            assert set(index.live) == kept

    asyncio.run(main())


def test_a_delete_that_is_asked_for_again_and_again_is_missed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MISSED_MAX", 3)

    async def main() -> None:
        async with two(tmp_path) as (tier, index, _):
            await fill_both(tier, index, "abcdef")
            before = set(index.live)
        (tmp_path / "b").rename(tmp_path / "gone")
        async with two(tmp_path) as (tier, index, _):
            for _ in range(9):
                with pytest.raises(DiskFailed):
                    await bury(tier, index, "ab")
            (tmp_path / "gone").rename(tmp_path / "b")
            await index.until(lambda: state_of(tier, 1) is DeviceState.OK)
            assert set(index.live) == before - set(expected(dict.fromkeys("ab", 0)))

    asyncio.run(main())


def test_a_device_that_took_no_delete_for_too_long_is_emptied_when_it_takes_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MISSED_MAX", 3)

    async def main() -> None:
        async with two(tmp_path) as (tier, index, disks):
            await fill_both(tier, index, "abcdef")
            kept = on(index, tier.devices[0])
            disks[1].fault = failing("pwritev", errno.EROFS)
            for name in range(4):
                with pytest.raises(DiskFailed):
                    await bury(tier, index, [name])
            assert on(index, tier.devices[1]), "it is read until then"
            disks[1].fault = None
            await index.until(lambda: not on(index, tier.devices[1]))
            await index.until(lambda: state_of(tier, 1) is DeviceState.OK)
            assert set(index.live) == kept

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

    class Deaf(Frames):
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
        Frames.admitted(index)
        device, before = tier.devices[0], set(index.live)
        assert device.mount is not None
        extent = await put(device.mount.tier, tier.take_sequence(), ["lost"])
        disks[0].fault = lambda call: failing(call, errno.EIO)(call)
        with pytest.raises(DiskFailed):
            await device.mount.tier.sync([extent])
        device.mount.tier.free(extent)
        await device.mount.tier.settle()  # its hole is not punched
        suspects = set()
        for _ in range(2):
            disks[0].fault = lambda call: failing(call, errno.EIO)(call)
            while not on(index, device):
                index.take(device.mount.recall_oldest(1))
            suspects.add(min(on(index, device)))
            with pytest.raises(DiskFailed):
                await read(tier, index, min(on(index, device)))
            await index.until(lambda: not on(index, device) and device.state is DeviceState.FAILED)
            disks[0].fault = None
            await index.until(lambda: device.state is DeviceState.OK)
        Frames.admitted(index)
        assert set(index.live) == before - suspects
        await tier.close()

    asyncio.run(main())


async def fill_other(tier: Devices, index: Frames, names: str) -> None:
    """Put names while one device is out: all go to the other one."""
    for name in names:
        place = await put_on(tier, index, [name])
        assert place.mount.device.state is DeviceState.OK


def test_the_only_device_is_not_taken_out_for_a_read_that_fails(tmp_path: Path) -> None:
    async def main() -> None:
        disk = FaultyDisk()
        tier = Devices([tmp_path], capacity_bytes=MIB, disks=[disk])
        index = Frames(tier)
        await tier.open(index)
        place = await put_on(tier, index, "a")
        disk.fault = failing("preadv", errno.EIO)
        with pytest.raises(DiskFailed):
            await tier.read(place, 4096, [pages(4096)])
        disk.fault = None
        await tier.read(place, 4096, [pages(4096)])
        await tier.close()

    asyncio.run(main())


def hanging(call: str) -> tuple[Callable[[str], None], threading.Event, threading.Event]:
    """Return a fault that blocks in `call`, an event for that, and one that lets it go on."""
    hung, go_on = threading.Event(), threading.Event()

    def fault(made: str) -> None:
        if made == call:
            hung.set()
            go_on.wait(30)

    return fault, hung, go_on


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


async def use(tier: Devices, index: Frames, call: str) -> None:
    """Make the first device do a call; raises what became of it."""
    if call == "preadv":
        place = next(p for _, p in index.live.values() if p.mount.device is tier.devices[0])
        await tier.read(place, 4096, [pages(4096)])
        return
    header, payload = run(tier.take_sequence(), ["never durable"])
    places = [tier.allocate(header.nbytes)]
    while places[-1] is not None and places[-1].mount.device is not tier.devices[0]:
        places.append(tier.allocate(header.nbytes))
    place = places.pop()
    assert place is not None
    for other in places:
        assert other is not None
        tier.free(other)
    await tier.write(place, [tier.encode(place, header), *payload])
    for error in (await tier.sync([place])).values():
        raise error


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
            assert tier.takes_writes
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
        index = Frames(tier)
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
        index = Frames(tier)
        await tier.open(index)
        assert set(index.live) == before
        assert state_of(tier, 0) is DeviceState.OK
        await tier.close()

    with Volume() as volume:
        asyncio.run(main(volume))


def test_a_delete_that_one_device_could_not_take_is_known_to_it_before_it_is_well_again(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with two(tmp_path, crash=True) as (tier, index, disks):
            names = "abcdef"
            await put_on(tier, index, names)  # one frame; the delete leaves most of it
            (held,) = {place.mount.device for _, place in index.live.values()}
            disk = disks[tier.devices.index(held)]
            disk.fault = failing("pwritev", errno.EIO)
            with pytest.raises(DiskFailed):
                await bury(tier, index, "a")
            assert held.state is DeviceState.FAILING
            disk.fault = None
            await index.until(lambda: held.state is DeviceState.OK)
            assert set(index.live) == set(expected(dict.fromkeys("bcdef", 0)))
        other = "b" if held.path.name == "a" else "a"
        shutil.rmtree(tmp_path / other)  # the device that had taken it dies
        async with two(tmp_path) as (_, index, _):
            assert set(index.live) == set(expected(dict.fromkeys("bcdef", 0)))

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


def test_one_directory_named_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "a").mkdir()
    with pytest.raises(ConfigError, match="twice"):
        Devices([tmp_path / "a", tmp_path / "link"], capacity_bytes=MIB)


def test_two_tiers_that_were_never_one_become_one(tmp_path: Path) -> None:
    async def main() -> None:
        for name in "ab":
            tier = Devices([tmp_path / name], capacity_bytes=MIB)
            index = Frames(tier)
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
        await tier.open(Frames(tier))
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
        await tier.open(Frames(tier))
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


def test_a_device_is_not_unlocked_while_a_thread_still_punches_or_unlinks(tmp_path: Path) -> None:
    """Else frames would vanish which whoever takes the directory next has found there."""

    async def main() -> None:
        disk = FaultyDisk()
        tier = FileTier(tmp_path, capacity_bytes=MIB, disk=disk)
        await tier.open()
        extent = await put(tier, 1, "a")
        await put(tier, 2, "b")
        await tier.sync()
        disk.fault, punching, go_on = hanging("punch")
        tier.free(extent)
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
