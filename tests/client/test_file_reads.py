"""Records that only the file tier has, read by the client itself, straight into its memory."""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import AsyncClient, Client, Prefix, Unavailable
from kvstore.client.file_reads import FileRead, FileReads
from kvstore.model.block import BlockKey, FilePlace
from kvstore.model.checksum import LEAF_NBYTES, checksum
from kvstore.testing.daemon import Daemon, restarted_with
from kvstore.testing.samples import sample_keys, sample_namespace, sample_records
from kvstore.testing.wait import until

NBYTES = 5 * LEAF_NBYTES // 2
KEYS = sample_keys("file reads", 24)
RECORDS = sample_records(KEYS, NBYTES)
SPACE = sample_namespace("file reads", NBYTES)


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with restarted_with(SPACE, KEYS, RECORDS) as daemon:
        yield daemon


class Targets:
    """Zeros of whole pages: one row a key."""

    def __init__(self, keys: Sequence[BlockKey] = KEYS) -> None:
        self.rows = np.frombuffer(mmap.mmap(-1, len(keys) * NBYTES), np.uint8).reshape(-1, NBYTES)
        self.keys = keys

    def get(self, client: Client, **options: Any) -> list[bool]:
        client.register(SPACE)
        return client.get_into(SPACE.id, self.keys, list(self.rows), from_files=True, **options)

    def are(self, records: Sequence[bytes]) -> bool:
        return self.rows.tobytes() == b"".join(records)


def in_arena(client: Client) -> int:
    return int(client.admin.stats()["dram"]["blocks"])


def test_what_files_hold_does_not_come_up(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.client.file_reads.READ_NBYTES", LEAF_NBYTES)
    targets = Targets()
    with Client(daemon.target) as client:
        assert targets.get(client) == [True] * len(KEYS)
        assert targets.are(RECORDS)
        assert in_arena(client) == 0
        assert client.admin.stats()["file"]["leased_bytes"] == 0
        targets.rows[:] = 0
        assert targets.get(client, verify=False) == [True] * len(KEYS)
        assert targets.are(RECORDS)
        assert in_arena(client) == 0


def test_arena_files_and_nothing_go_together(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.client.in_place.PIECE_NBYTES", 3 * NBYTES)
    keys = sample_keys("both", 41)
    records = sample_records(keys, NBYTES)
    targets = Targets(keys)
    with Client(daemon.target) as client:
        client.register(SPACE)
        client.put(SPACE.id, keys[:30], records[:30], durable=True)
        assert client.hints.demote(Prefix(SPACE.id, keys[:30])).done_blocks == 30
        client.put(SPACE.id, keys[30:38], records[30:38], parent=keys[29], first_block=30)
        assert targets.get(client) == [True] * 38 + [False] * 3
        assert targets.are([*records[:38], *[bytes(NBYTES)] * 3])
        assert in_arena(client) == 8


def test_memory_that_is_no_whole_pages_is_filled_by_the_arena(daemon: Daemon) -> None:
    memory = memoryview(mmap.mmap(-1, len(KEYS) * (NBYTES + 1)))
    rows = [memory[at * (NBYTES + 1) + 1 :][:NBYTES] for at in range(len(KEYS))]
    with Client(daemon.target) as client:
        client.register(SPACE)
        assert client.get_into(SPACE.id, KEYS, rows, from_files=True) == [True] * len(KEYS)
        assert [bytes(row) for row in rows] == RECORDS
        assert in_arena(client) == len(KEYS)


def test_who_is_not_to_wait_gets_what_is_up(daemon: Daemon) -> None:
    with Client(daemon.target) as client:
        assert not any(Targets().get(client, wait_s=0.0))


def test_files_that_cannot_be_opened_are_no_loss(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container that does not see them: all comes up, and files are not tried again."""
    tried = _redirect(monkeypatch, Path("/there/is/none"))
    targets = Targets()
    with Client(daemon.target) as client:
        assert targets.get(client) == [True] * len(KEYS)
        assert targets.are(RECORDS)
        assert in_arena(client) == len(KEYS)
        assert tried
        tried.clear()
        assert client.hints.demote(Prefix(SPACE.id, KEYS)).done_blocks == len(KEYS)
        assert targets.get(client) == [True] * len(KEYS)
        assert in_arena(client) == len(KEYS)
    assert not tried


def test_other_files_under_the_same_path_accuse_nobody(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.write_bytes(bytes(64 << 20))
    _redirect(monkeypatch, other)
    targets = Targets()
    with Client(daemon.target) as client:
        assert targets.get(client) == [True] * len(KEYS)
        assert targets.are(RECORDS)
        assert client.corrupt_blocks == 0
        assert client.match(SPACE.id, KEYS).hit_blocks == len(KEYS)


def test_what_rotted_on_disk_is_found_by_both(daemon: Daemon) -> None:
    with Client(daemon.target) as client:
        client.register(SPACE)
        grant = client.acquire(SPACE.id, KEYS, file_places=True)
        place = grant.places[5]
        assert place is not None
        client.release(grant.lease_id)
        with Path(place.path).open("r+b") as file:
            file.seek(place.offset + 4321)
            byte = file.read(1)
            file.seek(place.offset + 4321)
            file.write(bytes([byte[0] ^ 1]))
        targets = Targets()
        assert targets.get(client) == [index != 5 for index in range(len(KEYS))]
        rest = [*range(5), *range(6, len(KEYS))]
        assert targets.rows[rest].tobytes() == b"".join(RECORDS[index] for index in rest)
        assert client.match(SPACE.id, KEYS).hit_blocks == 5


def test_places_are_read_only_while_there_is_time(tmp_path: Path) -> None:
    reads = _reads_of(tmp_path)

    async def late() -> list[bool]:
        files = FileReads()
        try:
            good = await files.read(reads, time.monotonic())
            assert files.usable
            return good
        finally:
            files.close()

    assert asyncio.run(late()) == [False] * len(reads)
    assert not any(any(read.target) for read in reads)


def test_a_file_that_ends_early_a_pipe_and_a_folder_are_refused(tmp_path: Path) -> None:
    first = _reads_of(tmp_path)[0]
    os.mkfifo(tmp_path / "pipe")

    async def read(path: Path, offset: int) -> list[bool]:
        files = FileReads()
        wanted = first._replace(place=FilePlace(str(path), offset, NBYTES))
        try:
            good = await files.read([wanted], time.monotonic() + 10)
            assert good == [files.usable]
            return good
        finally:
            files.close()

    assert asyncio.run(read(Path(first.place.path), 0)) == [True]
    assert asyncio.run(read(Path(first.place.path), 20 * NBYTES)) == [False]
    assert asyncio.run(read(tmp_path / "pipe", 0)) == [False]
    assert asyncio.run(read(tmp_path, 0)) == [False]


def test_a_disk_that_hangs_is_told_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, gate = _reads_of(tmp_path), threading.Event()
    _hang(monkeypatch, gate)

    async def hung() -> None:
        files = FileReads()
        with pytest.raises(Unavailable, match="1 reads of files hang"):
            await files.read(reads[:1], time.monotonic() + 0.05)
        assert not files.usable
        gate.set()
        await asyncio.to_thread(until, lambda: files.usable)
        assert await files.read(reads, time.monotonic() + 10) == [True] * len(reads)
        files.close()

    asyncio.run(hung())


def test_a_disk_that_hangs_when_a_file_is_opened_holds_no_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, gate = _reads_of(tmp_path), threading.Event()
    monkeypatch.setattr("kvstore.client.file_reads.HANG_S", 0.2)
    opened: Callable[[str, int], int] = os.open

    def held(path: str, flags: int) -> int:
        gate.wait(30)
        return opened(path, flags)

    monkeypatch.setattr("kvstore.client.file_reads.os.open", held)

    async def hung() -> None:
        files = FileReads()
        try:
            with pytest.raises(Unavailable, match="hang"):
                await files.read(reads[:2], time.monotonic() + 0.05)
        finally:
            gate.set()
            files.close()

    asyncio.run(asyncio.wait_for(hung(), 10))


def test_who_is_cancelled_has_its_memory_back_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, gate = _reads_of(tmp_path), threading.Event()
    begun = _hang(monkeypatch, gate, hang_s=30.0)

    async def cancelled() -> None:
        files = FileReads()
        task = asyncio.create_task(files.read(reads[:1], time.monotonic() + 10))
        assert await asyncio.to_thread(begun.wait, 10)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0.02)
            assert not task.done()
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert files.usable
        files.close()

    asyncio.run(cancelled())
    assert checksum(reads[0].target) == reads[0].checksum


def test_a_get_over_a_hanging_disk_ends_and_holds_nothing(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    _hang(monkeypatch, gate)
    targets = Targets()
    with Client(daemon.target) as client:
        try:
            with pytest.raises(Unavailable, match="hang"):
                targets.get(client, wait_s=0.1)
            until(lambda: client.admin.stats()["file"]["leased_bytes"] == 0)
            assert targets.get(client) == [True] * len(KEYS)  # by the arena
            assert in_arena(client) == len(KEYS)
        finally:
            gate.set()


def test_a_file_system_without_direct_reads_is_read_as_it_can(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def refuse(path: str, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O here")
        return opened(path, flags)

    monkeypatch.setattr("kvstore.client.file_reads.os.open", refuse)
    targets = Targets()
    with Client(daemon.target) as client:
        assert targets.get(client) == [True] * len(KEYS)
        assert targets.are(RECORDS)
        assert in_arena(client) == 0


def test_the_asyncio_client_has_it_too(daemon: Daemon) -> None:
    async def get() -> None:
        client = AsyncClient(daemon.target)
        try:
            await client.register(SPACE)
            rows = Targets().rows
            found = await client.get_into(SPACE.id, KEYS, list(rows), from_files=True)
            assert found == [True] * len(KEYS)
            assert rows.tobytes() == b"".join(RECORDS)
            assert (await client.admin.stats())["dram"]["blocks"] == 0
        finally:
            await client.close()

    asyncio.run(get())


def _reads_of(directory: Path) -> list[FileRead]:
    """Return reads of all records, which lie in one file, and targets for them."""
    path = directory / "records"
    path.write_bytes(b"".join(RECORDS))
    memory = memoryview(mmap.mmap(-1, len(RECORDS) * NBYTES))
    return [
        FileRead(FilePlace(str(path), at, NBYTES), checksum(record), memory[at : at + NBYTES])
        for at, record in zip(range(0, len(memory), NBYTES), RECORDS, strict=True)
    ]


def _redirect(monkeypatch: pytest.MonkeyPatch, to: Path) -> list[str]:
    """Have another file opened in the place of any; returns what was tried."""
    opened: Callable[[Path, int], int] = os.open
    tried: list[str] = []

    def redirected(path: str, flags: int) -> int:
        tried.append(path)
        return opened(to, flags)

    monkeypatch.setattr("kvstore.client.file_reads.os.open", redirected)
    return tried


def _hang(
    monkeypatch: pytest.MonkeyPatch, gate: threading.Event, hang_s: float = 0.2
) -> threading.Event:
    """Hold reads until the gate opens; returns what is set when the first has begun."""
    monkeypatch.setattr("kvstore.client.file_reads.HANG_S", hang_s)
    preadv, begun = os.preadv, threading.Event()

    def held(*arguments: Any) -> int:
        begun.set()
        gate.wait(30)
        return preadv(*arguments)

    monkeypatch.setattr("kvstore.client.file_reads.os.preadv", held)
    return begun
