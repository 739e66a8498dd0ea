"""An answered delete holds, whichever devices fail, miss it or come back."""

from __future__ import annotations

import asyncio
import errno
import shutil
from pathlib import Path

import pytest

from kvstore.testing.disks import failing
from kvstore.tier.file import Devices, DeviceState, DiskFailed, Placed
from kvstore.tier.file.devices import tombstones
from tests.tier.file.devices.several import HANG_S, fill_both, on, quick, state_of, two
from tests.tier.file.frames import MIB, FrameIndex, bury, expected, put_on, run


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
    class Late(FrameIndex):
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
        assert tier.recall.unrecalled_runs
        await bury(tier, late, "abc")
        FrameIndex.admitted(late)
        assert set(late.live) == set(expected(dict.fromkeys("def", 0)))
        await tier.close()

    asyncio.run(main())


def test_what_a_device_missed_beyond_all_bounds_is_all_that_was_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tombstones, "MISSED_MAX", 3)

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
    monkeypatch.setattr(tombstones, "MISSED_MAX", 3)

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
    monkeypatch.setattr(tombstones, "MISSED_MAX", 3)

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


def test_a_device_is_taken_in_after_the_runs_that_its_tombstones_would_kill(tmp_path: Path) -> None:
    """A run that is put anew after the delete, and written meanwhile, has a lower number than the
    tombstone that the device gets now. It may not land there; what begins later may."""

    async def main() -> None:
        async with two(tmp_path) as (tier, index, _):
            await fill_both(tier, index, "abcdef")
        (tmp_path / "b").rename(tmp_path / "gone")
        async with two(tmp_path, disks=quick(), hang_s=HANG_S) as (tier, index, _):
            with pytest.raises(DiskFailed):
                await bury(tier, index, "abcdef")
            under_way = tier.sequences.begin_runs(1)
            (tmp_path / "gone").rename(tmp_path / "b")
            await index.until(lambda: tier.devices[1].is_numbered)
            (later,) = tier.sequences.begin_runs(1)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await index.until(lambda: tier.devices[1].mount is not None)
            tier.sequences.end_runs(under_way)
            await index.until(lambda: state_of(tier, 1) is DeviceState.OK)
            header, payload = run(later, "a")
            mount = tier.devices[1].mount
            assert mount is not None
            extent = mount.tier.frames.allocate(header.nbytes)
            assert extent is not None
            place = Placed(mount, extent)
            await tier.frames.write(place, [tier.frames.encode(place, header), *payload])
            assert await tier.frames.sync([place]) == {}
        async with two(tmp_path) as (_, index, _):
            assert set(index.live) == set(expected({"a": 0}))

    asyncio.run(main())
