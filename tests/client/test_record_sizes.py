"""Records with sizes of their own through put and get_into; and which blocks of many are stored."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from kvstore import Client, Group, InvalidRequest, Namespace, Part, Prefix, Span
from kvstore.client.file_reads import FileRead, FileReads
from kvstore.model.block import FilePlace
from kvstore.model.errors import Incompatible
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import sample_keys, sample_namespace, sample_records
from kvstore.transport.messages import present_of, present_to_message

MOST = 3 * 4096
SPACE = Namespace(16, (Group("page", MOST, varies=True),), (("model", "own sizes"),))
SIZES = [1, 4096, MOST, 5000, 8192]


def test_records_of_any_size_come_back_into_targets_of_that_size(daemon: Daemon) -> None:
    keys = sample_keys("sizes", len(SIZES))
    records = [sample_records([key], size)[0] for key, size in zip(keys, SIZES, strict=True)]
    with Client(daemon.target) as client:
        client.register(SPACE)
        assert client.put(SPACE.id, keys, records, durable=True).committed == len(SIZES)
        targets = [bytearray(size) for size in SIZES]
        assert client.get_into(SPACE.id, keys, targets) == [True] * len(SIZES)
        assert [bytes(target) for target in targets] == records
        other = [bytearray(size) for size in (2, 4096, MOST - 1, 5000, 4096)]
        expected = [False, True, False, True, False]
        assert client.get_into(SPACE.id, keys, other) == expected
        client.hints.demote(Prefix(SPACE.id, keys))
        assert client.get_into(SPACE.id, keys, other, from_files=True) == expected


def test_what_sizes_cannot_be_is_refused(daemon: Daemon) -> None:
    keys = sample_keys("impossible", 2)
    with Client(daemon.target) as client:
        client.register(SPACE)
        for sizes in ((1, MOST + 1), (0, 1), (1,)):
            with pytest.raises(InvalidRequest):
                client.put(SPACE.id, keys, [bytes(size) for size in sizes])
        with pytest.raises(InvalidRequest, match="sizes of their own"):
            client.get(SPACE.id, keys)


def test_over_a_stream_they_are_refused_with_the_way_out(daemon: Daemon) -> None:
    with Client(daemon.target, arena=False) as client:
        client.register(SPACE)
        with pytest.raises(InvalidRequest, match="connect to its unix socket"):
            client.put(SPACE.id, sample_keys("stream", 1), [b"x"])


def test_each_block_is_told_whatever_is_missing_before_it(client: Client) -> None:
    space = sample_namespace("each")
    client.register(space)
    keys = sample_keys(f"each {client.local}", 19)
    stored = [at % 3 == 1 or at > 15 for at in range(19)]
    put = [key for key, there in zip(keys, stored, strict=True) if there]
    client.put(space.id, put, sample_records(put))
    match = client.match(space.id, keys, each=True)
    assert (match.hit_blocks, list(match.present)) == (0, stored)
    assert client.match(space.id, keys).present == ()
    assert client.match(space.id, [], each=True).present == ()


def test_each_record_is_told_of_the_parts_that_are_named(client: Client) -> None:
    groups = Group("full", 4096), Group("window", 4096, window_tokens=20, shards=2)
    space = Namespace(16, groups, (("model", "parts"),))
    client.register(space)
    keys = sample_keys(f"parts {client.local}", 4)
    for part, at in ((Part(0, 0), (0, 1)), (Part(1, 1), (1, 2))):
        for each in at:
            record = sample_records([keys[each]], 4096)
            client.put(space.id, [keys[each]], record, group=part.group, shard=part.shard)
    spans = [Span(Part(0, 0), 0, 4), Span(Part(1, 0), 0, 4), Span(Part(1, 1), 1, 4)]
    match = client.match(space.id, keys, each=True, spans=spans)
    expected = [True, True, False, False, *[False] * 4, True, True, False]
    assert list(match.present) == expected
    assert list(client.match(space.id, keys, each=True).present) == [True, True, False, False]
    with pytest.raises(InvalidRequest, match="span"):
        client.match(space.id, keys, each=True, spans=[Span(Part(0, 0), 0, 5)])


@pytest.mark.parametrize("count", [0, 1, 8, 9, 1000])
def test_bits_of_keys_are_read_back(count: int) -> None:
    present = tuple(at % 5 in (0, 3) for at in range(count))
    assert present_of(present_to_message(present), count) == present
    with pytest.raises(Incompatible, match="whether they are stored"):
        present_of(present_to_message(present) + b"\0", count)


def test_a_target_is_the_callers_again_when_the_last_read_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read that was given up may still write to its target: `settled` waits for that."""
    gate, begun = threading.Event(), threading.Event()

    def read(file: object, wanted: FileRead, deadline: float) -> bool:
        begun.set()
        return gate.wait(20)

    monkeypatch.setattr("kvstore.client.file_reads._read", read)
    monkeypatch.setattr("kvstore.client.file_reads.HANG_S", 0.05)

    async def run() -> None:
        reads = FileReads()
        await reads.settled()
        wanted = FileRead(FilePlace(str(tmp_path / "x"), 0, 1), None, memoryview(bytearray(1)))
        job = asyncio.create_task(reads.read([wanted], 1e12))
        await asyncio.to_thread(begun.wait)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        settling = asyncio.create_task(reads.settled())
        assert not (await asyncio.wait([settling], timeout=0.05))[0]
        gate.set()
        await settling
        reads.close()

    asyncio.run(run())
