"""Bodies received past the library: what is read, what is refused, what is left to it."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import trustme

from kvstore.tier.object.failure import ObjectFailed, ObjectGone
from kvstore.tier.object.receive import Connections, Receipt, Unfit

WAIT_S = 10.0
BODY = bytes(range(256)) * 4096
HEAD = (
    "HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 7-{last}/{all}\r\nContent-Length: {n}\r\n"
)


def answer(nbytes: int = len(BODY), extra: str = "") -> bytes:
    head = HEAD.format(last=7 + len(BODY) - 1, all=2 * len(BODY), n=nbytes) + extra
    return head.encode() + b"\r\n" + BODY[:nbytes]


class Server:
    """Answers each request with what `script` has next, and hangs up where that is None. seen: the
    requests. connections: how many they came by."""

    def __init__(self, script: Sequence[bytes | None], context: ssl.SSLContext | None) -> None:
        self.seen: list[str] = []
        self.connections = 0
        self._script = iter(script)
        self._context = context
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(WAIT_S)
        self._listener.close()
        assert not self._thread.is_alive()

    def _serve(self) -> None:
        while True:
            try:
                plain, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            plain.settimeout(WAIT_S)
            try:
                with self._context.wrap_socket(plain, True) if self._context else plain as peer:
                    self._talk(peer)
            except OSError:  # the other end has had enough
                plain.close()

    def _talk(self, peer: socket.socket) -> None:
        while True:
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                byte = peer.recv(1)
                if not byte:
                    return
                head += byte
            self.seen.append(head.decode())
            said = next(self._script)
            if said is None:
                return
            peer.sendall(said)


@contextmanager
def server(
    *script: bytes | None, context: ssl.SSLContext | None = None
) -> Iterator[tuple[Server, Connections]]:
    running, connections = Server(script, context), Connections(WAIT_S)
    try:
        yield running, connections
    finally:
        connections.close()
        running.close()


def receipt(
    running: Server,
    connections: Connections,
    buffers: Sequence[memoryview],
    *,
    scheme: str = "http",
    filled: Callable[[int], None] = lambda _: None,
) -> Receipt:
    url = f"{scheme}://localhost:{running.port}/bucket/a%20b?signature=x%2Fy"
    return Receipt(connections, lambda: url, 7, buffers, filled)


def buffers(*sizes: int) -> list[memoryview]:
    left = len(BODY) - sum(sizes)
    return [memoryview(bytearray(size)) for size in (*sizes, left)]


def test_a_body_fills_the_buffers_in_order_and_the_connection_is_kept() -> None:
    with server(answer(), answer()) as (running, connections):
        for sizes in ((1, 4096, 70_000), ()):
            targets, told = buffers(*sizes), list[int]()
            receipt(running, connections, targets, filled=told.append).run()
            assert b"".join(targets) == BODY
            assert told == list(range(len(targets)))
        assert running.connections == 1
        line, *headers = running.seen[0].split("\r\n")
        assert line == "GET /bucket/a%20b?signature=x%2Fy HTTP/1.1"
        assert f"Range: bytes=7-{7 + len(BODY) - 1}" in headers
        assert f"Host: localhost:{running.port}" in headers


def test_what_the_other_end_has_closed_is_not_used_again() -> None:
    with server(answer(), None, answer(), answer(extra="Connection: close\r\n"), answer()) as (
        running,
        connections,
    ):
        receipt(running, connections, buffers()).run()
        with pytest.raises(ObjectFailed) as failed:  # it hangs up on this one
            receipt(running, connections, buffers()).run()
        assert failed.value.reason == "connection"
        for _ in range(3):
            receipt(running, connections, buffers()).run()
        assert running.connections == 3


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\n\r\n", "throttled"),
        (b"HTTP/1.1 429 No\r\nContent-Length: 0\r\n\r\n", "throttled"),
        (b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n", "server"),
        (b"HTTP/1.1 408 No\r\nContent-Length: 0\r\n\r\n", "server"),
        (answer(len(BODY) - 1), "short"),
        (answer(len(BODY) + 1), "short"),
        (answer().replace(b"bytes 7-", b"bytes 8-"), "short"),
        (answer().replace(b"Content-Length", b"Content-Size"), "short"),
        (answer().replace(b"Content-Length: ", b"Content-Length: -"), "short"),
        (answer(extra="Transfer-Encoding: chunked\r\n"), "short"),
        (answer()[:-1], "timeout"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "connection"),
        (b"HTTP/1.1 206 " + b"x" * 70_000 + b"\r\n\r\n", "connection"),
        (b"HTTP/1.1 206 OK\r\n" + b"a: b\r\n" * 200 + b"\r\n", "connection"),
        (None, "connection"),
    ],
)
def test_an_answer_that_is_not_what_was_asked_for_fails(said: bytes | None, reason: str) -> None:
    with server(said) as (running, _):
        with pytest.raises(ObjectFailed) as failed:
            receipt(running, Connections(0.5), buffers()).run()
        assert failed.value.reason == reason


def test_an_object_that_is_not_there_is_gone() -> None:
    said = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
    with server(said) as (running, connections), pytest.raises(ObjectGone):
        receipt(running, connections, buffers()).run()


@pytest.mark.parametrize("status", [200, 301, 307, 400, 401, 403, 412, 416])
def test_what_only_the_library_knows_how_to_answer_is_left_to_it(status: int) -> None:
    said = f"HTTP/1.1 {status} X\r\nContent-Length: 0\r\n\r\n".encode()
    with server(said) as (running, idle), pytest.raises(Unfit, match=f"HTTP {status}"):
        receipt(running, idle, buffers()).run()


def test_nobody_there_is_the_librarys_to_find_out() -> None:
    with server(answer()) as (running, connections):
        pass
    with pytest.raises(Unfit, match="no connection: ConnectionRefusedError"):
        receipt(running, connections, buffers()).run()


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def tls(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    return context


def test_over_tls_a_certificate_is_verified(
    authority: trustme.CA, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server(answer(), answer(), context=tls(authority)) as (running, connections):
        with pytest.raises(Unfit, match="SSLCertVerificationError"):
            receipt(running, connections, buffers(), scheme="https").run()
        with authority.cert_pem.tempfile() as path:
            monkeypatch.setenv("SSL_CERT_FILE", path)
            trusting = Connections(WAIT_S)
            for _ in range(2):
                targets = buffers(5, 70_000)
                receipt(running, trusting, targets, scheme="https").run()
                assert b"".join(targets) == BODY
            assert running.connections == 2
            trusting.close()


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_after_stop_nothing_is_written_and_the_thread_ends(
    scheme: str, authority: trustme.CA, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = answer()[: len(BODY) // 2]
    with (
        authority.cert_pem.tempfile() as path,
        server(half, context=tls(authority) if scheme == "https" else None) as (running, idle),
        ThreadPoolExecutor(1) as threads,
    ):
        monkeypatch.setenv("SSL_CERT_FILE", path)
        targets, begun, told = buffers(1000), threading.Event(), list[int]()

        def filled(index: int) -> None:
            told.append(index)
            begun.set()

        reading = receipt(running, idle, targets, scheme=scheme, filled=filled)
        ended = threads.submit(reading.run)
        assert begun.wait(WAIT_S)
        reading.stop()
        before = list(map(bytes, targets))
        with pytest.raises(ObjectFailed):
            ended.result(WAIT_S / 2)  # and not when the wait for bytes is over
        assert list(map(bytes, targets)) == before
        assert told == [0]


def test_what_was_stopped_before_it_began_asks_nobody() -> None:
    with server(answer()) as (running, connections):
        reading = receipt(running, connections, buffers())
        reading.stop()
        with pytest.raises(ObjectFailed, match="stopped"):
            reading.run()
        assert running.seen == []
