"""A bucket that is emptied for good."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstore.tier.object import ObjectFailed, Outcome
from tests.tier.object.opened import opened, run
from tests.tier.object.runs import frames, prefix_of, reads_of


def files_of(bucket: Path) -> list[Path]:
    return sorted(path for path in bucket.rglob("*") if path.is_file())


def test_an_object_that_arrives_while_it_is_emptied_does_not_stay(tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"

    async def test() -> None:
        async with opened({"url": f"file://{bucket}"}) as side:
            await side.write(frames(prefix_of("erased", 16)))
            late = [(path, path.read_bytes()) for path in files_of(bucket)][-2:]
            delete = side.bucket.delete

            async def deletes(names: Sequence[str]) -> None:
                await delete(names)
                if late:  # an upload whose caller has gone
                    path, data = late.pop()
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(data)

            side.bucket.delete = deletes  # type: ignore[method-assign]
            await side.tier.erase(30.0)
            assert not late
            assert files_of(bucket) == []

    run(test)


def test_another_daemon_misses_what_it_still_believes_in(tmp_path: Path) -> None:
    """And asks for each object once."""
    where, keys = {"url": f"file://{tmp_path}/bucket"}, prefix_of("believed", 32)

    async def test() -> None:
        async with opened(where) as one, opened(where) as two:
            for first in (0, 16):
                await one.write(frames(keys, first, first + 16))
            assert (await two.find(keys)).blocks == 32
            await one.tier.erase(30.0)
            believed = await two.find(keys)
            assert believed.blocks == 32
            reads, _ = reads_of(believed)
            assert set(await two.tier.reads.read(reads, two.deadline())) == {Outcome.GONE}
            assert (await two.find(keys)).blocks == 0

    run(test)


def test_objects_that_come_back_for_ever_are_said(tmp_path: Path) -> None:
    async def test() -> None:
        async with opened({"url": f"file://{tmp_path}/bucket"}) as side:
            await side.write(frames(prefix_of("locked", 16)))

            async def keeps(names: Sequence[str]) -> None:
                """Say that all is well."""

            side.bucket.delete = keeps  # type: ignore[method-assign]
            with pytest.raises(ObjectFailed):
                await side.tier.erase(0.3)

    run(test)
