"""Daemons that are stopped, killed, frozen or out of disk, seen by a client that lives on."""

import os
import resource
import signal
import statistics
import threading
import time
from collections.abc import Iterator

import pytest

from kvstore import AsyncClient, Client, Span, Unavailable
from kvstore.model.block import Part
from kvstore.model.errors import InvalidRequest
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import sample_keys, sample_namespace, sample_records
from kvstore.testing.wait import until

pytestmark = pytest.mark.fault

NAMESPACE = sample_namespace()
KEYS = sample_keys("restart", 20)
RECORDS = sample_records(KEYS)


@pytest.fixture
def own() -> Iterator[Daemon]:
    """A daemon that the test may do anything to."""
    with Daemon() as daemon:
        yield daemon.start()


def test_sigterm_drains_and_a_restart_serves_from_disk(own: Daemon) -> None:
    with Client(own.target) as client:
        client.put(client.register(NAMESPACE), KEYS, RECORDS)
        assert own.stop() == 0
    assert "node=stopped" in own.output()
    assert not own.socket.exists()
    own.start()
    with Client(own.target) as client:
        namespace_id = client.register(NAMESPACE)
        match = client.match(namespace_id, KEYS)
        assert (match.hit_blocks, match.resident_blocks) == (20, 0)
        assert client.get(namespace_id, KEYS) == RECORDS


def test_a_call_that_runs_at_sigterm_is_answered(own: Daemon) -> None:
    """The call waits for room that a lease keeps; the lease ends while the daemon drains."""
    whole = sample_namespace("whole", 30 << 20)
    keys = sample_keys("whole", 3)
    with Client(own.target) as client:
        namespace_id = client.register(whole)
        spans = [Span(Part(0, 0), 0, 2)]
        until(lambda: client.admin.stats()["dram"]["capacity_bytes"] == 64 << 20)
        until(lambda: len(client.extents()) == 2)
        held = client.reserve(namespace_id, keys[:2], first_block=0, parent=None, spans=spans)
        assert held.refused == 0
        waiting = client.submit(
            lambda client: client.reserve(
                namespace_id,
                keys[2:],
                first_block=2,
                parent=keys[1],
                spans=[Span(Part(0, 0), 0, 1)],
                wait_s=1.0,
            )
        )
        until(lambda: client.admin.stats()["leases"] == 1)
        os.kill(own.pid, signal.SIGTERM)
        until(lambda: "node=draining" in own.output())
        assert waiting.result(5).refused == 1
        with pytest.raises(Unavailable):
            client.match(namespace_id, keys)
        assert own.wait() == 0


def test_a_client_lives_through_a_kill_and_a_restart(own: Daemon) -> None:
    with Client(own.target) as client:
        namespace_id = client.register(NAMESPACE)
        assert client.put(namespace_id, KEYS, RECORDS, durable=True).durable
        before = client.instance
        lease = client.acquire(namespace_id, KEYS)
        old = [client.view(slot) for slot in lease.slots if slot]
        own.kill()
        until(lambda: not client.available, 5.0)

        took_s = []
        for _ in range(200):
            began = time.perf_counter()
            with pytest.raises(Unavailable):
                client.match(namespace_id, KEYS)
            took_s.append(time.perf_counter() - began)
        # Through a thread hop; the refusal itself is measured below.
        assert statistics.median(took_s) < 0.002

        own.start()
        assert until(lambda: client.available, 10.0) < 10.0
        assert client.instance not in ("", before)
        assert client.local
        # The namespace is registered again, and the bytes come from disk.
        assert client.get(namespace_id, KEYS) == RECORDS
        # What the dead daemon lent names nothing in the new one, and is still readable.
        assert client.release(lease.lease_id) == [False]
        assert lease.slots[0] is not None
        with pytest.raises(Unavailable, match="not mapped"):
            client.view(lease.slots[0])
        assert [bytes(view) for view in old] == RECORDS


def test_an_open_breaker_refuses_within_microseconds(own: Daemon) -> None:
    with Client(own.target) as client:
        namespace_id = client.register(NAMESPACE)
        own.kill()
        until(lambda: not client.available, 5.0)

        async def refuse(client: AsyncClient) -> float:
            took_s = []
            for _ in range(500):
                began = time.perf_counter()
                with pytest.raises(Unavailable):
                    await client.match(namespace_id, KEYS[:1])
                took_s.append(time.perf_counter() - began)
            return statistics.median(took_s)

        assert client.submit(refuse).result(10) < 200e-6


def test_a_frozen_daemon_costs_deadlines_and_then_nothing(own: Daemon) -> None:
    with Client(own.target, timeout_s=0.2, connect_timeout_s=0.3) as client:
        namespace_id = client.register(NAMESPACE)
        os.kill(own.pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            while client.available:
                with pytest.raises(Unavailable):
                    client.match(namespace_id, KEYS)
            assert time.monotonic() - began < 2.0
        finally:
            os.kill(own.pid, signal.SIGCONT)
        until(lambda: client.available, 10.0)
        client.match(namespace_id, KEYS)


def test_a_remote_client_lives_through_a_restart_too(own: Daemon) -> None:
    own.stop()
    own.start("server.listen=127.0.0.1:0", "server.listen_open=true")
    with Client(own.address) as client:
        namespace_id = client.register(NAMESPACE)
        assert client.put(namespace_id, KEYS, RECORDS, durable=True).durable
        port = own.port
        own.kill()
        with pytest.raises(Unavailable):
            client.get(namespace_id, KEYS)
        own.start(f"server.listen=127.0.0.1:{port}", "server.listen_open=true")
        until(lambda: client.available, 10.0)
        assert client.get(namespace_id, KEYS) == RECORDS


def test_calls_that_run_when_the_daemon_dies_end_as_unavailable(own: Daemon) -> None:
    whole = sample_namespace("whole", 30 << 20)
    keys = sample_keys("whole", 3)
    with Client(own.target) as client:
        namespace_id = client.register(whole)
        until(lambda: len(client.extents()) == 2)
        spans = [Span(Part(0, 0), 0, 2)]
        client.reserve(namespace_id, keys[:2], first_block=0, parent=None, spans=spans)
        waiting = [
            client.submit(
                lambda client: client.reserve(
                    namespace_id,
                    keys[2:],
                    first_block=2,
                    parent=keys[1],
                    spans=[Span(Part(0, 0), 0, 1)],
                    wait_s=20.0,
                )
            )
            for _ in range(5)
        ]
        killer = threading.Timer(0.2, own.kill)
        killer.start()
        for each in waiting:
            with pytest.raises(Unavailable):
                each.result(5)
        killer.join()


def test_a_full_disk_costs_durability_and_nothing_else() -> None:
    """A file size limit stands in for the full disk: every write beyond it fails."""

    with Daemon() as daemon:
        daemon.start()
        until(lambda: "arena=complete" in daemon.output())  # its memfds have sizes, too
        resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (256 << 10, 256 << 10))
        with Client(daemon.target) as client:
            namespace_id = client.register(NAMESPACE)
            done = client.put(namespace_id, KEYS, RECORDS, durable=True)
            assert (done.committed, done.durable) == (20, False)
            assert client.get(namespace_id, KEYS) == RECORDS
            file = client.admin.stats()["file"]
            assert file["failed_writes"] > 0
            assert file["state"] == "failing"
        assert daemon.stop() == 0


def test_a_full_arena_without_a_file_tier_refuses_and_counts() -> None:
    """Leased slots cannot make room, so the store is full: an answer, not an error."""
    with Daemon(file=False) as daemon:
        daemon.start()
        with Client(daemon.target) as client:
            namespace_id = client.register(sample_namespace("tens", 10 << 20))
            until(lambda: len(client.extents()) == 2)
            keys = sample_keys("tens", 8)
            spans = [Span(Part(0, 0), 0, 6)]
            held = client.reserve(namespace_id, keys[:6], first_block=0, parent=None, spans=spans)
            assert held.refused == 0
            records = [bytes(10 << 20)] * 2
            done = client.put(
                namespace_id, keys[6:], records, first_block=6, parent=keys[5], wait_s=0.1
            )
            assert (done.committed, done.refused) == (0, 2)
            assert client.release(held.lease_id) == [True]
            done = client.put(namespace_id, keys[6:], records, first_block=6, parent=keys[5])
            assert (done.committed, done.refused) == (2, 0)


def test_an_expired_lease_counts_as_not_held() -> None:
    with Daemon("limits.lease_s=1.0", file=False) as daemon:
        daemon.start()
        with Client(daemon.target) as client:
            namespace_id = client.register(NAMESPACE)
            client.put(namespace_id, KEYS, RECORDS)
            lease = client.acquire(namespace_id, KEYS)
            assert lease.deadline_s == 1.0
            until(lambda: client.admin.stats()["dram"]["limbo_bytes"])
            assert client.release(lease.lease_id) == [False]
            assert client.admin.stats()["dram"]["limbo_bytes"] == 0
            spans = [Span(Part(0, 0), 0, 2)]
            late = client.reserve(
                namespace_id, sample_keys("late", 2), first_block=0, parent=None, spans=spans
            )
            until(lambda: client.admin.stats()["dram"]["limbo_bytes"])
            with pytest.raises(InvalidRequest, match="expired"):
                client.commit(late.lease_id, [0, 0])
