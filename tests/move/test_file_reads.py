"""Records that have rotted in a file: a miss, counted, and never other bytes than were put."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from kvstore.decide.planner import DAEMON_SESSION
from kvstore.format.codec import codec_by_id
from kvstore.model.block import Span
from kvstore.move.file_reads import Reads
from tests.store.node import FULL, RECORD, SPEC, Node, chain, record_bytes
from tests.tier.file.frames import flip

A = chain(1, 4)
FIRST = (Span(FULL, 0, 1),)
LITERAL = 17  # an offset in a coded record: what the codec copies as it is


@contextmanager
def stored(path: Path, codec: str = "raw") -> Iterator[Node]:
    """A node that has A in files alone."""
    with Node(path, codec=codec) as before:
        before.put(A, durable=True)
    with Node(path, codec=codec) as node:
        node.recall()
        yield node


class Place(NamedTuple):
    """Where a record lies in a file, and how it is coded."""

    path: Path
    offset: int
    nbytes: int
    codec_id: int


def place_of(node: Node, at: int) -> Place:
    """Return where the FULL record of a block lies, which nobody has read yet."""
    (record,) = node.planner.find(SPEC.id, A, (Span(FULL, at, at + 1),))
    assert record is not None
    assert record.frame is not None
    assert record.resident is None
    raw, position = node.write_behind.reads.raw_file(record.frame), record.position
    assert raw is not None
    nbytes = record.frame.stored_nbytes[position]
    return Place(Path(raw.path), raw.offsets[position], nbytes, record.frame.codec_id)


def corrupt(node: Node) -> float:
    """How many blocks were found wrong as they were read."""
    return node.metrics.totals().get("corrupt_blocks", {}).get("promote", 0)


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_a_coded_record_that_has_rotted_is_a_miss(tmp_path: Path, codec: str) -> None:
    with stored(tmp_path / "kv", codec) as node:
        place = place_of(node, 1)
        flip(place.path, place.offset + LITERAL)
        assert decoded(place) != record_bytes(A[1], FULL), "only its checksum says that"
        assert node.get(A) == 1
        assert corrupt(node) == 1
        assert node.get(A) == 1, "nobody was given it later, either"


def decoded(place: Place) -> bytes:
    """Return what is in a file, decoded. Raises CorruptBlock."""
    data, target = place.path.read_bytes()[place.offset :][: place.nbytes], bytearray(RECORD)
    assert place.codec_id
    codec_by_id(place.codec_id).decode(memoryview(data), memoryview(target))
    return bytes(target)


@pytest.mark.parametrize("at", [0, RECORD - 1])
def test_a_record_read_alone_that_has_rotted_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    alone = count_of_reads_alone(monkeypatch)
    with stored(tmp_path / "kv") as node:
        place = place_of(node, 0)
        flip(place.path, place.offset + at)
        grant = node.acquire(A[:1], spans=FIRST)
        assert grant.slots == (None,)
        assert corrupt(node) == len(alone) == 1


def test_a_record_read_alone_is_what_was_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = count_of_reads_alone(monkeypatch)
    with stored(tmp_path / "kv") as node:
        grant = node.acquire(A[:1], spans=FIRST)
        (slot,) = grant.slots
        assert slot is not None
        assert node.store.view(slot) == record_bytes(A[0], FULL)
        assert len(alone) == 1
        assert not corrupt(node)
        node.store.release(DAEMON_SESSION, [grant.lease_id])


def count_of_reads_alone(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Return a list that has an item for each record that was read alone."""
    fetch, counted = Reads._fetch_parts, []

    def fetch_parts(*args):
        counted.append(None)
        return fetch(*args)

    monkeypatch.setattr(Reads, "_fetch_parts", fetch_parts)
    return counted
