"""A client that is closed leaves nobody waiting, and gives no memory back that is written to."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator

import pytest

from kvstore import AsyncClient, Client, InvalidRequest, KVStoreError, Unavailable
from kvstore.client.copying import Copiers
from kvstore.client.loop_thread import LoopThread
from kvstore.testing.daemon import Daemon
from kvstore.testing.wait import until


class HeldCopy:
    """A call of a client that waits for a copy, made by a thread of its own."""

    def __init__(self, client: Client) -> None:
        self.may_end = threading.Event()
        self.begun = threading.Event()
        self.over = False  # the copy
        self.error: KVStoreError | None = None
        self._copiers = Copiers()
        self._client = client
        self.thread = threading.Thread(target=self._wait, daemon=True)
        self.thread.start()
        assert self.begun.wait(10)

    def _copy(self, _: int) -> None:
        self.begun.set()
        self.may_end.wait(30)
        self.over = True

    def _wait(self) -> None:
        try:
            self._client.submit(lambda _: self._copiers.map(self._copy, [1])).result()
        except KVStoreError as error:
            self.error = error


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with Client(daemon.target) as client:
        client.connect()
        yield client


def test_a_thread_that_waits_for_a_copy_goes_on_when_that_has_ended(client: Client) -> None:
    held = HeldCopy(client)
    closing = threading.Thread(target=client.close)
    closing.start()
    held.thread.join(0.3)
    assert held.thread.is_alive()
    held.may_end.set()
    held.thread.join(10)
    assert held.over
    assert isinstance(held.error, Unavailable)
    closing.join(10)


def test_a_copy_that_does_not_end_is_waited_for_so_long(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.client.loop_thread.END_TIMEOUT_S", 0.1)
    held = HeldCopy(client)
    client.close()
    held.thread.join(10)
    assert isinstance(held.error, Unavailable)
    assert not held.over
    held.may_end.set()


def test_calls_that_go_on_while_a_client_is_closed_all_end(daemon: Daemon) -> None:
    client = Client(daemon.target)
    client.connect()
    errors: list[KVStoreError] = []

    def call() -> None:
        try:
            while True:
                client.admin.stats()
        except KVStoreError as error:
            errors.append(error)

    threads = [threading.Thread(target=call, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    client.close()
    until(lambda: len(errors) == len(threads))
    thread: LoopThread = client._thread
    until(lambda: not thread._thread.is_alive())
    assert not thread._calls


def test_a_client_that_cannot_be_made_leaves_no_thread_behind() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    def threads() -> int:
        return sum(each.name == "kvstore-client" for each in threading.enumerate())

    before = descriptors(), threads()
    for _ in range(8):
        with pytest.raises(InvalidRequest):
            Client("unix:/nowhere", copy_threads=0)
    assert (descriptors(), threads()) == before


def test_a_connection_whose_close_is_cancelled_leaves_no_socket(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cancelled(remote: AsyncClient) -> int:
        connection = await remote._caller.connected()
        assert connection.arena is not None
        monkeypatch.setattr(connection.channel, "close", asyncio.Event().wait)
        closing = asyncio.create_task(connection.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        return connection.arena._connection.fileno()

    assert client.submit(cancelled).result(10) == -1
