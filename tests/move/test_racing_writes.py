"""Disks that fill up half way through a batch, and deletes while a batch is being written."""

from __future__ import annotations

import asyncio
import errno
import itertools
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.testing.disks import FaultyDisk, failing
from kvstore.tier.file import DeviceState
from kvstore.tier.file.devices import admission
from tests.store.node import SPEC, Node, chain

WAIT_S = 10.0


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "RETRY_S", 0.01)
    monkeypatch.setattr(admission, "RETRY_MAX_S", 0.02)


@pytest.mark.parametrize("taken", [0, 1, 2, 3, 5, 8])
def test_disks_that_fill_up_half_way_keep_what_they_promised(tmp_path: Path, taken: int) -> None:
    """All disks take so many more writes, then none until there is room again."""
    paths = [tmp_path / name for name in "abc"]
    disks = [FaultyDisk(syncs=False) for _ in paths]
    names = range(6)
    with Node(paths, disks=disks) as node:
        writes = itertools.count()

        def full(call: str) -> None:
            if call == "pwritev" and next(writes) >= taken:
                failing(call, errno.ENOSPC)(call)

        for disk in disks:
            disk.fault = full
        durable = [name for name in names if node.put(chain(name), 0, 16, durable=True).durable]
        assert len(durable) <= taken
        for name in names:  # nothing left the arena because of it
            assert node.get(chain(name)) == 16
        for disk in disks:
            disk.fault = None
        assert node.file is not None
        states = [device.state for device in node.file.devices]
        assert DeviceState.FAILED not in states
        node.run(_room_again(node))
        assert node.flush()
    with Node(paths) as node:
        for name in names:
            assert node.get(chain(name)) == 16


@pytest.mark.parametrize("taken", [1, 2, 3, 5])
def test_what_was_durable_before_the_disks_were_full_is_there_after_a_restart(
    tmp_path: Path, taken: int
) -> None:
    """They stay full until the end: what was not answered as durable may be gone, nothing else."""
    paths = [tmp_path / name for name in "ab"]
    disks = [FaultyDisk(syncs=False) for _ in paths]
    with Node(paths, disks=disks) as node:
        writes = itertools.count()

        def full(call: str) -> None:
            if call == "pwritev" and next(writes) >= taken:
                failing(call, errno.ENOSPC)(call)

        for disk in disks:
            disk.fault = full
        names = range(5)
        durable = [name for name in names if node.put(chain(name), 0, 16, durable=True).durable]
    with Node(paths) as node:
        for name in names:
            assert node.get(chain(name)) >= (16 if name in durable else 0)


@pytest.mark.parametrize("cleared", [True, False])
@pytest.mark.parametrize("call", ["pwritev", "fdatasync"])
def test_what_is_deleted_while_it_is_being_written_stays_away(
    tmp_path: Path, call: str, cleared: bool
) -> None:
    paths = [tmp_path / name for name in "ab"]
    disks = [FaultyDisk() for _ in paths]
    keys, other = chain(1), chain(2)
    with Node(paths, disks=disks, hang_s=60.0) as node:
        node.put(other, 0, 8, durable=True)
        reached, go_on = threading.Event(), threading.Event()

        def held(made: str) -> None:
            if made == call:
                reached.set()
                go_on.wait(WAIT_S)

        for disk in disks:
            disk.fault = held
        node.put(keys, 0, 16)

        async def delete_meanwhile() -> None:
            while not reached.is_set():  # noqa: ASYNC110 - set by a thread of the disk
                await asyncio.sleep(0.005)
            store = node.store
            deleting = asyncio.create_task(
                store.deletes.clear(SPEC.id) if cleared else store.deletes.delete(SPEC.id, keys)
            )
            await asyncio.sleep(0.05)
            assert store.gets.match(SPEC.id, keys).hit_blocks == 0  # before it is answered
            go_on.set()
            await deleting

        try:
            node.run(delete_meanwhile())
        finally:
            go_on.set()
        for disk in disks:
            disk.fault = None
        assert node.flush()
        assert node.get(keys) == 0
        assert node.get(other) == (0 if cleared else 8)
        assert node.put(keys, 0, 4, durable=True).durable  # later ones are not meant
    with Node(paths) as node:
        assert node.get(keys) == 4
        assert node.get(other) == (0 if cleared else 8)


async def _room_again(node: Node) -> None:
    await _until(lambda: all(each.state is DeviceState.OK for each in node.file.devices))  # type: ignore[union-attr]


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - tasks of the tier change it, and tell nobody here
        await asyncio.sleep(0.005)
