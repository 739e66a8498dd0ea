"""Records from a bulk connection, by one native call, or piece by piece without the library."""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvstore.model.checksum import checksum, received
from kvstore.peer import receive
from kvstore.peer.base import PeerGone, PeerSlow
from kvstore.peer.bulk import Bulk
from kvstore.peer.receive import Receipt
from kvstore.peer.wire import HELD, NOT_HELD
from kvstore_kernels import native

SIZES = [100_000, 0, (1 << 20) + 7, 64 << 10, 3, (64 << 10) + 1, 2 << 20]
DROPPED = {0, 3, 4}
RECORDS = [random.Random(at).randbytes(nbytes) for at, nbytes in enumerate(SIZES)]
SUMS = [checksum(record) for record in RECORDS]


@pytest.fixture(params=["one call", "piece by piece"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "one call":
        assert native.library() is not None, native.reason()
    else:
        monkeypatch.setattr(receive, "received", lambda fd, targets: None)


@contextmanager
def sending(data: bytes, seed: int = 1) -> Iterator[Bulk]:
    """Yield the end of a connection at which `data` comes in pieces of any size, and then its
    end."""
    listener = socket.create_server(("127.0.0.1", 0))
    ours = socket.create_connection(listener.getsockname())
    theirs, _ = listener.accept()

    def send() -> None:
        draw, at = random.Random(seed), 0
        with theirs:
            while at < len(data):
                end = at + draw.choice([1, 100, 5000, 64 << 10, 300_000])
                theirs.sendall(data[at:end])
                at = end

    thread = threading.Thread(target=send)
    thread.start()
    bulk = Bulk(ours)
    bulk.lend_to_thread()
    try:
        yield bulk
    finally:
        bulk.close()
        thread.join(20)
        listener.close()
        assert not thread.is_alive()


def targets() -> list[memoryview | None]:
    return [
        None if at in DROPPED else memoryview(bytearray(nbytes)) for at, nbytes in enumerate(SIZES)
    ]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("seed", range(3))
def test_records_come_whole_with_some_that_nobody_wants_among_them(seed: int) -> None:
    found = targets()
    with sending(b"".join(RECORDS) + HELD, seed) as bulk:
        assert Receipt(bulk, SIZES, SUMS, found, "a peer").run() == []
    for target, record in zip(found, RECORDS, strict=True):
        assert target is None or target == record


@pytest.mark.usefixtures("way")
def test_wrong_ones_are_named_by_their_places() -> None:
    sums = [each ^ (at in (2, 3, 6)) for at, each in enumerate(SUMS)]
    with sending(b"".join(RECORDS) + HELD) as bulk:
        assert Receipt(bulk, SIZES, sums, targets(), "a peer").run() == [2, 6]


@pytest.mark.usefixtures("way")
def test_what_was_not_held_is_not_taken() -> None:
    with (
        sending(b"".join(RECORDS) + NOT_HELD) as bulk,
        pytest.raises(PeerGone, match="evicted or freed"),
    ):
        Receipt(bulk, SIZES, SUMS, targets(), "a peer").run()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("cut", [0, 150_000, sum(SIZES) - 1])
def test_a_connection_that_ends_early_is_an_error(cut: int) -> None:
    with (
        sending(b"".join(RECORDS)[:cut]) as bulk,
        pytest.raises(PeerGone, match="ended the connection"),
    ):
        Receipt(bulk, SIZES, SUMS, targets(), "a peer").run()


@pytest.mark.usefixtures("way")
def test_silence_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.peer.bulk._TIMEVAL", struct.pack("@ll", 0, 400_000))
    listener = socket.create_server(("127.0.0.1", 0))
    ours = socket.create_connection(listener.getsockname())
    theirs, _ = listener.accept()
    with ours, theirs, listener:
        bulk = Bulk(ours)
        bulk.lend_to_thread()
        theirs.sendall(RECORDS[0])
        receipt = Receipt(bulk, SIZES, SUMS, targets(), "a peer")
        began = time.monotonic()
        with pytest.raises(PeerSlow, match="sent nothing"):
            receipt.run()
        assert 0.3 < time.monotonic() - began < 1.5


@pytest.mark.usefixtures("way")
def test_bytes_that_come_rarely_are_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.peer.bulk._TIMEVAL", struct.pack("@ll", 0, 400_000))
    record = bytes(range(256)) * 1200
    listener = socket.create_server(("127.0.0.1", 0))
    ours = socket.create_connection(listener.getsockname())
    theirs, _ = listener.accept()

    def send() -> None:
        for at in range(0, len(record), len(record) // 6):
            theirs.sendall(record[at : at + len(record) // 6])
            time.sleep(0.2)  # six of them are longer than the socket waits for one byte
        theirs.sendall(HELD)

    with ours, theirs, listener:
        bulk = Bulk(ours)
        bulk.lend_to_thread()
        thread = threading.Thread(target=send)
        thread.start()
        target = memoryview(bytearray(len(record)))
        receipt = Receipt(bulk, [len(record)], [checksum(record)], [target], "a peer")
        assert receipt.run() == []
        thread.join()
        assert target == record


@pytest.mark.usefixtures("way")
def test_the_last_bytes_are_not_waited_for_longer_than_they_take() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    ours = socket.create_connection(listener.getsockname())
    theirs, _ = listener.accept()
    record = bytes(256) * 1200

    def send() -> None:
        for at in (0, 250_000, 300_000):
            theirs.sendall(record[at : {0: 250_000, 250_000: 300_000}.get(at, len(record))])
            time.sleep(0.03)
        theirs.sendall(HELD)

    with ours, theirs, listener:
        bulk = Bulk(ours)
        bulk.lend_to_thread()
        thread = threading.Thread(target=send)
        began = time.monotonic()
        thread.start()
        target = memoryview(bytearray(len(record)))
        receipt = Receipt(bulk, [len(record)], [checksum(record)], [target], "a peer")
        assert receipt.run() == []
        assert time.monotonic() - began < 0.4
        thread.join()


def test_no_record_is_no_call_too_many() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert received(ours.fileno(), []) == []
        theirs.sendall(b"x" * 10)
        room = memoryview(bytearray(10))
        assert received(ours.fileno(), [room]) == [checksum(b"x" * 10)]
        assert room == b"x" * 10
        with pytest.raises(OSError, match="Bad file descriptor"):
            received(-1, [room])
