"""Clients are handed the arena's memory. They cannot turn it into zeros, or it is noticed."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Iterator, Sequence

import pytest

from kvstore import Client
from kvstore.testing.daemon import Daemon
from kvstore.testing.holes import allow_holes, give_back, punch, shared_extents
from kvstore.testing.samples import sample_keys, sample_namespace, sample_records
from kvstore.testing.wait import until

SPACE = sample_namespace("holes")
KEYS = sample_keys("holes", 40)
RECORDS = sample_records(KEYS)
F_SEAL_EXEC = 0x20


@pytest.fixture(params=[True, False], ids=["file", "arena-only"])
def own(request: pytest.FixtureRequest) -> Iterator[Daemon]:
    with Daemon(file=request.param) as daemon:
        yield daemon.start()


def punch_all(fd: int) -> None:
    allow_holes(fd)
    punch(fd, 0, os.fstat(fd).st_size)


def punched(client: Client) -> float:
    return float(client.admin.stats()["totals"]["punched_bytes"])


def all_there(extents: Sequence[int], sizes: Sequence[int]) -> bool:
    found = [os.fstat(fd).st_blocks * 512 for fd in extents]
    return all(have >= want for have, want in zip(found, sizes, strict=True))


def test_extents_are_the_owners_alone_and_cannot_be_run(daemon: Daemon) -> None:
    with Client(daemon.target) as client:
        client.register(SPACE)
        with shared_extents(daemon.pid) as extents:
            assert extents
            for fd in extents:
                assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o600
                seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
                assert seals & fcntl.F_SEAL_SHRINK
                assert seals & fcntl.F_SEAL_SEAL
                assert seals & F_SEAL_EXEC or os.uname().release < "6.3"


@pytest.mark.skipif(os.geteuid() != 0, reason="forbidding holes takes CAP_LINUX_IMMUTABLE: root")
def test_a_privileged_daemon_forbids_holes_and_mappings_still_work(daemon: Daemon) -> None:
    with Client(daemon.target) as client:
        client.register(SPACE)
        with shared_extents(daemon.pid) as extents:
            for fd in extents:
                with pytest.raises(OSError, match="not permitted") as refused:
                    punch(fd, 0, 4096)
                assert refused.value.errno == errno.EPERM
                with mmap.mmap(fd, 4096, flags=mmap.MAP_SHARED) as mapped:
                    with pytest.raises(OSError, match="not permitted"):
                        mapped.madvise(mmap.MADV_REMOVE)
                    mapped[0] = mapped[0]


def test_a_hole_is_a_miss_never_bytes_and_the_pages_are_taken_back(own: Daemon) -> None:
    with Client(own.target) as client:
        client.register(SPACE)
        client.put(SPACE.id, KEYS, RECORDS)
        client.admin.flush(10)
        with shared_extents(own.pid) as extents:
            sizes = [os.fstat(fd).st_size for fd in extents]

            def noticed(more_than: float) -> bool:
                """Punch again: whoever touches a hole first, this process' own threads too, fills
                it."""
                for fd in extents:
                    punch_all(fd)
                return punched(client) > more_than

            punch_all(extents[0])
            at_once = client.get(SPACE.id, KEYS)
            pairs = zip(at_once, RECORDS, strict=True)
            assert all(found in (None, right) for found, right in pairs)
            until(lambda: noticed(0))
            before = punched(client)
            until(lambda: noticed(before))
            until(lambda: all_there(extents, sizes))
            until(lambda: client.match(SPACE.id, KEYS).resident_blocks == 0)
        client.put(SPACE.id, KEYS, RECORDS)
        assert client.get(SPACE.id, KEYS, wait_s=5) == RECORDS
        told = [line for line in own.output().splitlines() if "arena=punched extent=0" in line]
        assert len(told) == 1, "the log is not for a client to fill"


def test_records_beside_a_hole_stay(own: Daemon) -> None:
    with Client(own.target) as client:
        client.register(SPACE)
        client.put(SPACE.id, KEYS, RECORDS)
        client.admin.flush(10)
        grant = client.acquire(SPACE.id, KEYS)
        client.release(grant.lease_id)
        assert grant.slots[3] is not None
        view = client.view(grant.slots[3])
        with shared_extents(own.pid) as extents:
            for fd in extents:
                allow_holes(fd)

        def noticed() -> bool:
            give_back(view)
            return client.admin.stats()["totals"].get("corrupt_blocks", {}).get("arena") == 1

        until(noticed)
        assert client.get(SPACE.id, KEYS[:3]) == RECORDS[:3]
        assert client.match(SPACE.id, KEYS[4:]).resident_blocks == len(KEYS) - 4
