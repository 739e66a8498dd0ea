"""Pieces of files, read ahead of what is sent."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from random import Random

import pytest

from kvstore.model.block import PAGE_NBYTES, FilePlace, padded
from kvstore.peer.read_ahead import AHEAD, read_ahead
from kvstore.testing.wait import until

PIECE_NBYTES = 16 * PAGE_NBYTES


@pytest.fixture
def readers() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


def made(path: Path, sizes: list[int]) -> tuple[list[FilePlace], list[bytes]]:
    """Write records of these sizes to a file, each from a page on; return places and records."""
    draw = Random(sum(sizes))
    records = [draw.randbytes(size) for size in sizes]
    places, offset = [], 0
    with path.open("wb") as file:
        for record in records:
            places.append(FilePlace(str(path), offset, len(record)))
            file.write(record.ljust(padded(len(record)), b"\0"))
            offset += padded(len(record))
    return places, records


def test_records_come_whole_and_in_order(tmp_path, readers):
    sizes = [1, PAGE_NBYTES, PIECE_NBYTES, PIECE_NBYTES + 1, 3 * PIECE_NBYTES - 7, 5]
    places, records = made(tmp_path / "a", sizes)
    others, more = made(tmp_path / "b", [2 * PIECE_NBYTES, 100])
    places, records = [*places, *others, places[0]], [*records, *more, records[0]]
    with closing(read_ahead(places, PIECE_NBYTES, readers)) as pieces:
        for record in records:
            count = -(-len(record) // PIECE_NBYTES)
            assert b"".join(bytes(next(pieces)) for _ in range(count)) == record
        assert next(pieces, None) is None


def test_nothing_is_read_for_no_places(readers):
    assert list(read_ahead([], PIECE_NBYTES, readers)) == []


def test_a_file_that_ends_early_is_told(tmp_path, readers):
    places, _ = made(tmp_path / "a", [PIECE_NBYTES, PIECE_NBYTES])
    os.truncate(tmp_path / "a", PIECE_NBYTES + PAGE_NBYTES)
    with closing(read_ahead(places, PIECE_NBYTES, readers)) as pieces:
        next(pieces)
        with pytest.raises(OSError, match="ends early"):
            next(pieces)


def test_it_reads_ahead_and_waits_for_its_readers_at_the_end(tmp_path, readers, monkeypatch):
    places, _ = made(tmp_path / "a", [PIECE_NBYTES] * 8)
    begun, gate, real = [], threading.Event(), os.preadv

    def slow(fd, buffers, offset):
        begun.append(offset)
        if offset:
            gate.wait(10)
        return real(fd, buffers, offset)

    monkeypatch.setattr("kvstore.peer.read_ahead.os.preadv", slow)
    pieces = read_ahead(places, PIECE_NBYTES, readers)
    next(pieces)
    until(lambda: len(begun) == 1 + AHEAD, 5)
    deadline = threading.Timer(0.2, gate.set)
    deadline.start()
    pieces.close()
    assert gate.is_set(), "it has waited"
    deadline.join()
