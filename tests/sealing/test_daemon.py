"""A daemon with a root key, from outside: what it serves, refuses, and leaves on disk."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import Client, Prefix
from kvstore.testing.daemon import Daemon
from kvstore.testing.root_key import root_key_in_memory
from kvstore.testing.samples import sample_keys, sample_namespace, sample_records
from kvstore.testing.wait import until
from tests.cli.run import kvstore

NBYTES = 100_000
KEYS = sample_keys("sealed", 40)
RECORDS = sample_records(KEYS, NBYTES)
SPACE = sample_namespace("a-secret-model", NBYTES)


@pytest.fixture
def root_key() -> Iterator[Path]:
    with root_key_in_memory() as path:
        yield path


def put(daemon: Daemon) -> None:
    with Client(daemon.target) as client:
        client.register(SPACE)
        assert client.put(SPACE.id, KEYS, RECORDS, durable=True).durable


def get(daemon: Daemon) -> list[bytes | None]:
    with Client(daemon.target) as client:
        client.register(SPACE)
        return list(client.get(SPACE.id, KEYS))


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_what_was_put_comes_back_after_a_kill(root_key: Path, codec: str) -> None:
    with Daemon(f"security.root_key_file={root_key}", f"file.codec={codec}") as daemon:
        put(daemon.start())
        daemon.kill()
        daemon.start()
        assert get(daemon) == RECORDS
        with Client(daemon.target) as client:
            client.register(SPACE)
            assert client.hints.demote(Prefix(SPACE.id, KEYS)).done_blocks == len(KEYS)
            assert client.get(SPACE.id, KEYS[7:8]) == RECORDS[7:8]
            grant = client.acquire(SPACE.id, KEYS, file_places=True)
            assert not any(grant.places)  # no client can read them by itself


def test_no_key_name_or_record_is_on_disk(root_key: Path) -> None:
    with Daemon(f"security.root_key_file={root_key}") as daemon:
        put(daemon.start())
        assert daemon.stop() == 0
        files = [path for path in (daemon.directory / "file").rglob("*") if path.is_file()]
        everything = b"".join(path.read_bytes() for path in files)
        names = " ".join(path.name for path in files)
        log = daemon.output()
    canaries = [b"a-secret-model", SPACE.id[:8], KEYS[0][:8], RECORDS[0][:32], RECORDS[-1][-32:]]
    assert [each for each in canaries if each in everything] == []
    assert [each for each in canaries if each.hex() in names] == []
    with Path(root_key).open("rb") as file:
        key = file.read()
    assert key not in everything
    assert key.hex() not in log


def test_daemons_that_share_a_root_share_an_encrypted_bucket(
    root_key: Path, tmp_path: Path
) -> None:
    bucket = tmp_path / "bucket"
    overrides = [f"security.root_key_file={root_key}", f"object.url=file://{bucket}"]
    with Daemon(*overrides) as one:
        put(one.start())
        assert one.stop() == 0  # uploads
    files = [path for path in bucket.rglob("*") if path.is_file()]
    everything = b"".join(path.read_bytes() for path in files) + str(files).encode()
    for canary in (b"a-secret-model", SPACE.id[:8], KEYS[0][:8], RECORDS[0][:32]):
        assert canary not in everything
        assert canary.hex().encode() not in everything
    assert len([path for path in files if path.name.count("-") == 1]) >= 1
    with Daemon(*overrides) as two:
        two.start()
        with Client(two.target) as client:
            client.register(SPACE)
            until(lambda: client.acquire(SPACE.id, KEYS, wait_s=5).hit_blocks == len(KEYS), 20)
            assert client.get(SPACE.id, KEYS) == RECORDS


def test_a_start_without_the_key_is_refused_and_changes_nothing(root_key: Path) -> None:
    with Daemon() as daemon:
        put(daemon.start(f"security.root_key_file={root_key}"))
        daemon.kill()
        with pytest.raises(RuntimeError, match=r"is encrypted: set security\.root_key_file"):
            daemon.start()
        with (
            root_key_in_memory() as other,
            pytest.raises(RuntimeError, match="the root key does not open it"),
        ):
            daemon.start(f"security.root_key_file={other}")
        assert get(daemon.start(f"security.root_key_file={root_key}")) == RECORDS


def test_keys_of_before_a_rotation_are_refused_and_change_nothing(root_key: Path) -> None:
    with Daemon(f"security.root_key_file={root_key}") as daemon:
        daemon.start()
        files = daemon.directory / "file"
        old = {name: (files / name).read_bytes() for name in ("KEYS.a", "KEYS.b")}
        done = kvstore("key", "rotate", str(files), "--root-key-file", str(root_key))
        assert "epoch 2" in done.output
        put(daemon)
        assert daemon.stop() == 0
        new = {name: (files / name).read_bytes() for name in old}
        for name, data in old.items():
            (files / name).write_bytes(data)
        with pytest.raises(RuntimeError, match=r"put the newer KEYS\.a and KEYS\.b back"):
            daemon.start()
        for name, data in new.items():
            (files / name).write_bytes(data)
        assert get(daemon.start()) == RECORDS


def test_what_was_stored_in_clear_is_refused_or_accepted_explicitly(root_key: Path) -> None:
    with Daemon() as daemon:
        put(daemon.start())
        daemon.kill()
        key = f"security.root_key_file={root_key}"
        with pytest.raises(RuntimeError, match=r"not encrypted.*kvstore gc --seal"):
            daemon.start(key)
        assert get(daemon.start(key, "security.accept_plain=true")) == RECORDS
        daemon.kill()
        assert get(daemon.start()) == RECORDS  # nothing was written, so nothing is encrypted


def test_a_root_key_on_the_disk_of_the_data_is_refused(tmp_path: Path) -> None:
    with Daemon() as daemon:
        key = daemon.directory / "root.key"
        key.write_bytes(os.urandom(32))
        key.chmod(0o400)
        with pytest.raises(RuntimeError, match="is on the disk of"):
            daemon.start(f"security.root_key_file={key}")


def test_the_arena_is_left_out_of_core_dumps(root_key: Path) -> None:
    with Daemon(f"security.root_key_file={root_key}") as daemon:
        put(daemon.start())
        until(lambda: _flags(daemon.pid) == {True}, 20)  # the next extent is mapped, then left out
    with Daemon() as daemon:
        daemon.start()
        until(lambda: _flags(daemon.pid) == {False}, 20)  # the control: this is what shows


def _flags(pid: int) -> set[bool]:
    """Return, of the mappings of an arena, whether they are left out."""
    text = Path(f"/proc/{pid}/smaps").read_text()
    arenas = re.findall(r"kvstore-arena.*?VmFlags:([^\n]*)", text, re.DOTALL)
    assert arenas
    return {"dd" in flags.split() for flags in arenas}


def test_a_process_with_keys_is_not_dumped() -> None:
    code = (
        "import ctypes; from kvstore.system.dumps import forbid_dumps; forbid_dumps();"
        "print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout == b"0\n"
