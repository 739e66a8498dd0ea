"""What an earlier record left in a slot's last page reaches no disk and no bucket."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from kvstore.model.block import padded
from tests.store.node import FULL, RECORD, Node, chain

A = chain(1)
CANARY = b"somebody else's kv"
assert padded(RECORD) - RECORD > 2 * len(CANARY)


def fill_with_canary(node: Node) -> None:
    """Leave the canary in every byte of the arena that a slot can have."""
    slots = []
    while (slot := node.arena.allocate(padded(RECORD))) is not None:
        view = node.arena.padded_view(slot)
        view[:] = (CANARY * (len(view) // len(CANARY) + 1))[: len(view)]
        view.release()
        slots.append(slot)
    assert len(slots) > len(A)
    for slot in slots:
        node.arena.free(slot)


def holding_canary(directory: Path) -> list[str]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) > len(A) * padded(RECORD) // 2
    return [path.name for path in files if CANARY in path.read_bytes()]


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_segments_and_objects_hold_nothing_of_earlier_records(tmp_path: Path, codec: str) -> None:
    (tmp_path / "bucket").mkdir()
    with Node(tmp_path / "kv", bucket=tmp_path / "bucket", codec=codec) as node:
        fill_with_canary(node)
        node.put(A, parts=[FULL], durable=True)
        node.run(node.store._objects._upload.upload(math.inf))  # type: ignore[union-attr]
        assert node.get(A[:1]) == 0, "the other group is not there"
    if codec == "raw":
        assert holding_canary(tmp_path / "kv") == []
        assert holding_canary(tmp_path / "bucket") == []
    else:
        files = [p for p in tmp_path.rglob("*") if p.is_file()]
        assert not [p for p in files if CANARY in p.read_bytes()]


def test_a_record_that_came_up_from_disk_is_uploaded_without_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    with Node(tmp_path / "kv") as node:
        node.put(A, durable=True)
    with Node(tmp_path / "kv", bucket=tmp_path / "bucket") as node:
        fill_with_canary(node)
        assert node.get(A) == len(A)
        node.put(chain(2), durable=True)
    assert holding_canary(tmp_path / "kv") == []
    assert holding_canary(tmp_path / "bucket") == []
