"""A put waits for room once, whatever it is cut into, and a daemon that is full is not away."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvstore import AsyncClient, Client, Part, Span, Unavailable
from kvstore.client import pages as pages_module
from kvstore.client import streams as streams_module
from kvstore.client.batch import WINDOW_KEYS, Batch
from kvstore.client.copying import Copiers
from kvstore.client.in_place import InPlace
from kvstore.client.page_counters import Counters
from kvstore.client.pages import Limits, Pages, Place
from kvstore.client.session import Session
from kvstore.client.streams import Streams
from kvstore.model.block import Committed, Grant
from kvstore.system.patience import Patience
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import RECORD_NBYTES, sample_keys, sample_namespace, sample_records
from kvstore.testing.wait import until

NBYTES = 64 << 10
ARENA_NBYTES = 8 << 20
WINDOW_NBYTES = ARENA_NBYTES // 4
SPACE = sample_namespace("room", NBYTES)
SMALL = sample_namespace("small", 128)
KEYS = sample_keys("room", 4 * WINDOW_NBYTES // NBYTES)  # four windows
RECORD = memoryview(bytes(NBYTES))
WAIT_S = 0.8
MOST_S = 3 * WAIT_S  # for one wait and a busy machine; four waits take longer


@pytest.fixture(scope="module")
def full() -> Iterator[Daemon]:
    """A daemon whose arena is reserved to the last slot."""
    settings = (f"dram.capacity={ARENA_NBYTES}", f"dram.extent={ARENA_NBYTES}")
    keys = sample_keys("held", 2 * ARENA_NBYTES // NBYTES)
    spans = [Span(Part(0, 0), 0, len(keys))]
    with (
        Daemon(*settings, "limits.lease_s=20", file=False) as daemon,
        Client(daemon.start().target) as holder,
    ):
        holder.register(SPACE)
        until(lambda: holder.admin.stats()["dram"]["reserved_bytes"] >= ARENA_NBYTES)
        grant = holder.reserve(SPACE.id, keys, first_block=0, parent=None, spans=spans)
        assert grant.refused == len(keys) // 2
        yield daemon


@pytest.fixture(params=["local", "remote"])
def client(
    request: pytest.FixtureRequest, full: Daemon, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Client]:
    """A client of the full daemon, over each of the two data paths."""
    monkeypatch.setattr("kvstore.client.bulk.STREAM_WINDOW_NBYTES", WINDOW_NBYTES)
    with Client(full.target, arena=request.param == "local") as client:
        client.register(SPACE)
        yield client


def save(client: Client, counters: Counters, deadline_s: float = WAIT_S) -> list[bool]:
    pages = Pages(Limits(1.0, 1.0, deadline_s, NBYTES), counters)
    places = [Place(SPACE, key) for key in KEYS]
    return client.submit(lambda remote: pages.save(remote, places, [RECORD] * len(KEYS))).result()


def test_a_put_of_many_windows_waits_as_long_as_one(client: Client) -> None:
    began = time.monotonic()
    done = client.put(SPACE.id, KEYS, [RECORD] * len(KEYS), wait_s=WAIT_S)
    took_s = time.monotonic() - began
    assert done.refused == len(KEYS)
    assert WAIT_S <= took_s < MOST_S


def test_a_save_that_finds_no_room_does_not_take_the_daemon_for_gone(client: Client) -> None:
    counters, began = Counters(), time.monotonic()
    assert save(client, counters) == [False] * len(KEYS)
    assert time.monotonic() - began < MOST_S
    assert client.available
    assert client._client.breaker_trips == 0
    assert counters.no_room + counters.late == len(KEYS)


def test_a_save_that_is_late_asks_before_it_takes_the_daemon_for_gone(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: Any, **__: Any) -> Grant:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(pages_module, "STALL_S", 0.05)
    monkeypatch.setattr(Session, "reserve", never)
    counters = Counters()
    with Client(daemon.target) as client:
        client.register(SPACE)
        assert save(client, counters, 0.1) == [False] * len(KEYS)
        assert client.available
        assert client._client.breaker_trips == 0
    assert counters.late == len(KEYS)


def test_a_save_to_a_daemon_that_is_stopped_takes_it_for_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pages_module, "STALL_S", 0.05)
    monkeypatch.setattr(pages_module, "ANSWER_S", 0.1)
    with Daemon(file=False) as daemon, Client(daemon.start().target) as client:
        client.register(SPACE)
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            with pytest.raises(Unavailable):
                save(client, Counters(), 0.1)
            assert not client.available
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        until(lambda: client.available)


class Full:
    """A session beside a sealed arena that is full. waits: how long each reserve may wait."""

    staging_nbytes = 8 * RECORD_NBYTES

    def __init__(self) -> None:
        self.waits: list[float] = []

    async def reserve(self, *args: Any, wait_s: float, **options: Any) -> Grant:
        self.waits.append(wait_s)
        await asyncio.sleep(wait_s)
        none = (None,) * len(args[1])
        return Grant(len(self.waits), 30.0, (), none, (0,) * len(none), 0, refused=len(none))

    async def commit(self, *_: Any) -> Committed:
        return Committed(0, 0, 0, durable=False)


def test_the_pieces_of_a_staged_put_wait_as_long_as_one() -> None:
    session: Any = Full()
    copiers = Copiers()
    batch = Batch(SPACE.id, sample_keys("pieces", 12), Part(0, 0), RECORD_NBYTES)
    records = [memoryview(each) for each in sample_records([*batch.keys])]
    asyncio.run(InPlace(session, copiers).put(batch, records, False, Patience(WAIT_S)))
    copiers.close()
    assert session.waits == [WAIT_S, *[0.0] * (len(session.waits) - 1)]
    assert len(session.waits) > 2


def test_a_get_over_streams_waits_as_long_for_all_windows_as_for_one(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_s, waits = 0.3, list[float]()
    received, read_stream = Streams._received, streams_module._read_stream

    async def noted(streams: Streams, batch: Batch, patience: Patience) -> Any:
        waits.append(patience.left_s)
        return await received(streams, batch, patience)

    async def slow(*args: Any) -> Any:
        await asyncio.sleep(0.2)  # as if a disk were slow
        return await read_stream(*args)

    monkeypatch.setattr(Streams, "_received", noted)
    monkeypatch.setattr(streams_module, "_read_stream", slow)
    keys = sample_keys("windows", 2 * WINDOW_KEYS + 1)

    async def get() -> list[bytes | None]:
        client = AsyncClient(daemon.target, arena=False)
        try:
            namespace_id = await client.register(SMALL)
            await client.put(namespace_id, keys[:1], sample_records(keys[:1], 128))
            return await client.get(namespace_id, keys, wait_s=wait_s)
        finally:
            await client.close()

    got = asyncio.run(get())
    assert got[:2] == [*sample_records(keys[:1], 128), None]
    assert waits[0] == wait_s
    assert waits[1] <= wait_s - 0.19
    assert waits[2] == 0.0
