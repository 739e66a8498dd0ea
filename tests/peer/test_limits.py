"""What is lent at once, in a second, and by how many connections; and what lies in files."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest

from kvstore.model.block import PAGE_NBYTES, BlockKey, FilePlace, Part, Span
from kvstore.model.checksum import checksum
from kvstore.model.errors import InvalidRequest
from kvstore.model.member import NodeId
from kvstore.model.tenant import NO_TENANT_ID
from kvstore.peer import connections, lending, serving
from kvstore.peer.base import (
    HeadsAsk,
    HeadsReply,
    PeerBusy,
    PeerCorrupt,
    PeerGone,
    PeerIncompatible,
    PeerSlow,
)
from kvstore.peer.bulk import Bulk
from kvstore.peer.messages import BulkBody, decode_ticket, encode
from kvstore.peer.tcp import TcpLink
from kvstore.peer.wire import BULK_MAGIC, OPENING, Kind
from kvstore.testing.lender import MemoryLender
from kvstore.testing.peer_link import LARGE_NBYTES, full_span, soon, until
from kvstore.testing.samples import sample_keys, sample_namespace, sample_record
from tests.peer.fleet import BORROWER, LENDER, Served, ourselves, served

RECORD_NBYTES = 100_000
NAMESPACE = sample_namespace("limits", RECORD_NBYTES)
LARGE = sample_namespace("large", LARGE_NBYTES)


def run(test: Callable[[MemoryLender, Served, TcpLink], Awaitable[None]], **limits: int) -> None:
    async def main() -> None:
        lender = MemoryLender()
        lender.register(NAMESPACE)
        lender.register(LARGE)
        async with asyncio.timeout(30), served(ourselves(LENDER), lender, **limits) as found:
            link = await found.dial(ourselves(BORROWER))
            await test(lender, found, link)
            await link.close()
        assert all(loan.released == 1 for loan in lender.loans)

    asyncio.run(main())


def lend(lender: MemoryLender, name: str, count: int) -> list[BlockKey]:
    keys = sample_keys(name, count)
    for key in keys:
        lender.put(NAMESPACE, key, sample_record(key, RECORD_NBYTES))
    return keys


async def read(link: TcpLink, keys: list[BlockKey]) -> list[bytes]:
    incoming = await link.read(NAMESPACE, keys, full_span(len(keys)), deadline=soon())
    targets = [memoryview(bytearray(nbytes)) for nbytes in incoming.sizes]
    await incoming.fill(targets)
    return [bytes(each) for each in targets]


# ---- at once, and in a second --------------------------------------------------------------------


def test_beyond_its_reads_a_lender_is_busy() -> None:
    async def test(lender: MemoryLender, found: Served, link: TcpLink) -> None:
        (key,) = sample_keys("long", 1)
        lender.put(LARGE, key, bytes(LARGE_NBYTES))
        lend(lender, "long", 1)
        held = await link.read(LARGE, [key], full_span(1), deadline=soon())
        with pytest.raises(PeerBusy) as caught:
            await link.read(NAMESPACE, [key], full_span(1), deadline=soon())
        assert caught.value.reason == "busy"
        assert found.refused["busy"] == 1
        assert (await link.match(NAMESPACE, [key], deadline=soon())).busy
        await held.close()
        await until(lambda: found.server.lending.reads == 0)
        assert len(await read(link, [key])) == 1

    run(test, serve_reads=1)


def test_a_lender_that_drains_ends_what_it_began() -> None:
    async def test(lender: MemoryLender, found: Served, link: TcpLink) -> None:
        (key,) = sample_keys("drain", 1)
        lender.put(LARGE, key, sample_record(key, LARGE_NBYTES))
        held = await link.read(LARGE, [key], full_span(1), deadline=soon())
        found.server.drain()
        with pytest.raises(PeerBusy) as caught:
            await link.read(LARGE, [key], full_span(1), deadline=soon())
        assert caught.value.reason == "draining"
        assert (await link.match(LARGE, [key], deadline=soon())).busy
        assert not await found.server.lending.ended(0.01)
        target = memoryview(bytearray(LARGE_NBYTES))
        await held.fill([target])
        assert target == sample_record(key, LARGE_NBYTES)
        assert await found.server.lending.ended(5.0)

    run(test)


def test_what_a_lender_had_sent_when_it_stopped_counts() -> None:
    async def test(lender: MemoryLender, found: Served, link: TcpLink) -> None:
        keys = lend(lender, "stopped", 2)
        incoming = await link.read(NAMESPACE, keys, full_span(2), deadline=soon())
        assert await found.server.lending.ended(5.0)
        await found.server.close()
        await until(lambda: not link.open)
        targets = [memoryview(bytearray(nbytes)) for nbytes in incoming.sizes]
        await incoming.fill(targets)
        assert targets == [sample_record(key, RECORD_NBYTES) for key in keys]

    run(test)


def test_so_many_bytes_a_second_are_lent() -> None:
    async def test(lender: MemoryLender, found: Served, link: TcpLink) -> None:
        keys = lend(lender, "rate", 8)
        began = time.monotonic()
        for _ in range(6):
            await read(link, keys)  # 0.8 MB each; a quarter of a second's is free
        assert 0.4 < time.monotonic() - began < 5.0
        found.server.lending.set_rate(100_000)
        await read(link, keys)
        with pytest.raises(PeerBusy) as caught:
            await read(link, keys)
        assert caught.value.retry_after_s > 1.0

    run(test, bytes_per_s=4_000_000)


# ---- connections ---------------------------------------------------------------------------------


def test_connections_are_made_on_demand_and_closed_when_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "IDLE_S", 0.2)

    async def test(lender: MemoryLender, found: Served, link: TcpLink) -> None:
        keys = lend(lender, "idle", 2)
        assert link.reads.connections.count == 0
        await asyncio.gather(*(read(link, keys) for _ in range(12)))
        assert 1 <= link.reads.connections.count <= connections.CONNECTIONS_MAX
        await until(lambda: link.reads.connections.count == 0)
        await until(lambda: found.server.connections == 1)  # the control connection
        assert len(await read(link, keys)) == 2

    run(test)


def test_a_connection_that_the_lender_has_closed_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lending, "IDLE_S", 0.1)

    async def test(lender: MemoryLender, found: Served, link: TcpLink) -> None:
        keys = lend(lender, "replaced", 2)
        await read(link, keys)
        await until(lambda: found.server.connections == 1)
        assert link.reads.connections.count == 1
        assert len(await read(link, keys)) == 2

    run(test)


def test_a_connection_that_was_reset_while_nobody_used_it_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def reset(self: Bulk) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    monkeypatch.setattr(lending, "IDLE_S", 0.1)
    monkeypatch.setattr(Bulk, "close", reset)

    async def test(lender: MemoryLender, found: Served, link: TcpLink) -> None:
        keys = lend(lender, "reset", 2)
        for _ in range(2):
            await read(link, keys)
            await until(lambda: found.server.connections == 1)
            assert link.reads.connections.count == 1
        most = connections.CONNECTIONS_MAX * connections.READS_MAX
        turns = [await link.reads.connections.take(soon()) for _ in range(most)]
        for turn in turns:
            link.reads.connections.give(turn, good=False)

    run(test)


@pytest.mark.parametrize("first_ends_well", [True, False])
def test_the_next_read_is_asked_for_while_one_is_on_its_way(
    monkeypatch: pytest.MonkeyPatch, *, first_ends_well: bool
) -> None:
    monkeypatch.setattr(connections, "CONNECTIONS_MAX", 1)
    monkeypatch.setattr(connections, "READS_MAX", 3)

    async def test(lender: MemoryLender, found: Served, link: TcpLink) -> None:
        keys = lend(lender, "next", 3)
        first = await link.read(NAMESPACE, keys, full_span(3), deadline=soon())
        others = [asyncio.create_task(read(link, keys[:count])) for count in (1, 2)]
        await until(lambda: link.reads.connections._lanes[0].bulk is not None)
        await asyncio.sleep(0.1)
        assert not any(each.done() for each in others), "records come in order"
        (lane,) = link.reads.connections._lanes
        assert len(lane.turns) == 3
        if first_ends_well:
            await first.fill([None] * 3)
        else:
            await first.close()  # and with it the connection: the others are asked for again
        assert [len(await each) for each in others] == [1, 2]
        assert lane.ended is not first_ends_well
        assert link.reads.connections.count == 1

    run(test)


def test_a_ticket_is_good_once_and_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(lender: MemoryLender, found: Served, link: TcpLink) -> None:
        async def ticket() -> bytes:
            calls = link.reads.connections._calls
            return decode_ticket(await calls.call(Kind.BULK, encode(BulkBody()), 5.0)).token

        async def connect(token: bytes) -> asyncio.StreamWriter:
            _, writer = await asyncio.open_connection("127.0.0.1", found.server.port)
            writer.write(OPENING.pack(BULK_MAGIC, token))
            await writer.drain()
            return writer

        token = await ticket()
        first = await connect(token)
        await until(lambda: found.server.connections == 2)
        second = await connect(token)
        await until(lambda: found.refused["token"] == 1)
        monkeypatch.setattr(serving, "TICKET_S", -1.0)
        third = await connect(await ticket())
        await until(lambda: found.refused["token"] == 2)
        monkeypatch.setattr(serving, "TICKET_S", 5.0)
        for _ in range(serving.TICKETS_MAX):
            await ticket()
        with pytest.raises(PeerBusy):
            await ticket()
        for each in (first, second, third):
            each.close()

    run(test)


def test_sealing_without_tls_is_refused() -> None:
    async def test(lender: MemoryLender, found: Served, link: TcpLink) -> None:
        link.reads.connections._sealed = True
        with pytest.raises(PeerIncompatible) as caught:
            await link.read(NAMESPACE, lend(lender, "bulk", 1), full_span(1), deadline=soon())
        assert caught.value.reason == "bulk"

    run(test)


def test_the_link_ends_with_its_bulk_connections() -> None:
    async def test(lender: MemoryLender, found: Served, link: TcpLink) -> None:
        (key,) = sample_keys("ends", 1)
        lender.put(LARGE, key, bytes(LARGE_NBYTES))
        incoming = await link.read(LARGE, [key], full_span(1), deadline=soon())
        await link.close()
        with pytest.raises(PeerGone):
            await incoming.fill([memoryview(bytearray(LARGE_NBYTES))])
        await until(lambda: found.server.connections == 0)
        await until(lambda: found.server.lending.reads == 0)

    run(test)


def test_a_chunk_of_heads_without_any_is_the_last_one() -> None:
    async def test(lender: MemoryLender, found: Served, link: TcpLink) -> None:
        async def told(ask: HeadsAsk) -> HeadsReply:
            return HeadsReply(lender.instance, ask.level, 0, True, goes_on and ask.cursor + 1)

        lender.heads = told  # type: ignore[method-assign]
        goes_on = 0
        assert (await link.heads(HeadsAsk(), deadline=soon())).heads == b""
        goes_on = 1
        with pytest.raises(PeerCorrupt):
            await link.heads(HeadsAsk(), deadline=soon())
        await until(lambda: link.fault is not None)  # what is held against the host

    run(test)


def test_what_was_sent_is_remembered_of_so_many_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending, "SENT_TO_MAX", 2)

    async def test(lender: MemoryLender, found: Served, link: TcpLink) -> None:
        await read(link, lend(lender, "sent", 2))
        (first,) = found.server.sent_nbytes
        for node in ("a", "b"):
            found.server.lending.note_lent(NodeId(node), NO_TENANT_ID, 1)
            await read(link, lend(lender, f"sent to {node}", 2))
        assert set(found.server.sent_nbytes) == {first, (NodeId("b"), NO_TENANT_ID)}

    run(test)


# ---- files ---------------------------------------------------------------------------------------


def test_what_lies_in_files_is_read_from_its_place(tmp_path: Path) -> None:
    nbytes = 2_500_000  # several pieces, and not whole pages
    namespace = sample_namespace("files", nbytes)
    data = [Random(i).randbytes(nbytes) for i in range(3)]
    room = -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES
    path = tmp_path / "segment"
    path.write_bytes(bytes(PAGE_NBYTES) + b"".join(each.ljust(room, b"\7") for each in data))

    async def test(lender: MemoryLender, found: Served, link: TcpLink) -> None:
        lender.register(namespace)
        keys = sample_keys("files", 4)
        for number, key in enumerate(keys[:3]):
            place = FilePlace(str(path), PAGE_NBYTES + number * room, nbytes)
            lender.put_file(namespace, key, place, checksum(data[number]))
        lender.put(namespace, keys[3], sample_record(keys[3], nbytes))
        incoming = await link.read(namespace, keys, full_span(4), deadline=soon())
        targets = [memoryview(bytearray(nbytes)) for _ in keys]
        await incoming.fill(targets)
        assert targets == [*data, sample_record(keys[3], nbytes)]
        assert found.server.sent_nbytes == {(BORROWER, NO_TENANT_ID): 4 * nbytes}
        assert link.reads.received_nbytes == 4 * nbytes

    run(test)


def test_a_file_that_is_cut_ends_the_read(tmp_path: Path) -> None:
    path = tmp_path / "segment"
    path.write_bytes(bytes(PAGE_NBYTES))

    async def test(lender: MemoryLender, found: Served, link: TcpLink) -> None:
        (key,) = sample_keys("cut", 1)
        for place in (FilePlace(str(path), 0, RECORD_NBYTES), FilePlace("/none", 0, 10)):
            wanted = FilePlace(place.path, place.offset, RECORD_NBYTES)
            lender.put_file(NAMESPACE, key, wanted, 0)
            with pytest.raises(PeerGone):
                await read(link, [key])
        assert len(await read(link, lend(lender, "whole", 1))) == 1

    run(test)


def test_a_read_of_more_than_a_window_is_refused_by_the_lender(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lending, "READ_NBYTES_MAX", RECORD_NBYTES)

    async def test(lender: MemoryLender, found: Served, link: TcpLink) -> None:
        keys = lend(lender, "window", 2)
        with pytest.raises(PeerIncompatible) as caught:
            await read(link, keys)
        assert caught.value.reason == "request"
        assert len(await read(link, keys[:1])) == 1

    run(test)


def test_a_record_is_filled_once() -> None:
    async def test(lender: MemoryLender, found: Served, link: TcpLink) -> None:
        keys = lend(lender, "once", 1)
        incoming = await link.read(NAMESPACE, keys, [Span(Part(0, 0), 0, 1)], deadline=soon())
        await incoming.fill([None])
        with pytest.raises(InvalidRequest):
            await incoming.fill([None])

    run(test)


def test_without_a_thread_there_is_no_read() -> None:
    async def test(lender: MemoryLender, found: Served, link: TcpLink) -> None:
        keys = lend(lender, "threads", 2)
        threads, link.reads.threads = link.reads.threads, ThreadPoolExecutor(1)
        link.reads.threads.shutdown()
        with pytest.raises(PeerGone, match="no thread"):
            await read(link, keys)
        link.reads.threads = threads
        assert len(await read(link, keys)) == 2

    run(test)


def test_a_lender_whose_records_are_shorter_or_longer_than_it_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing of it counts, and nobody waits for long."""

    async def test(lender: MemoryLender, found: Served, link: TcpLink) -> None:
        keys = lend(lender, "lies", 2)
        place = (NAMESPACE.id, keys[1], Part(0, 0))
        good = lender.records[place]
        assert good.view is not None
        longer = memoryview(bytes(RECORD_NBYTES) + b"\0\0\0")
        lender.records[place] = good._replace(view=longer)
        with pytest.raises((PeerCorrupt, PeerGone)):
            await read(link, keys)
        lender.records[place] = good._replace(view=good.view[:-9])
        began = time.monotonic()
        with pytest.raises(PeerSlow) as caught:  # for the bytes that never come
            await read(link, keys)
        assert time.monotonic() - began < 4.0, caught.value
        lender.records[place] = good
        assert len(await read(link, keys)) == 2

    run(test)
