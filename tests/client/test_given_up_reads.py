"""A get that is given up ends when nothing writes to its targets any more, whoever else hurries."""

from __future__ import annotations

import asyncio
import mmap
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kvstore import AsyncClient, Unavailable
from kvstore.client.file_reads import FileReads
from kvstore.model.block import Grant
from kvstore.testing.daemon import Daemon, restarted_with
from kvstore.testing.samples import sample_keys, sample_namespace, sample_records

NBYTES = 1 << 16  # whole pages
KEYS = sample_keys("given up", 8)
RECORDS = sample_records(KEYS, NBYTES)
SPACE = sample_namespace("given up", NBYTES)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with restarted_with(SPACE, KEYS, RECORDS) as daemon:
        yield daemon


class HeldReads:
    """Reads that have begun, and end when they may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        self._read = os.preadv
        monkeypatch.setattr("kvstore.client.file_reads.os.preadv", self._held)

    def _held(self, *arguments: Any) -> int:
        self.begun.set()
        self.may_end.wait(30)
        return self._read(*arguments)


def run(daemon: Daemon, held: HeldReads, monkeypatch: pytest.MonkeyPatch, cancels: int) -> None:
    """Have one piece of a get fail while another one is read; cancel the get as often."""
    monkeypatch.setattr("kvstore.client.in_place.LARGE_PIECE_NBYTES", NBYTES)
    acquire, asked = AsyncClient.acquire, []

    async def acquire_once(client: AsyncClient, *args: Any, **options: Any) -> Grant:
        asked.append(args)
        if len(asked) == 1:
            return await acquire(client, *args, **options)
        await asyncio.to_thread(held.begun.wait, 10)
        raise Unavailable("as if the daemon had gone")

    monkeypatch.setattr(AsyncClient, "acquire", acquire_once)

    async def given_up() -> None:
        client = AsyncClient(daemon.target)
        view = memoryview(mmap.mmap(-1, len(KEYS) * NBYTES))
        targets = [view[at : at + NBYTES] for at in range(0, len(view), NBYTES)]
        try:
            await client.register(SPACE)
            got = asyncio.create_task(
                client.get_into(SPACE.id, KEYS, targets, wait_s=10.0, from_files=True)
            )
            assert await asyncio.to_thread(held.begun.wait, 10)
            for _ in range(cancels):
                await asyncio.sleep(0.1)
                got.cancel()
            await asyncio.sleep(0.1)
            settling = asyncio.create_task(client.settled())
            await asyncio.sleep(0.1)
            assert not got.done()
            assert not settling.done()
            held.may_end.set()
            await asyncio.wait([got, settling])
            assert got.cancelled() or isinstance(got.exception(), Unavailable)
            view[:] = bytes(len(view))
            await asyncio.sleep(0.1)
            assert not any(view)
        finally:
            held.may_end.set()
            await client.close()

    asyncio.run(asyncio.wait_for(given_up(), 30))


@pytest.mark.parametrize("cancels", [0, 1, 3])
def test_a_piece_that_is_read_is_waited_for_when_another_one_fails(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, cancels: int
) -> None:
    run(daemon, HeldReads(monkeypatch), monkeypatch, cancels)


def test_where_no_more_threads_begin_the_reads_that_did_are_waited_for(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldReads(monkeypatch)

    async def get() -> None:
        client = AsyncClient(daemon.target)
        view = memoryview(mmap.mmap(-1, len(KEYS) * NBYTES))
        targets = [view[at : at + NBYTES] for at in range(0, len(view), NBYTES)]
        files: FileReads = client._bulk._in_place._files
        submit, submitted = files._threads.submit, []

        def submit_one(*work: Any) -> Any:
            if submitted:
                raise RuntimeError("can't start new thread")
            submitted.append(work)
            return submit(*work)

        monkeypatch.setattr(files._threads, "submit", submit_one)
        try:
            await client.register(SPACE)
            got = asyncio.create_task(client.get_into(SPACE.id, KEYS, targets, from_files=True))
            assert await asyncio.to_thread(held.begun.wait, 10)
            await asyncio.wait([got], timeout=0.1)
            assert not got.done()
            held.may_end.set()
            with pytest.raises(RuntimeError, match="new thread"):
                await got
        finally:
            held.may_end.set()
            await client.close()

    asyncio.run(asyncio.wait_for(get(), 30))
