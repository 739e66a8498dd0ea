"""Fine parts from a bucket come after all bases, and one that is wrong costs nothing but itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstore.decide.planner import DAEMON_SESSION
from kvstore.model.block import BlockKey, Grant, Part, padded
from kvstore.move.fetch import Fetch
from kvstore.move.load_race import Ended, LoadRaces
from kvstore.move.object_source import ObjectListing
from kvstore.move.source import Reading, Window
from tests.store.lossy_node import BASE, BASES, BLOCKS, FINE, FINES, SPEC, LossyNode, chain, record

KEYS = chain(1)
ROTTEN = 9  # a lossy block of the first writer


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    """A bucket that has the bases and fine parts of a prefix."""
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    with LossyNode(tmp_path / "1", bucket=bucket, fine=True) as node:
        node.store_blocks(KEYS, durable=True)
        assert node.flush()
    return bucket


def places(bucket: Path, part: Part, blocks: Sequence[int]) -> list[tuple[Path, int]]:
    """Return where in the bucket some records are: the object, and the place of the first byte."""
    found = []
    for block in blocks:
        data = record("one", KEYS[block], block, part)
        for path in bucket.rglob("*"):
            at = path.read_bytes().find(data) if path.is_file() else -1
            if at >= 0:
                found.append((path, at))
    return found


def lossy(blocks: range) -> list[int]:
    return [at for at in blocks if len(record("one", KEYS[at], at, BASES[0])) == BASE]


def rot(bucket: Path, part: Part) -> int:
    """Change a byte of a record; return how many objects have it."""
    found = places(bucket, part, [ROTTEN])
    assert found
    for path, at in found:
        data = bytearray(path.read_bytes())
        data[at + 2000] ^= 1
        path.write_bytes(data)
    return len(found)


def corrupt(node: LossyNode) -> dict[str, int]:
    return node.metrics.totals().get("corrupt_blocks", {})


def test_a_wrong_fine_part_takes_no_base_with_it(bucket: Path, tmp_path: Path) -> None:
    rot(bucket, FINES[0])
    with LossyNode(tmp_path / "2", bucket=bucket, fine=True) as node:
        hit, fine = node.read(KEYS)
        assert hit == BLOCKS
        assert fine >= len(lossy(range(ROTTEN)))
        assert corrupt(node)["object"] == 1
        assert has_fine(node, [KEYS[1], KEYS[ROTTEN]]) == [True, False]


def test_who_insists_meets_a_wrong_fine_part_once_an_object(bucket: Path, tmp_path: Path) -> None:
    """Afterwards the prefix ends there, and nothing is read in vain."""
    objects = rot(bucket, FINES[0])
    with LossyNode(tmp_path / "2", bucket=bucket) as node:
        for _ in range(objects):
            node.read(KEYS, refined=True)
        for _ in range(3):
            hit, fine = node.read(KEYS, refined=True)
            assert hit == ROTTEN
            assert fine
            assert corrupt(node)["object"] == objects
        assert node.read(KEYS)[0] == BLOCKS


def test_a_second_wrong_fine_part_takes_no_base_with_it(
    bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fill meets one that fits no base, and the next one another."""
    filled, left = Fetch._fill, [ROTTEN, ROTTEN - 1]

    async def fill(
        fetch: Fetch, window: Window, reading: Reading, grant: Grant, useless: list[Any]
    ) -> list[int] | None:
        sums = await filled(fetch, window, reading, grant, useless)
        if left and any(span.part in FINES for span in window.spans):
            useless.append((FINES[0], KEYS[left.pop(0)]))
            return None
        return sums

    monkeypatch.setattr(Fetch, "_fill", fill)
    with LossyNode(tmp_path / "2", bucket=bucket) as node:
        node.read(KEYS, refined=True)
        assert not left
        assert has_base(node, KEYS) == [True] * BLOCKS


def has_base(node: LossyNode, keys: Sequence[BlockKey]) -> list[bool]:
    blocks = [node.planner.index.by_key(key) for key in keys]
    return [block is not None and block.record(BASES[0]) is not None for block in blocks]


def test_what_is_deleted_before_its_fine_parts_come_does_not_come_back(
    bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bucket's host has not deleted the object, though it was told to."""
    waited, dead = LoadRaces.wait, KEYS[3]
    objects = {path: path.read_bytes() for path in bucket.rglob("*") if path.is_file()}
    with LossyNode(tmp_path / "2", bucket=bucket, fine=True) as node:

        async def wait(races: LoadRaces, *args: Any, **more: Any) -> Ended:
            ended = await waited(races, *args, **more)
            await node.store.deletes.delete(SPEC.id, [dead])
            for path, data in objects.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
            return ended

        monkeypatch.setattr(LoadRaces, "wait", wait)
        node.read(KEYS)
        assert has_base(node, [KEYS[2], dead]) == [True, False]


def test_no_fine_parts_come_of_a_prefix_that_did_not_come_whole(
    bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rot(bucket, BASES[0])
    opened, windows = ObjectListing.open, list[Window]()

    async def noted(listing: ObjectListing, window: Window) -> Reading | None:
        windows.append(window)
        return await opened(listing, window)

    monkeypatch.setattr(ObjectListing, "open", noted)
    with LossyNode(tmp_path / "2", bucket=bucket, fine=True) as node:
        node.read(KEYS)
    assert windows
    assert not any(span.part in FINES for window in windows for span in window.spans)


class HeldBack:
    """A bucket that does not answer where a request reads any of `held`."""

    def __init__(self, node: LossyNode, held: Sequence[tuple[Path, int]], bucket: Path) -> None:
        self._node = node
        self._bucket = node.gate._bucket
        self._held = [(str(path.relative_to(bucket)), at) for path, at in held]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bucket, name)

    async def get(self, name: str, start: int, buffers: Sequence[memoryview], filled: Any) -> None:
        end = start + sum(map(len, buffers))
        if any(name == other and start <= at < end for other, at in self._held):
            await self._node.gate.opened.wait()
        await self._bucket.get(name, start, buffers, filled)


def test_a_short_deadline_gets_all_of_the_prefix_as_bases(bucket: Path, tmp_path: Path) -> None:
    held = [at for part in FINES for at in places(bucket, part, lossy(range(BLOCKS)))]
    assert held
    with LossyNode(tmp_path / "2", bucket=bucket, fine=True) as node:
        node.read(KEYS[:1])  # the footers are known
        node.gate._bucket = HeldBack(node, held, bucket)
        assert node.read(KEYS, wait_s=1.0) == (BLOCKS, 0)
        assert node.metrics.totals()["hit_blocks"]["object"] >= BLOCKS - 1
        node.gate.opened.set()
        first = node.planner.index.by_key(KEYS[1])
        assert first is not None
        node.until(lambda: first.record(FINES[0]) is not None)  # they go on by themselves
        assert node.read(KEYS)[1]


def test_fine_parts_are_added_to_their_own_bases_alone(bucket: Path, tmp_path: Path) -> None:
    """Of a block whose base another writer has stored here, the bucket's fine part is none."""
    with LossyNode(tmp_path / "2", bucket=bucket, fine=True) as node:
        node.store_blocks(KEYS, 0, 5, writer="one", fine=False)
        node.store_blocks(KEYS, 5, 8, writer="two", fine=False)
        hit, _ = node.read(KEYS)
        assert hit == BLOCKS
        assert has_fine(node, KEYS[1:5]) == [True] * 4
        assert has_fine(node, KEYS[5:8]) == [False] * 3
        assert has_fine(node, [KEYS[9]]) == [True]
        assert corrupt(node) == {}


def has_fine(node: LossyNode, keys: Sequence[BlockKey]) -> list[bool]:
    blocks = [node.planner.index.by_key(key) for key in keys]
    return [block is not None and block.record(FINES[0]) is not None for block in blocks]


def test_a_fine_part_whose_base_is_replaced_meanwhile_is_left_out() -> None:
    """It was reserved for one base; when it is committed another one is there."""
    with LossyNode(None) as node:
        node.store_blocks(KEYS, 0, 5, fine=False)
        other, _ = node.reserve(KEYS, 1, 5, writer="two", adds=True)
        assert not any(other.slots)
        grant, sums = node.reserve(KEYS, 1, 5, adds=True)
        assert [slot is not None for slot in grant.slots] == [False] * 8 + [True] * 8
        node.store_blocks(KEYS, 1, 3, writer="two", refined=True)
        node.run(node.store.puts.commit(DAEMON_SESSION, grant.lease_id, sums))
        assert has_fine(node, KEYS[1:5]) == [True] * 4
        hit, fine = node.read(KEYS[:5], refined=True)  # which looks whose planes they are
        assert (hit, fine) == (5, 4 + 2)  # of the window group the last two blocks


def test_what_was_lost_meanwhile_takes_no_fine_part() -> None:
    with LossyNode(None) as node:
        node.store_blocks(KEYS, 0, 5, fine=False)
        grant, sums = node.reserve(KEYS, 1, 5, adds=True)
        node.run(node.store.deletes.delete(SPEC.id, KEYS[2:3]))
        node.run(node.store.puts.commit(DAEMON_SESSION, grant.lease_id, sums))
        assert has_fine(node, KEYS[1:5]) == [True, False, True, True]
        assert node.store.report.stats()["dram"]["fine_bytes"] == 3 * 2 * padded(FINE)


@pytest.mark.parametrize("refined", [False, True])
def test_how_much_is_fetched_is_counted_in_the_bytes_of_what_is_brought(
    bucket: Path, tmp_path: Path, refined: bool
) -> None:
    """Not in those of exact records, and with fine parts only for who insists on them."""
    block_nbytes = len(BASES) * padded(BASE) + refined * len(FINES) * padded(FINE)
    with LossyNode(tmp_path / "2", bucket=bucket) as node:
        node.store._node.fetch.nbytes_max = 10 * block_nbytes
        assert node.read(KEYS, refined=refined)[0] == 10


def test_a_load_is_raced_by_the_bytes_of_its_bases(
    bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows: list[Window] = []
    opened = ObjectListing.open

    async def noted(listing: ObjectListing, window: Window) -> Reading | None:
        windows.append(window)
        return await opened(listing, window)

    monkeypatch.setattr(ObjectListing, "open", noted)
    with LossyNode(tmp_path / "2", bucket=bucket, fine=True) as node:
        node.read(KEYS)
    fine = [any(span.part in FINES for span in window.spans) for window in windows]
    assert fine == [False, True]
    assert windows[0].nbytes == (BLOCKS + 2) * BASE  # of the window group the last two blocks
    assert windows[1].nbytes == windows[1].nbytes // FINE * FINE
