"""One-sided links when something is wrong: with the peer, with what it says, with a read's end."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import pytest

from kvstore.model.block import Part
from kvstore.model.errors import Incompatible
from kvstore.peer.base import PeerError, PeerGone, PeerSlow
from kvstore.peer.onesided import grants, reads
from kvstore.peer.onesided.driver import DriverError, Piece, State
from kvstore.peer.onesided.messages import decode_grant_reply, decode_memory
from kvstore.peer.onesided.mover import Mover
from kvstore.peer.onesided.ucx import parse_offer
from kvstore.peer.tcp import TcpLink
from kvstore.system.rdma import devices_up
from kvstore.testing.peer_link import full_span, soon, until
from kvstore.testing.samples import sample_keys, sample_namespace, sample_record
from tests.peer.onesided import Ends, RegisteredLender, ends

NBYTES = 100_000
NAMESPACE_PART = Part(0, 0)
NAMESPACE = sample_namespace("onesided", NBYTES)
KEYS = sample_keys("onesided", 4)
RECORDS = [sample_record(key, NBYTES) for key in KEYS]


@pytest.fixture(scope="module")
def ucx() -> Iterator[Ends]:
    with ends("ucx") as both:
        yield both


def run(both: Ends, test: Callable[[RegisteredLender, TcpLink], Awaitable[None]]) -> None:
    async def main() -> None:
        lender = RegisteredLender()
        for key, record in zip(KEYS, RECORDS, strict=True):
            lender.put(NAMESPACE, key, record)
        async with asyncio.timeout(30), both.linked(lender) as link:
            await test(lender, link)
        assert all(loan.released == 1 for loan in lender.loans)

    both.runner.run(main())


async def read(link: TcpLink, deadline: float | None = None) -> list[bytes]:
    incoming = await link.read(NAMESPACE, KEYS, full_span(len(KEYS)), deadline=deadline or soon())
    targets = [memoryview(bytearray(NBYTES)) for _ in KEYS]
    await incoming.fill(targets)
    return [bytes(each) for each in targets]


class StuckDriver:
    """A driver whose reads end when `ends` says, whatever is asked of it. Not a transport: no real
    one can be made to hang for as long as a test wants."""

    name = "ucx"

    def __init__(self) -> None:
        self.ends = State.UNDER_WAY
        self.disconnected = 0

    def offer(self) -> bytes:
        return b"stuck"

    def register(self, address: int, nbytes: int) -> None: ...

    def withdraw(self, address: int) -> None: ...

    def connect(self, offer: bytes) -> Any:
        return offer

    def disconnect(self, remote: Any) -> None:
        self.disconnected += 1

    def post(self, remote: Any, pieces: Sequence[Piece]) -> Any:
        return pieces

    def state(self, read: Any) -> State:
        return self.ends

    def progress(self) -> None: ...

    def wait(self, wake_fd: int, timeout_s: float, *, reading: bool) -> None:
        time.sleep(0.001)

    def close(self) -> None: ...


def test_targets_stay_in_limbo_until_the_transport_says_the_read_is_over(
    ucx: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "SETTLE_S", 0.05)
    monkeypatch.setattr(reads, "END_S", 0.05)

    async def test(lender: RegisteredLender, link: TcpLink) -> None:
        driver = StuckDriver()
        mover = Mover("ucx", lambda: driver)
        await mover.start()
        link.read_onesided(mover)
        incoming = await link.read(NAMESPACE, KEYS, full_span(4), deadline=time.monotonic() + 1.0)
        with pytest.raises(PeerSlow):
            await incoming.fill([memoryview(bytearray(NBYTES)) for _ in KEYS])
        await mover.offer()  # by then the thread has done all that was asked of it before
        assert driver.disconnected == 1
        limbo = incoming.limbo
        assert limbo is not None
        assert not limbo.done()
        assert link.medium == "tcp"
        assert await read(link) == RECORDS  # by a bulk connection
        assert link.reads.received_nbytes == sum(map(len, RECORDS))
        driver.ends = State.FAILED
        await until(limbo.done)
        await mover.close()

    run(ucx, test)


def test_a_grant_ends_by_itself_and_then_it_was_not_held(
    ucx: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grants, "GRANT_S_MAX", 0.05)

    async def test(lender: RegisteredLender, link: TcpLink) -> None:
        incoming = await link.read(NAMESPACE, KEYS, full_span(4), deadline=soon())
        await until(lambda: lender.loans[-1].released)
        with pytest.raises(PeerGone) as caught:
            await incoming.fill([memoryview(bytearray(NBYTES)) for _ in KEYS])
        assert caught.value.reason == "lease"

    run(ucx, test)


def test_memory_that_came_later_is_read_and_a_withdrawn_one_is_not(ucx: Ends) -> None:
    async def test(lender: RegisteredLender, link: TcpLink) -> None:
        assert await read(link) == RECORDS
        incoming = await link.read(NAMESPACE, KEYS, full_span(4), deadline=soon())
        lender.put(NAMESPACE, KEYS[0], RECORDS[0])  # in other memory
        assert await read(link) == RECORDS
        await incoming.fill([memoryview(bytearray(NBYTES)), None, None, None])
        assert link.medium == "ucx"
        view = lender.records[NAMESPACE.id, KEYS[1], NAMESPACE_PART].view
        assert view is not None
        await ucx.there.withdraw(view)
        assert await read(link) == RECORDS  # by a bulk connection, because not all can be granted
        assert link.reads.received_nbytes == sum(map(len, RECORDS))
        assert link.medium == "ucx"

    run(ucx, test)


def test_a_peer_that_grants_other_memory_than_it_offers_is_read_over_tcp(
    ucx: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(lender: RegisteredLender, link: TcpLink) -> None:
        monkeypatch.setattr(grants, "address_of", lambda view: 1 << 40)
        with pytest.raises(PeerGone):
            await read(link)
        assert link.medium == "tcp"
        assert await read(link) == RECORDS

    run(ucx, test)


def test_reads_of_a_lost_link_end(ucx: Ends) -> None:
    async def test(lender: RegisteredLender, link: TcpLink) -> None:
        incoming = await link.read(NAMESPACE, KEYS, full_span(4), deadline=soon())
        await link.close()
        await until(lambda: lender.loans[-1].released)
        with pytest.raises(PeerError):
            await incoming.fill([memoryview(bytearray(NBYTES)) for _ in KEYS])
        assert incoming.limbo is None

    run(ucx, test)


@pytest.mark.parametrize(
    "offer",
    [
        b"",
        b"\xff" * 8,
        struct.pack("<II", 0, 0),
        struct.pack("<II", 4, 1) + b"addr",
        struct.pack("<II", 4, 1) + b"addr" + struct.pack("<QQI", 0, 9, 99) + b"key",
        struct.pack("<II", 4, 1) + b"addr" + struct.pack("<QQI", 1 << 63, 1 << 63, 1) + b"k",
        struct.pack("<II", 4, 2) + b"addr" + 2 * (struct.pack("<QQI", 9, 9, 1) + b"k"),
        struct.pack("<II", 4, 1 << 20) + b"addr",
        struct.pack("<II", 4, 0) + bytes(1 << 20),
    ],
)
def test_what_is_no_offer_is_not_given_to_ucx(offer: bytes) -> None:
    with pytest.raises(DriverError):
        parse_offer(offer)


def test_what_is_no_grant_and_no_memory_is_not_believed() -> None:
    for body in (b"", b"\x80", b"\x81\xa5grant\x01", b"\xff" * 40):
        with pytest.raises(Incompatible):
            decode_grant_reply(body, records=1)
        with pytest.raises(Incompatible):
            decode_memory(body)


def test_a_device_counts_if_a_port_of_it_is_up(tmp_path: Any) -> None:
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
    assert devices_up(tmp_path) == ["mlx5_0"]
    assert devices_up(tmp_path / "nothing") == []
