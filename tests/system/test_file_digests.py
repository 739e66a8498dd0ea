"""Digests of files change with every byte, and cost a look at the file when it is known."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from pathlib import Path

import pytest

from kvstore.model.errors import Incompatible
from kvstore.system import file_digests
from kvstore.system.file_digests import FileDigests


@pytest.fixture
def memory(tmp_path) -> Path:
    return tmp_path / "cache/kvstore/file-digests.json"


def age(path: Path, seconds: float = 3600) -> None:
    """Make the file look as if it had been written long ago, as far as a process can."""
    then = time.time() - seconds
    os.utime(path, (then, then))


@pytest.fixture
def settled(monkeypatch) -> None:
    """Let a file count as settled at once: its ctime cannot be set back."""
    monkeypatch.setattr(file_digests, "SETTLED_S", -1)


@pytest.mark.parametrize("piece_nbytes", [1 << 12, 64 << 20])
def test_one_byte_anywhere_changes_the_digest(tmp_path, monkeypatch, piece_nbytes):
    monkeypatch.setattr(file_digests, "PIECE_NBYTES", piece_nbytes)
    draw = random.Random(1)
    files = [tmp_path / name for name in ("a.safetensors", "b.bin")]
    for file in files:
        file.write_bytes(draw.randbytes(50_000))
    digests = FileDigests()
    seen = {digests.digest(files)}
    for _ in range(200):
        file = draw.choice(files)
        content = bytearray(file.read_bytes())
        at = draw.randrange(len(content))
        content[at] ^= 1 << draw.randrange(8)
        file.write_bytes(content)
        seen.add(digests.digest(files))
    assert len(seen) == 201


def test_names_and_sizes_count(tmp_path):
    one, two, three = (tmp_path / name for name in ("1", "2", "3"))
    one.write_bytes(b"ab")
    two.write_bytes(b"c")
    three.write_bytes(b"ab")
    digests = FileDigests()
    assert digests.digest([one, two]) != digests.digest([three, two])
    one.write_bytes(b"a")
    two.write_bytes(b"bc")
    assert digests.digest([one, two]) != digests.digest([three, two])


def test_a_known_file_is_not_read_again(tmp_path, memory, settled, monkeypatch):
    file = tmp_path / "model.safetensors"
    file.write_bytes(os.urandom(1 << 20))
    first = FileDigests(memory)
    assert first.known([file]) is None
    digest = first.digest([file])
    monkeypatch.setattr(file_digests, "_hashed", None)  # whoever hashes fails
    second = FileDigests(memory)
    assert second.known([file]) == digest
    assert second.digest([file]) == digest
    assert (memory.stat().st_mode & 0o777, memory.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_a_file_written_again_is_read_again_although_it_looks_as_old(tmp_path, memory, settled):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"a" * 1000)
    age(file)
    before = FileDigests(memory).digest([file])
    time.sleep(0.02)  # a tick of the file system's clock
    file.write_bytes(b"b" * 1000)
    age(file)
    assert FileDigests(memory).known([file]) is None
    assert FileDigests(memory).digest([file]) != before


def test_what_was_just_written_is_not_remembered(tmp_path, memory):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"a" * 1000)
    FileDigests(memory).digest([file])
    assert FileDigests(memory).known([file]) is None


@pytest.mark.parametrize("content", [b"", b"[1]", b"\xff{", b"[" * 100_000, b'{"1:2:3:4:5": 7}'])
def test_a_spoilt_memory_is_ignored_and_written_anew(tmp_path, memory, settled, content):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"a" * 1000)
    memory.parent.mkdir(parents=True)
    memory.write_bytes(content)
    digest = FileDigests(memory).digest([file])
    assert digest == FileDigests().digest([file])
    assert FileDigests(memory).known([file]) == digest


def test_a_memory_that_others_may_write_is_not_believed(tmp_path, memory, settled):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"a" * 1000)
    digests = FileDigests(memory)
    digests.digest([file])
    forged = dict.fromkeys(json.loads(memory.read_text()), "0" * 64)
    memory.write_text(json.dumps(forged))
    memory.chmod(0o666)
    assert digests.known([file]) is None


def test_the_memory_is_bounded(tmp_path, memory, settled, monkeypatch):
    monkeypatch.setattr(file_digests, "ENTRIES_MAX", 3)
    files = [tmp_path / f"{n}.bin" for n in range(5)]
    digests = FileDigests(memory)
    for file in files:
        file.write_bytes(file.name.encode())
        digests.digest([file])
    assert len(json.loads(memory.read_text())) == 3
    assert digests.known(files[-1:]) is not None
    assert digests.known(files[:1]) is None


def test_no_memory_is_no_error(tmp_path):
    file = tmp_path / "model.bin"
    file.write_bytes(b"a")
    (tmp_path / "file").write_text("no directory")
    nowhere = FileDigests(tmp_path / "file/digests.json")
    assert nowhere.digest([file]) == FileDigests().digest([file])


def test_a_holder_that_hangs_does_not_keep_others_waiting(tmp_path, memory, settled, monkeypatch):
    monkeypatch.setattr(file_digests, "LOCK_WAIT_S", 0.05)
    file = tmp_path / "model.bin"
    file.write_bytes(b"a")
    digests = FileDigests(memory)
    with digests._locked(0, 0):  # all of it
        assert digests.digest([file]) == FileDigests().digest([file])
    assert digests.known([file]) is None
    digests.digest([file])
    assert digests.known([file]) is not None


def test_a_file_that_does_not_stop_changing_is_refused(tmp_path, monkeypatch):
    file = tmp_path / "model.bin"
    file.write_bytes(b"a" * 1000)
    hashed = file_digests._hashed

    def and_change(*args):
        digest = hashed(*args)
        file.write_bytes(file.read_bytes() + b"a")
        return digest

    monkeypatch.setattr(file_digests, "_hashed", and_change)
    with pytest.raises(Incompatible, match=r"model.bin changes"):
        FileDigests().digest([file])


def test_one_file_is_read_once_however_many_ask(tmp_path, memory, settled, monkeypatch):
    file = tmp_path / "model.bin"
    file.write_bytes(os.urandom(1 << 20))
    reads = []
    hashed = file_digests._hashed

    def counted(*args):
        reads.append(threading.get_ident())
        time.sleep(0.05)
        return hashed(*args)

    monkeypatch.setattr(file_digests, "_hashed", counted)
    asking = [threading.Thread(target=FileDigests(memory).digest, args=([file],)) for _ in range(4)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert len(reads) == 1


def test_progress_adds_up_over_files(tmp_path):
    files = [tmp_path / "a", tmp_path / "b"]
    files[0].write_bytes(b"a" * 1000)
    files[1].write_bytes(b"b" * 500)
    told: list[tuple[int, int]] = []
    FileDigests().digest(files, lambda done, total: told.append((done, total)))
    assert told == [(1000, 1500), (1500, 1500)]


def test_what_ends_a_thread_that_hashes_is_raised(tmp_path, monkeypatch):
    file = tmp_path / "model.bin"
    file.write_bytes(b"a")

    def fails(*args):
        raise MemoryError("no memory for a buffer")

    monkeypatch.setattr(file_digests._Pieces, "_hash", fails)
    with pytest.raises(MemoryError, match="no memory"):
        FileDigests().digest([file])
