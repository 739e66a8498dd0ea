"""A daemon that is killed or stopped before, during and after a load: SGLang goes on, and no page
holds anything but what was stored under its name."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from kvstore.testing.daemon import Daemon
from kvstore.testing.wait import until
from tests.connectors.sglang.inside.engine import Rank, hashes, mha

PAGES = 100
KILLED_AFTER_S = (0.0, 0.01, 0.03, 0.1, 0.3, 0.6)


@contextmanager
def stopped(daemon: Daemon) -> Iterator[None]:
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(daemon.pid, signal.SIGCONT)


def big() -> object:
    return mha(page_tokens=2, heads=256)  # pages of 96 KiB, and 256 of them


@pytest.fixture
def stored(mortal: Daemon) -> Iterator[tuple[Rank, list[str], list[bytes]]]:
    """A rank whose pages are on disk, their hashes, and what they hold."""
    keys = hashes("faults", PAGES)
    with Rank(mortal.target, big(), lookup_deadline_s=1.0, load_deadline_s=5.0).fill(1) as rank:
        expected = [rank.page(at) for at in range(PAGES)]
        assert all(rank.save(keys, range(PAGES)))
        assert rank.storage.flush()
        yield rank, keys, expected


def blank(rank: Rank, value: int) -> None:
    rank.pool.kv_buffer.view(torch.uint8).fill_(value)


def check(rank: Rank, good: list[bool], expected: list[bytes]) -> int:
    """Compare what was loaded; return how much."""
    assert len(good) == len(expected)
    for at, is_good in enumerate(good):
        if is_good:
            assert rank.page(at) == expected[at], f"page {at} holds something else"
    return sum(good)


@pytest.mark.fault
def test_killed_before_a_load(mortal: Daemon, stored: tuple[Rank, list[str], list[bytes]]) -> None:
    rank, keys, expected = stored
    mortal.kill()
    began = time.monotonic()
    assert check(rank, rank.load(keys, range(PAGES)), expected) == 0
    until(lambda: not rank.storage._mover.available)
    assert rank.storage.batch_exists(keys) == 0
    assert rank.load(keys, range(PAGES)) == [False] * PAGES
    assert rank.save(keys, range(PAGES)) == [False] * PAGES
    assert time.monotonic() - began < 5
    mortal.start()
    until(lambda: rank.storage.batch_exists(keys) == PAGES)
    blank(rank, 2)
    assert check(rank, rank.load(keys, range(PAGES)), expected) == PAGES


@pytest.mark.fault
def test_killed_during_loads(mortal: Daemon, stored: tuple[Rank, list[str], list[bytes]]) -> None:
    """A page that a load did not fill is SGLang's again at once: nothing writes to it later."""
    rank, keys, expected = stored
    loaded = lost = 0
    for number, after_s in enumerate(KILLED_AFTER_S):
        until(lambda: rank.storage.batch_exists(keys) == PAGES)
        blank(rank, number)
        killing = threading.Timer(after_s, mortal.kill)
        killing.start()
        good = rank.load(keys, range(PAGES))
        while all(good):
            loaded += check(rank, good, expected)
            good = rank.load(keys, range(PAGES))
        loaded += check(rank, good, expected)
        lost += good.count(False)
        blank(rank, 99)  # all of it is SGLang's now
        before = [rank.page(at) for at in range(PAGES)]
        killing.join()
        mortal.start()
        until(lambda: rank.storage.batch_exists(keys) == PAGES)
        assert [rank.page(at) for at in range(PAGES)] == before
    assert loaded >= PAGES
    assert lost >= PAGES


@pytest.mark.fault
def test_killed_after_a_load(mortal: Daemon, stored: tuple[Rank, list[str], list[bytes]]) -> None:
    rank, keys, expected = stored
    blank(rank, 3)
    good = rank.load(keys, range(PAGES))
    mortal.kill()
    assert check(rank, good, expected) == PAGES
    mortal.start()
    until(lambda: rank.storage.batch_exists(keys) == PAGES)


@pytest.mark.fault
def test_stopped_costs_one_deadline_and_then_nothing(
    mortal: Daemon, stored: tuple[Rank, list[str], list[bytes]]
) -> None:
    rank, keys, expected = stored
    took = []
    with stopped(mortal):
        for _ in range(10):
            began = time.monotonic()
            assert rank.storage.batch_exists(keys) == 0
            assert check(rank, rank.load(keys, range(PAGES)), expected) == 0
            assert not any(rank.save(keys, range(PAGES)))
            took.append(time.monotonic() - began)
    assert took[0] < 2.5  # lookup_deadline_s is 1
    assert sorted(took)[4] < 0.1
    until(lambda: rank.storage.batch_exists(keys) == PAGES)
    blank(rank, 4)
    assert check(rank, rank.load(keys, range(PAGES)), expected) == PAGES


@pytest.mark.fault
@pytest.mark.parametrize("what", ["load", "save"])
def test_stopped_during_a_call_ends_it_by_its_deadline(
    mortal: Daemon, stored: tuple[Rank, list[str], list[bytes]], what: str
) -> None:
    rank, keys, expected = stored
    with stopped(mortal):
        began = time.monotonic()
        if what == "load":
            assert check(rank, rank.load(keys, range(PAGES)), expected) == 0
            assert time.monotonic() - began < 3  # it asks whether the daemon is there
        else:
            assert not any(rank.save(hashes("new", PAGES), range(PAGES)))
            assert time.monotonic() - began < 8  # save_deadline_s is 5
    until(lambda: rank.storage.batch_exists(keys) == PAGES)


def test_a_daemon_that_comes_later_is_found() -> None:
    keys = hashes("later", 2)
    with Daemon() as daemon, Rank(daemon.target).fill(5) as rank:
        assert rank.save(keys, [0, 1]) == [False, False]
        daemon.start()
        until(lambda: all(rank.save(keys, [0, 1])))
        assert rank.storage.batch_exists(keys) == 2
        assert rank.storage.counters.as_dict()["away"]


def test_after_close_all_is_a_miss(daemon: Daemon) -> None:
    keys = hashes("closed", 2)
    rank = Rank(daemon.target).fill(6)
    assert all(rank.save(keys, [0, 1]))
    rank.storage.close()
    rank.storage.close()
    assert rank.storage.batch_exists(keys) == 0
    assert rank.load(keys, [0, 1]) == [False, False]
    assert rank.save(keys, [0, 1]) == [False, False]
