"""Saves behind an engine's back: bounded, counted, and none of them can stop the next."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kvstore import Client, Unavailable
from kvstore.client.save_thread import SavesBehind, SaveThread
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import sample_keys, sample_namespace, sample_records


class Saver(SaveThread[str]):
    """Puts one block for each name, unless the name says otherwise."""

    def __init__(self, client: Client, jobs_max: int = 4) -> None:
        self.entered: list[str] = []
        super().__init__(client, jobs_max=jobs_max, enter=self._enter)
        self.gate = threading.Event()
        self.gate.set()
        self.let_go_of: list[str] = []

    def _enter(self) -> None:
        self.entered.append(threading.current_thread().name)

    def save(self, job: str) -> bool:
        self.gate.wait(10)
        if job == "away":
            raise Unavailable("the daemon is away")
        if job == "broken":
            raise ValueError("a mistake")
        keys = sample_keys(job, 1)
        namespace_id = self._client.register(sample_namespace("saves"))
        done = self._client.put(namespace_id, keys, sample_records(keys))
        self.saved_blocks += done.committed
        return job != "full"

    def let_go(self, job: str) -> None:
        self.let_go_of.append(job)


class Cache(SavesBehind):
    def __init__(self, target: str) -> None:
        self._client = Client(target)
        self.saver = Saver(self._client)
        self.closed = 0

    @property
    def _saves(self) -> Saver:
        return self.saver

    @property
    def _daemon(self) -> Client:
        return self._client

    def close(self) -> None:
        self.closed += 1
        self.saver.close()
        self._client.close()


@pytest.fixture
def cache() -> Iterator[Cache]:
    with Daemon() as daemon, Cache(daemon.start().target) as cache:
        cache._client.connect()
        yield cache
        cache.saver.gate.set()


def test_jobs_that_fail_are_counted_and_the_next_one_is_done(cache: Cache) -> None:
    for job in ("away", "broken", "full", "good"):
        cache.saver.put(job)
    assert cache.saver.drain(10)
    assert cache.saves_dropped == 3
    assert cache.saved_blocks == 2, "what a full daemon has taken counts"
    assert cache.saver.let_go_of == ["away", "broken", "full", "good"]
    assert len(cache.saver.entered) == 1


def test_more_jobs_than_may_wait_are_dropped_at_once(cache: Cache) -> None:
    cache.saver.gate.clear()
    for number in range(6):
        cache.saver.put(f"job {number}")
    assert cache.saves_dropped == 2
    assert cache.saver.let_go_of == ["job 4", "job 5"]
    assert not cache.flush(0.05), "they are not done"
    cache.saver.gate.set()
    assert cache.flush(10)
    assert cache.saved_blocks == 4
    assert len(cache.saver.let_go_of) == 6


def test_what_was_flushed_is_there_after_a_kill() -> None:
    with Daemon() as daemon:
        with Cache(daemon.start().target) as cache:
            cache._client.connect()
            cache.saver.put("kept")
            assert cache.flush(10)
        assert cache.closed == 1
        daemon.kill()
        with Client(daemon.start().target) as client:
            namespace_id = client.register(sample_namespace("saves"))
            keys = sample_keys("kept", 1)
            assert client.get(namespace_id, keys) == sample_records(keys)


def test_after_its_end_a_save_is_dropped(cache: Cache) -> None:
    cache.saver.close()
    cache.saver.put("late")
    assert cache.saves_dropped == 1
    assert cache.saver.let_go_of == ["late"]


def test_without_a_daemon_nothing_is_queued() -> None:
    with Daemon() as daemon, Cache(daemon.start().target) as cache:
        cache._client.connect()
        daemon.kill()
        with pytest.raises(Unavailable):
            cache._client.admin.stats()
        cache.saver.put("nothing")
        assert cache.saver.drain(0)
        assert cache.saves_dropped == 1
