"""A disk that hangs under a read of another host: a pipe that nobody writes to opens as slowly."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from kvstore.model.block import FilePlace
from kvstore.peer import lending
from kvstore.peer.base import PeerError
from kvstore.testing.lender import MemoryLender
from kvstore.testing.peer_link import full_span, soon, until
from kvstore.testing.samples import sample_keys, sample_namespace
from tests.peer.fleet import BORROWER, LENDER, ourselves, served

NBYTES = 100_000
NAMESPACE = sample_namespace("hung", NBYTES)


def test_it_keeps_its_own_read_and_not_the_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lending, "STOP_S_MAX", 0.2)
    pipe = tmp_path / "segment"
    os.mkfifo(pipe)

    async def main() -> None:
        lender = MemoryLender()
        lender.register(NAMESPACE)
        (key,) = sample_keys("hung", 1)
        lender.put_file(NAMESPACE, key, FilePlace(str(pipe), 0, NBYTES), 1)
        async with served(ourselves(LENDER), lender) as found:
            link = await found.dial(ourselves(BORROWER))
            lends = found.server.lending
            with pytest.raises(PeerError):
                await link.read(NAMESPACE, [key], full_span(1), deadline=time.monotonic() + 0.3)
            await until(lambda: "lending=hangs" in caplog.text)
            assert lends.reads == 1, "the thread still has it"
            assert not lender.loans[0].released, "its memory is not free either"
            pending = asyncio.create_task(
                link.read(NAMESPACE, [key], full_span(1), deadline=soon())
            )
            await until(lambda: lends.reads == 2)
            await link.close()
            before = time.monotonic()
            await found.server.close()
            assert time.monotonic() - before < 5, "a stop does not wait for a disk"
            await asyncio.gather(pending, return_exceptions=True)
            assert lends.reads == 2
            await until(lambda: goes_on() or not lends.reads)
            assert [loan.released for loan in lender.loans] == [1, 1]

    def goes_on() -> None:
        os.close(os.open(pipe, os.O_RDWR))

    async def bounded() -> None:
        try:
            async with asyncio.timeout(20):
                await main()
        finally:
            goes_on()  # no thread outlives the test

    asyncio.run(bounded())
