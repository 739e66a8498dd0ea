"""A daemon that is killed or stopped during loads and saves: LMCache hears of the end of each task,
and from then on its pages are its own."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from kvstore.testing.daemon import Daemon
from kvstore.testing.wait import until
from tests.connectors.lmcache.conftest import Native, Pages, object_keys

pytestmark = pytest.mark.fault

COUNT, NBYTES = 48, 1 << 20
AFTER_S = (0.0, 0.01, 0.03, 0.1, 0.2, 0.3)
TASK_S = 8.0  # no task lasts longer: load_deadline_s and save_deadline_s are 2
GIVEN_UP = 99


@pytest.fixture
def roomy() -> Iterator[Daemon]:
    """A daemon with room for everything."""
    with Daemon("dram.capacity=256MiB", "dram.extent=64MiB", "file.capacity=2GiB") as daemon:
        yield daemon.start()


@pytest.fixture
def native(roomy: Daemon, lmcache: None) -> Iterator[Native]:
    with Native(
        target=roomy.target,
        page_mib_max=4,
        lookup_deadline_s=2,
        load_deadline_s=2,
        save_deadline_s=2,
    ) as native:
        yield native


@contextmanager
def stopped(daemon: Daemon, after_s: float) -> Iterator[None]:
    """Stop the daemon in a moment; it goes on at the end."""
    stopping = threading.Timer(after_s, os.kill, (daemon.pid, signal.SIGSTOP))
    stopping.start()
    try:
        yield
    finally:
        stopping.join()
        os.kill(daemon.pid, signal.SIGCONT)


@contextmanager
def killed(daemon: Daemon, after_s: float) -> Iterator[None]:
    """Kill the daemon in a moment; another one runs at the end."""
    killing = threading.Timer(after_s, daemon.kill)
    killing.start()
    try:
        yield
    finally:
        killing.join()
        daemon.start()


def back(native: Native, keys: list[str]) -> None:
    until(lambda: all(native.exists(keys)), 20)


@pytest.mark.parametrize("strike", [killed, stopped])
def test_during_loads_nothing_is_written_after_their_end(
    native: Native, roomy: Daemon, strike: object
) -> None:
    keys, stored = object_keys("load", COUNT, model="org/load"), Pages(COUNT, NBYTES).fill(1)
    assert native.set(keys, stored.views)
    assert native.client.flush()
    loaded = lost = 0
    for after_s in AFTER_S:
        back(native, keys)
        targets = [Pages(COUNT, NBYTES) for _ in range(3)]
        with strike(roomy, after_s):  # type: ignore[operator]
            missed = False
            while not missed:
                began = time.monotonic()
                tasks = [native.client.submit_batch_get(keys, each.views) for each in targets]
                for task, pages in zip(tasks, targets, strict=True):
                    _, _, good = native._outcome(task)
                    assert time.monotonic() - began < TASK_S
                    assert np.array_equal(pages.rows[good], stored.rows[good])
                    loaded += sum(good)
                    lost += good.count(False)
                    missed = missed or not all(good)
                    pages.rows[:] = GIVEN_UP  # LMCache uses them for something else
        back(native, keys)
        for pages in targets:
            assert (pages.rows == GIVEN_UP).all()
    assert loaded >= COUNT
    assert lost >= COUNT


@pytest.mark.parametrize("strike", [killed, stopped])
def test_during_saves_nothing_is_read_after_their_end(
    native: Native, roomy: Daemon, strike: object
) -> None:
    expected = Pages(COUNT, NBYTES).fill(2)
    refused, names = 0, []
    for number, after_s in enumerate(AFTER_S[::2]):
        with strike(roomy, after_s):  # type: ignore[operator]
            for attempt in range(1000):
                keys = object_keys(f"save {number} {attempt} ", COUNT)
                pages = Pages(COUNT, NBYTES)
                pages.rows[:] = expected.rows
                began = time.monotonic()
                saved = native.set(keys, pages.views)
                assert time.monotonic() - began < TASK_S
                pages.rows[:] = GIVEN_UP
                names = [*names[-3:], keys]
                if not saved:
                    refused += 1
                    break
        until(lambda: native.set(object_keys("again", 1), expected.views[:1]), 20)
        for keys in names:
            got = Pages(COUNT, NBYTES)
            good = native.get(keys, got.views)
            assert np.array_equal(got.rows[good], expected.rows[good])
    assert refused == len(AFTER_S[::2])
