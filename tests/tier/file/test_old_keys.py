"""Keys put back from a backup that is older than a rotation: nothing they do not open is lost."""

from __future__ import annotations

import asyncio
import re
import shutil
from pathlib import Path

import pytest

from kvstore.model.block import PAGE_NBYTES
from kvstore.model.errors import ConfigError
from kvstore.tier.file import Audit, RealDisk
from kvstore.tier.file.keys import KEYS, DirectoryKeys
from tests.tier.file.frames import (
    ROOT,
    SEALING,
    expected,
    flip,
    killed,
    live,
    opened,
    put,
    segments,
    tombstone,
)

NEWER = r"needs epoch 2 of .*newest known is 1: put the newer KEYS\.a and KEYS\.b back.*move this"
# Where page 0 and the last page of a segment have its key.
EPOCH_AT, COPY_EPOCH_AT, COPY_WRAPPED_AT, TRAILER_EPOCH_AT = 48, 2072, 2080, 12


def keys_in(path: Path) -> DirectoryKeys:
    keys = DirectoryKeys(RealDisk(), path, SEALING)
    keys.load(create=False)
    return keys


def rotate(path: Path) -> None:
    """What `kvstore key rotate` does."""
    keys_in(path).change(lambda ring: ring.rotated(ROOT))


def copy_keys(source: Path, target: Path) -> None:
    target.mkdir(exist_ok=True)
    for name in KEYS.names:
        shutil.copy(source / name, target / name)


def served(path: Path) -> dict[bytes, int]:
    """Return what a start finds, when what it gives up is gone."""

    async def main() -> dict[bytes, int]:
        async with opened(path, sealing=SEALING) as (tier, recovered):
            await tier.upkeep.settle()
            return dict(live(recovered))

    return asyncio.run(main())


@pytest.fixture
def rotated(tmp_path: Path) -> Path:
    """A directory with a segment of epoch 1 and a newer one of epoch 2, which deletes from it.

    Beside it, `old` and `new` have the keys of before and after the rotation.
    """

    async def main(*, first: bool) -> None:
        async with opened(path, sealing=SEALING) as (tier, _):
            if first:
                await put(tier, 1, ["deleted", "kept"])
            else:
                await tier.frames.write_tombstone(tombstone(2, ["deleted"]))
                await put(tier, 3, ["newer"])
            await tier.durability.sync()

    path = tmp_path / "tier"
    asyncio.run(main(first=True))
    copy_keys(path, tmp_path / "old")
    rotate(path)
    asyncio.run(main(first=False))
    copy_keys(path, tmp_path / "new")
    assert served(path) == expected({"kept": 1, "newer": 3})
    return path


@pytest.fixture
def rotated_first(tmp_path: Path) -> Path:
    """A directory with one segment, of epoch 2 and without a footer; keys as in `rotated`."""

    async def main() -> None:
        async with killed(path, sealing=SEALING) as (tier, _):
            await put(tier, 1, ["a"])
            await tier.durability.sync()

    path = tmp_path / "tier"
    path.mkdir()
    DirectoryKeys(RealDisk(), path, SEALING).load()
    copy_keys(path, tmp_path / "old")
    rotate(path)
    asyncio.run(main())
    copy_keys(path, tmp_path / "new")
    return path


def test_older_keys_are_refused_until_the_newer_ones_are_back(rotated: Path) -> None:
    copy_keys(rotated.parent / "old", rotated)
    before = {file.name: file.read_bytes() for file in segments(rotated)}
    with pytest.raises(ConfigError, match=re.escape(segments(rotated)[1].name) + f" {NEWER}"):
        served(rotated)
    assert {file.name: file.read_bytes() for file in segments(rotated)} == before
    assert [report.locked for report in Audit(rotated, keys=keys_in(rotated)).segments] == [
        False,
        True,
    ]
    copy_keys(rotated.parent / "new", rotated)
    assert served(rotated) == expected({"kept": 1, "newer": 3})


def test_without_the_segment_the_older_keys_do_and_its_deletes_are_forgotten(
    rotated: Path,
) -> None:
    copy_keys(rotated.parent / "old", rotated)
    segments(rotated)[1].rename(rotated.parent / "moved away")
    assert served(rotated) == expected({"deleted": 1, "kept": 1})


def test_a_rotation_of_older_keys_makes_no_key_that_was_lost(rotated: Path) -> None:
    copy_keys(rotated.parent / "old", rotated)
    rotate(rotated)
    with pytest.raises(ConfigError, match=r"another key of epoch 2 .*put those back"):
        served(rotated)
    copy_keys(rotated.parent / "new", rotated)
    assert served(rotated) == expected({"kept": 1, "newer": 3})


def test_a_segment_of_an_epoch_that_was_retired_is_given_up(rotated: Path) -> None:
    first, second = segments(rotated)
    keys_in(rotated).retire({2})
    assert served(rotated) == expected({"newer": 3})
    assert segments(rotated) == [second]
    assert not first.exists()


@pytest.mark.parametrize("at", [EPOCH_AT, COPY_EPOCH_AT, TRAILER_EPOCH_AT - PAGE_NBYTES])
def test_an_epoch_that_rotted_in_one_copy_is_neither_believed_nor_missed(
    rotated: Path, at: int
) -> None:
    file = segments(rotated)[1]
    flip(file, at % file.stat().st_size)
    assert served(rotated) == expected({"kept": 1, "newer": 3})
    copy_keys(rotated.parent / "old", rotated)
    with pytest.raises(ConfigError, match=NEWER):  # the other two copies agree
        served(rotated)


def test_what_rot_says_of_an_epoch_keeps_nobody_from_starting(rotated_first: Path) -> None:
    (file,) = segments(rotated_first)
    flip(file, EPOCH_AT)
    flip(file, COPY_WRAPPED_AT)
    assert served(rotated_first) == {}
    assert not file.exists()


def test_a_segment_without_a_footer_is_not_given_up_either(rotated_first: Path) -> None:
    copy_keys(rotated_first.parent / "old", rotated_first)
    for _ in range(2):
        with pytest.raises(ConfigError, match=NEWER):
            served(rotated_first)
    copy_keys(rotated_first.parent / "new", rotated_first)
    assert served(rotated_first) == expected({"a": 1})
