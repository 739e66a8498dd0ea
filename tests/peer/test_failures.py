"""A lender that dies, stops, is slow or cut off, and a network that flips bits: a typed error each
time, soon, and nothing writes into targets any more."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from kvstore.peer import control
from kvstore.peer.base import PeerCorrupt, PeerError, PeerGone, PeerSlow
from kvstore.peer.bulk import SILENCE_S, Bulk
from kvstore.peer.identity import Ourselves
from kvstore.peer.tcp import TcpLink, dial
from kvstore.peer.wire import Frame, Kind
from kvstore.testing.lender import MemoryLender, MemoryLoan
from kvstore.testing.peer_link import LARGE_NBYTES, full_span, soon, until
from kvstore.testing.relay import Relay, relayed
from kvstore.testing.samples import sample_keys, sample_namespace, sample_record
from tests.peer.fleet import BORROWER, LENDER, Certificates, Served, ourselves, served
from tests.peer.lender_process import MODEL

LARGE = sample_namespace("large", LARGE_NBYTES)
SMALL_NBYTES = 200_000
SMALL = sample_namespace("small", SMALL_NBYTES)
KEYS = sample_keys("failures", 4)


def through_relay(
    test: Callable[[MemoryLender, Served, Relay, TcpLink], Awaitable[None]],
    there: Ourselves | None = None,
    here: Ourselves | None = None,
) -> None:
    """Run a test on a link whose every connection passes a relay."""

    async def main() -> None:
        lender = MemoryLender()
        for namespace, nbytes in ((LARGE, LARGE_NBYTES), (SMALL, SMALL_NBYTES)):
            lender.register(namespace)
            for key in KEYS[: 1 if namespace is LARGE else 4]:
                lender.put(namespace, key, sample_record(key, nbytes))
        async with asyncio.timeout(30), served(there or ourselves(LENDER), lender) as found:
            async with relayed(found.server.port) as relay:
                link = await found.dial(here or ourselves(BORROWER), port=relay.port)
                await test(lender, found, relay, link)
                await link.close()
            await until(lambda: found.server.lending.reads == 0)
        assert all(loan.released == 1 for loan in lender.loans)

    asyncio.run(main())


async def read_small(link: TcpLink, deadline: float | None = None) -> list[bytes]:
    incoming = await link.read(SMALL, KEYS, full_span(4), deadline=deadline or soon())
    targets = [memoryview(bytearray(SMALL_NBYTES)) for _ in KEYS]
    await incoming.fill(targets)
    return [bytes(each) for each in targets]


EXPECTED = [sample_record(key, SMALL_NBYTES) for key in KEYS]

# ---- the network ---------------------------------------------------------------------------------


def test_a_flipped_bit_is_seen_by_the_checksum() -> None:
    async def test(lender: MemoryLender, found: Served, relay: Relay, link: TcpLink) -> None:
        relay.flip, relay.after = True, 500_000
        with pytest.raises(PeerCorrupt) as caught:
            await read_small(link)
        assert caught.value.records == (2,)
        relay.flip = False
        assert await read_small(link) == EXPECTED

    through_relay(test)


@pytest.mark.parametrize("after", [10, 150, 60_000, 500_000])
def test_a_flipped_bit_of_a_sealed_read_is_seen_wherever_it_is(after: int, tmp_path: Path) -> None:
    fleet = Certificates(tmp_path)
    there = ourselves(LENDER, trust=fleet.trust(LENDER), sealed=True)
    here = ourselves(BORROWER, trust=fleet.trust(BORROWER), sealed=True)

    async def test(lender: MemoryLender, found: Served, relay: Relay, link: TcpLink) -> None:
        relay.flip, relay.after = True, after
        with pytest.raises(PeerCorrupt) as caught:
            await read_small(link)
        assert caught.value.reason in ("sealed", "answer")
        relay.flip = False
        assert await read_small(link) == EXPECTED

    through_relay(test, there, here)


@pytest.mark.parametrize("after", [0, 40, 400_000])
def test_a_connection_that_is_cut_ends_the_read(after: int) -> None:
    async def test(lender: MemoryLender, found: Served, relay: Relay, link: TcpLink) -> None:
        relay.cut, relay.after = True, after
        with pytest.raises(PeerGone):
            await read_small(link)
        relay.cut = False
        assert link.open
        assert await read_small(link) == EXPECTED

    through_relay(test)


@pytest.mark.parametrize("after", [0, 400_000])
def test_a_silence_ends_the_read(after: int) -> None:
    async def test(lender: MemoryLender, found: Served, relay: Relay, link: TcpLink) -> None:
        relay.stall, relay.after = True, after
        began = time.monotonic()
        with pytest.raises(PeerSlow) as caught:
            await read_small(link)
        assert caught.value.reason == "silent"
        assert SILENCE_S - 0.2 < time.monotonic() - began < SILENCE_S + 1.5
        relay.stall = False
        assert await read_small(link) == EXPECTED

    through_relay(test)


def test_a_slow_network_is_given_up_at_the_deadline() -> None:
    async def test(lender: MemoryLender, found: Served, relay: Relay, link: TcpLink) -> None:
        relay.bytes_per_s = 200_000
        began = time.monotonic()
        with pytest.raises(PeerSlow) as caught:
            await read_small(link, time.monotonic() + 0.5)
        assert caught.value.reason == "deadline"
        assert time.monotonic() - began < 1.5
        relay.bytes_per_s = 0
        assert await read_small(link) == EXPECTED

    through_relay(test)


def test_a_borrower_that_does_not_read_ends_its_own_read() -> None:
    """Its slots are given back, others are served, and it is counted: also where the kernel has
    taken all of a small answer."""

    async def test(lender: MemoryLender, found: Served, relay: Relay, link: TcpLink) -> None:
        for count, (namespace, nbytes, keys) in enumerate(
            ((LARGE, LARGE_NBYTES, KEYS[:1]), (SMALL, SMALL_NBYTES, KEYS))
        ):
            spans, here = full_span(len(keys)), ourselves(BORROWER)
            direct = await found.dial(here)  # a relay would read
            before = found.server.connections
            incoming = await direct.read(namespace, keys, spans, deadline=soon())
            began = time.monotonic()
            await until(lambda before=before: found.server.connections == before)
            assert time.monotonic() - began < 5 * SILENCE_S
            assert found.server.lending.reads == 0
            assert lender.loans[-1].released == 1
            assert found.refused == {"peer_slow": count + 1}
            with pytest.raises(PeerError):
                await incoming.fill([memoryview(bytearray(nbytes)) for _ in keys])
            assert await read_small(direct) == EXPECTED
            await direct.close()

    through_relay(test)


def test_a_borrower_that_asks_and_does_not_read_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "UNREAD_NBYTES_MAX", 1 << 10)

    async def test(lender: MemoryLender, found: Served, relay: Relay, link: TcpLink) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", found.server.port, limit=1 << 10)
        writer.write(Frame(Kind.HELLO, 1, ourselves(BORROWER).hello(), 5.0).encode())

        async def ask() -> bool:
            writer.write(b"".join(Frame(Kind.PING, 2, b"", 5.0).encode() for _ in range(2000)))
            await asyncio.sleep(0.01)
            return bool(found.refused["peer_slow"])

        async with asyncio.timeout(20):
            while not await ask():
                pass
        writer.transport.abort()

    through_relay(test)


def test_a_peer_that_reads_a_little_now_and_then_is_not_waited_for() -> None:
    """The kernel waits for it as long as it goes on."""

    async def reads_a_little(slow: socket.socket) -> None:
        while True:
            with suppress(BlockingIOError):
                slow.recv(2048)
            await asyncio.sleep(0.05)

    async def main(slow: socket.socket, connection: socket.socket) -> None:
        reading = asyncio.create_task(reads_a_little(slow))
        bulk = Bulk(connection)
        began = time.monotonic()
        with pytest.raises(PeerSlow, match="no room"):
            async with asyncio.timeout(4 * SILENCE_S):
                await bulk.send_bytes(bytes(16 << 20))
        assert time.monotonic() - began > SILENCE_S - 0.1
        reading.cancel()
        bulk.close()

    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(listener.getsockname())
        connection, _ = listener.accept()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 << 20)
        for each in (slow, connection):
            each.setblocking(False)
        asyncio.run(main(slow, connection))


class StuckLender(MemoryLender):
    """What it is asked for, it never finds."""

    async def lend(self, *_: object) -> MemoryLoan:
        await asyncio.Event().wait()
        raise AssertionError("not reached")


def test_what_is_not_found_is_looked_for_as_long_as_its_borrower_waits() -> None:
    async def main() -> None:
        lender = StuckLender()
        lender.register(SMALL)
        async with asyncio.timeout(20), served(ourselves(LENDER), lender) as found:
            link = await found.dial(ourselves(BORROWER))
            with pytest.raises(PeerError):
                await link.read(SMALL, KEYS, full_span(4), deadline=time.monotonic() + 0.2)
            await until(lambda: found.server.lending.reads == 0)
            await link.close()

    asyncio.run(main())


# ---- the other process ---------------------------------------------------------------------------


@contextmanager
def lender_process() -> Iterator[tuple[subprocess.Popen[str], int]]:
    command = [sys.executable, "-m", "tests.peer.lender_process", str(LARGE_NBYTES), "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lender_that_dies_or_stops_in_a_read(how: signal.Signals) -> None:
    namespace, keys = sample_namespace(MODEL, LARGE_NBYTES), sample_keys(MODEL, 1)

    async def harmed(process: subprocess.Popen[str], link: TcpLink) -> None:
        incoming = await link.read(namespace, keys, full_span(1), deadline=soon())
        os.kill(process.pid, signal.SIGSTOP)
        target = memoryview(bytearray(LARGE_NBYTES))
        filling = asyncio.create_task(incoming.fill([target]))
        await until(lambda: any(target[:64]))
        os.kill(process.pid, how)
        began = time.monotonic()
        with pytest.raises(PeerGone if how == signal.SIGKILL else PeerSlow):
            await filling
        assert time.monotonic() - began < SILENCE_S + 1.5
        left = bytes(target)
        with pytest.raises(PeerError):
            await link.ping(time.monotonic() + 0.2)
        if how == signal.SIGKILL:
            await until(lambda: not link.open)
        assert target == left

    async def main(process: subprocess.Popen[str], port: int) -> None:
        with ThreadPoolExecutor(2) as threads:
            link = await dial(("127.0.0.1", port), ourselves(BORROWER), threads, deadline=soon())
            async with asyncio.timeout(20):
                await harmed(process, link)
            await link.close()

    with lender_process() as (process, port):
        asyncio.run(main(process, port))


def test_a_lender_that_was_stopped_and_goes_on_is_read_again() -> None:
    namespace, keys = sample_namespace(MODEL, LARGE_NBYTES), sample_keys(MODEL, 1)

    async def main(process: subprocess.Popen[str], port: int) -> None:
        with ThreadPoolExecutor(2) as threads:
            link = await dial(("127.0.0.1", port), ourselves(BORROWER), threads, deadline=soon())
            os.kill(process.pid, signal.SIGSTOP)
            with pytest.raises(PeerSlow):
                await link.match(namespace, keys, deadline=time.monotonic() + 0.1)
            os.kill(process.pid, signal.SIGCONT)
            assert (await link.match(namespace, keys, deadline=soon())).hit_blocks == 1
            incoming = await link.read(namespace, keys, full_span(1), deadline=soon())
            target = memoryview(bytearray(LARGE_NBYTES))
            await incoming.fill([target])
            assert target == sample_record(keys[0], LARGE_NBYTES)
            await link.close()

    with lender_process() as (process, port):
        asyncio.run(main(process, port))
