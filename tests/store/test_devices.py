"""A node on two disks, one of which fails: it serves on, and says why what is gone is gone."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.decide.index import HeldSlot
from kvstore.decide.planner import DAEMON_SESSION
from kvstore.model.block import BlockKey
from kvstore.model.outcome import Reason
from kvstore.move import policy_notes
from kvstore.testing.disks import FaultyDisk, failing
from kvstore.tier.file import Device, DeviceState, DiskFailed
from kvstore.tier.file.devices import admission
from tests.store.node import FULL, SPEC, Node, chain, record_bytes

CHAINS = [chain(name, 16) for name in range(8)]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "RETRY_S", 0.01)
    monkeypatch.setattr(admission, "RETRY_MAX_S", 0.02)


@pytest.fixture
def disks() -> tuple[FaultyDisk, FaultyDisk]:
    """Disks that do not hang because somebody else's fsync takes long."""
    return FaultyDisk(syncs=False), FaultyDisk(syncs=False)


@pytest.fixture
def node(tmp_path: Path, disks: tuple[FaultyDisk, FaultyDisk]) -> Iterator[Node]:
    """Holds every chain durably; the arena has room for one or two of them."""
    paths = [tmp_path / "a", tmp_path / "b"]
    with Node(paths, disks=disks, arena_bytes=512 << 10, hang_s=0.3) as node:
        for keys in CHAINS:
            assert node.put(keys, durable=True, wait_s=5.0).durable
        yield node
        for disk in disks:
            disk.fault = None


def first(node: Node) -> Device:
    assert node.file is not None
    return node.file.devices[0]


def on_first(node: Node) -> list[int]:
    """Return the chains of which the first device holds the full-attention part."""
    return [
        number
        for number, keys in enumerate(CHAINS)
        for key in keys[:1]
        if (block := node.planner.index.by_key(key)) is not None
        and (record := block.record(FULL)) is not None
        and (frame := record.frame) is not None
        and frame.extent.mount.device is first(node)
    ]


def until(node: Node, condition: Callable[[], bool]) -> None:
    async def wait() -> None:
        while not condition():  # noqa: ASYNC110 - tasks of the tier change it, and tell nobody here
            await asyncio.sleep(0.005)

    node.run(wait())


def hit(node: Node, keys: list[BlockKey]) -> int:
    """Ask on the event loop, as the server does: a match may free frames that a delete killed."""

    async def match() -> int:
        return node.store.gets.match(SPEC.id, keys).hit_blocks

    return node.run(match())


def test_blocks_of_a_disk_that_cannot_be_read_are_gone_with_a_reason_until_it_can(
    node: Node, disks: tuple[FaultyDisk, FaultyDisk]
) -> None:
    held = on_first(node)
    assert 0 < len(held) < len(CHAINS)
    victim = next(number for number in held if not _is_resident(node, number))
    disks[0].fault = lambda call: failing(call, errno.EIO)(call)
    node.acquire(CHAINS[victim])
    until(node, lambda: not on_first(node))
    gone = [number for number in range(len(CHAINS)) if hit(node, CHAINS[number]) < 16]
    assert victim in gone
    explained = node.store.report.explain(SPEC.id, CHAINS[victim])
    assert explained.ranges[0].reason is Reason.DEVICE_OUT
    more = chain(99, 16)
    assert node.put(more, durable=True, wait_s=5.0).durable
    state = node.store.report.stats()["file"]
    assert [each["state"] for each in state["devices"]] == ["failed", "ok"]
    assert state["state"] == "ok"
    disks[0].fault = None
    until(node, lambda: first(node).state is DeviceState.OK)
    for number in set(gone) - {victim}:  # what could not be read is not trusted again
        assert node.get(CHAINS[number]) == 16


def _is_resident(node: Node, number: int) -> bool:
    return node.store.gets.match(SPEC.id, CHAINS[number]).resident_blocks > 0


def test_slots_stay_taken_under_a_write_that_hangs_while_the_put_becomes_durable_elsewhere(
    node: Node, disks: tuple[FaultyDisk, FaultyDisk]
) -> None:
    go_on = threading.Event()

    def hang(call: str) -> None:
        if call == "pwritev":
            go_on.wait(30)

    disks[0].fault = hang
    more = [chain(name, 8) for name in range(50, 54)]
    try:
        for keys in more:
            assert node.put(keys, durable=True, wait_s=5.0).durable
        assert first(node).state is DeviceState.HUNG
        pinned = [h for h in _slots(node) if h.pins]
        assert pinned, "the thread may still read them"
        for keys in CHAINS[:6]:  # evict all that may be evicted
            grant = node.acquire(keys, wait_s=1.0)
            node.store.release(DAEMON_SESSION, [grant.lease_id])
        assert all(held.pins for held in pinned)
    finally:
        go_on.set()
    disks[0].fault = None
    until(node, lambda: first(node).state is DeviceState.OK)
    until(node, lambda: not any(held.pins for held in pinned))
    for keys in more:
        assert node.get(keys) == 8


def _slots(node: Node) -> list[HeldSlot]:
    return [
        record.resident
        for block in node.planner.index
        for record in block.records
        if record.resident is not None
    ]


def test_a_read_that_hangs_ends_and_others_go_on(
    node: Node, disks: tuple[FaultyDisk, FaultyDisk]
) -> None:
    go_on = threading.Event()

    def hang(call: str) -> None:
        if call == "preadv":
            go_on.wait(30)

    cold = [number for number in on_first(node) if not _is_resident(node, number)]
    disks[0].fault = hang
    try:
        assert node.acquire(CHAINS[cold[0]], wait_s=5.0).hit_blocks < 16
        until(node, lambda: first(node).state is DeviceState.HUNG and not on_first(node))
        assert node.write_behind.reads.under_way == 0
        assert node.put(chain(99, 16), durable=True, wait_s=5.0).durable
    finally:
        go_on.set()
    disks[0].fault = None
    until(node, lambda: first(node).state is DeviceState.OK)
    for number in cold:
        assert node.get(CHAINS[number]) == 16


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_what_one_disk_does_not_take_is_durable_on_the_other(
    node: Node, disks: tuple[FaultyDisk, FaultyDisk], code: int
) -> None:
    disks[0].fault = failing("pwritev", code)
    for name in range(50, 56):
        assert node.put(chain(name, 16), durable=True, wait_s=5.0).durable
    assert node.store.report.stats()["file"]["state"] == "ok"
    assert first(node).state not in (DeviceState.OK, DeviceState.FAILED)
    for number in on_first(node):
        assert node.get(CHAINS[number]) == 16


def test_deletes_hold_on_a_disk_that_was_out_meanwhile(
    node: Node, disks: tuple[FaultyDisk, FaultyDisk]
) -> None:
    cold = [number for number in on_first(node) if not _is_resident(node, number)]
    disks[0].fault = lambda call: failing(call, errno.EIO)(call)
    node.acquire(CHAINS[cold[0]])
    until(node, lambda: first(node).mount is None)
    for number in cold:
        with pytest.raises(DiskFailed, match="out of use"):
            node.run(node.store.deletes.delete(SPEC.id, CHAINS[number]))
    disks[0].fault = None
    until(node, lambda: first(node).state is DeviceState.OK)
    assert all(hit(node, CHAINS[number]) == 0 for number in cold)
    node.run(node.store.deletes.delete(SPEC.id, CHAINS[cold[0]]))  # once more, for an answer


def test_when_others_fill_the_disk_blocks_leave_it_but_not_what_is_leased(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with Node(tmp_path / "kv", disk=disk, free_bytes_min=16 << 20) as node:
        assert node.file is not None
        for keys in CHAINS:
            assert node.put(keys, durable=True).durable
        grant = node.acquire(CHAINS[0])
        used = node.file.frames.physical_nbytes
        disk.free = 15 << 20

        def evicted() -> bool:
            node.write_behind.wake()
            return node.planner.counts.evicted_file > 0 and node.file.frames.physical_nbytes < used

        until(node, evicted)
        for slot, key in zip(grant.slots, CHAINS[0], strict=False):
            assert slot is not None
            assert node.store.view(slot) == record_bytes(key, FULL)
        disk.free = None
        node.store.release(DAEMON_SESSION, [grant.lease_id])


def test_a_disk_that_hangs_under_a_note_keeps_nobody_from_the_other_disk(
    tmp_path: Path, disks: tuple[FaultyDisk, FaultyDisk], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The note's own deadline is over long before the disk counts as hung."""
    monkeypatch.setattr(policy_notes, "CLOSE_S", 0.05)
    go_on = threading.Event()
    paths = [tmp_path / "a", tmp_path / "b"]
    with Node(paths, disks=disks, hang_s=1.0, policy="hz") as node:
        node.put(CHAINS[0], durable=True, wait_s=5.0)
        node.get(CHAINS[0])
        disks[0].fault = lambda call: go_on.wait(30) and None
        notes = asyncio.ensure_future(node.write_behind._policies.save(), loop=node.loop)
        until(node, notes.done)
        assert node.file is not None
        with pytest.raises(DiskFailed, match="still being written"):
            node.run(node.file.notes.write(b"beside it"))
        until(node, lambda: first(node).state is DeviceState.HUNG)
        assert node.put(CHAINS[1], durable=True, wait_s=5.0).durable
        node.run(node.file.notes.write(b"on the other disk"))
        assert node.run(node.file.notes.read()) == b"on the other disk"
        go_on.set()
        disks[0].fault = None
