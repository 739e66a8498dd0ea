"""The native client as LMCache drives it, and a daemon that a test may stop and kill."""

from __future__ import annotations

import mmap
import select
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.testing.daemon import Daemon
from kvstore.testing.lmcache import lmcache_site
from kvstore_lmcache.client import Client

PAGE_NBYTES = 64 << 10
WEIGHTS = "the tests' own"


@pytest.fixture(scope="session")
def site() -> Path:
    """The folder of a real LMCache."""
    found = lmcache_site()
    if found is None:
        pytest.skip("LMCache is not installed: `make setup` does that")
    return found


@pytest.fixture
def lmcache(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LMCache can be found by this process, which need not import it."""
    monkeypatch.syspath_prepend(str(site))


@pytest.fixture(scope="session")
def daemon() -> Iterator[Daemon]:
    """A running daemon that tests share; they must not stop it."""
    with Daemon() as daemon:
        yield daemon.start()


@pytest.fixture
def mortal() -> Iterator[Daemon]:
    """A daemon that the test may stop, kill and start."""
    with Daemon() as daemon:
        yield daemon.start()


@pytest.fixture
def native(daemon: Daemon, lmcache: None) -> Iterator[Native]:
    # Deadlines are a matter of other tests, and this machine may be busy.
    with Native(target=daemon.target, page_mib_max=4, lookup_deadline_s=10) as native:
        yield native


class Pages:
    """Pages in one mapping, as LMCache's L1 has them."""

    def __init__(self, count: int, nbytes: int = PAGE_NBYTES) -> None:
        self.rows = np.frombuffer(mmap.mmap(-1, count * nbytes), np.uint8).reshape(count, nbytes)

    def fill(self, seed: int) -> Pages:
        self.rows[:] = np.random.default_rng(seed).integers(0, 256, self.rows.shape, np.uint8)
        return self

    @property
    def views(self) -> list[memoryview]:
        return [memoryview(row) for row in self.rows]


class Native:
    """Drives a client as LMCache does: submits, polls the descriptor, drains."""

    def __init__(self, **params: Any) -> None:
        self.client = Client(**{"weights_id": WEIGHTS, **params})
        self._ended: dict[int, tuple[bool, str, list[bool] | None]] = {}

    def exists(self, keys: list[str]) -> list[bool]:
        return self._outcome(self.client.submit_batch_exists(keys))[2]

    def get(self, keys: list[str], views: list[memoryview]) -> list[bool]:
        return self._outcome(self.client.submit_batch_get(keys, views))[2]

    def set(self, keys: list[str], views: list[memoryview]) -> bool:
        return self._outcome(self.client.submit_batch_set(keys, views))[0]

    def delete(self, keys: list[str]) -> list[bool]:
        return self._outcome(self.client.submit_batch_delete(keys))[2]

    def _outcome(self, number: int, timeout_s: float = 20.0) -> Any:
        until = time.monotonic() + timeout_s
        while number not in self._ended:
            assert select.select([self.client.event_fd()], [], [], until - time.monotonic())[0]
            for each, ok, error, done in self.client.drain_completions():
                self._ended[each] = (ok, error, done)
        return self._ended.pop(number)

    def __enter__(self) -> Native:
        return self

    def __exit__(self, *error: object) -> None:
        self.client.close()


def object_keys(
    prefix: str, count: int, *, model: str = "org/model", rank: int = 0x01000100, salt: str = ""
) -> list[str]:
    """Return keys as LMCache's adapter writes them."""
    ends = f"@{salt}" if salt else ""
    return [
        f"{model}@{rank:08x}@0@{f'{prefix}{index}'.encode().hex()}{ends}" for index in range(count)
    ]
