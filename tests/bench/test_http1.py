"""The HTTP client: responses in every framing, cut anywhere, and what is none."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from kvstore_bench.chat import http1
from kvstore_bench.chat.http1 import (
    ConnectFailed,
    Disconnected,
    Head,
    HTTPClient,
    MalformedResponse,
)

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
HELLO = CHUNKED + b"5;x=y\r\nhello\r\n6\r\n world\r\n0\r\nTrailer: 1\r\n\r\n"

Answer = Callable[[asyncio.StreamWriter, int], Awaitable[None]]
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def serving(serve: Serve) -> AsyncIterator[HTTPClient]:
    """Run a server whose connections all end before the loop does; yield a client of it."""
    ended: set[asyncio.Task[None]] = set()

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        ended.add(task)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await serve(reader, writer)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(one, "127.0.0.1", 0)
    client = HTTPClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        async with asyncio.timeout(20):
            yield client
    finally:
        client.close()
        server.close()
        await asyncio.gather(*ended)


def pieces(data: bytes, step: int, *, close: bool = False) -> Answer:
    async def answer(writer: asyncio.StreamWriter, number: int) -> None:
        for start in range(0, len(data), step):
            writer.write(data[start : start + step])
            await writer.drain()
            await asyncio.sleep(0)
        if close:
            writer.close()

    return answer


def exchange(
    answer: Answer, *, requests: int = 1, enough: bytes | None = None
) -> tuple[list[tuple[Head, bytes]], list[bytes], int]:
    """Return the responses, the requests as they arrived, and how many connections were made."""
    arrived: list[bytes] = []
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while not writer.is_closing():
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split()[0])
            arrived.append(head + await reader.readexactly(length))
            await answer(writer, len(arrived))

    async def ask(client: HTTPClient) -> tuple[Head, bytes]:
        body = b""

        def on_body(head: Head, data: bytes, now: float) -> bool:
            nonlocal body
            body += data
            return enough is not None and enough in body

        head = await client.request("POST", "/p", headers={"A": "b"}, body=b"ask", on_body=on_body)
        return head, body

    async def run() -> list[tuple[Head, bytes]]:
        async with serving(serve) as client:
            return [await ask(client) for _ in range(requests)]

    return asyncio.run(run()), arrived, connections


@pytest.mark.parametrize("step", [1, 2, 7, 1000])
@pytest.mark.parametrize(
    ("data", "close"),
    [
        (HELLO, False),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + HELLO, False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\nhello world", False),
        (b"HTTP/1.0 200 OK\r\n\r\nhello world", True),
    ],
)
def test_a_body_does_not_depend_on_framing_or_cuts(data: bytes, close: bool, step: int) -> None:
    ((head, body),), arrived, _ = exchange(pieces(data, step, close=close))
    assert (head.status, body) == (200, b"hello world")
    assert arrived[0].startswith(b"POST /p HTTP/1.1\r\nHost: 127.0.0.1:")
    assert arrived[0].endswith(b"A: b\r\nContent-Length: 3\r\n\r\nask")


def test_a_connection_serves_many_requests_until_it_is_closed() -> None:
    responses, _, connections = exchange(pieces(HELLO, 1000), requests=5)
    assert ([body for _, body in responses], connections) == ([b"hello world"] * 5, 1)
    closing = HELLO.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)
    assert exchange(pieces(closing, 1000), requests=2)[2] == 2


def test_an_idle_connection_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1, "KEEPALIVE_S", 0.0)
    assert exchange(pieces(HELLO, 1000), requests=3)[2] == 3


def test_an_empty_body_ends_at_once() -> None:
    for head in (b"HTTP/1.1 204 No Content", b"HTTP/1.1 503 Busy\r\nContent-Length: 0"):
        ((found, body),), _, _ = exchange(pieces(head + b"\r\n\r\n", 9))
        assert (found.status, body) == (int(head.split()[1]), b"")


def test_once_there_is_enough_the_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1, "GRACE_S", 0.01)
    endless = pieces(CHUNKED + b"5\r\nhello\r\n", 1000)
    responses, _, connections = exchange(endless, requests=2, enough=b"hello")
    assert [body for _, body in responses] == [b"hello"] * 2
    assert connections == 2


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"SSH-2.0-OpenSSH\r\n\r\n", "no HTTP/1.1 response: SSH-2.0"),
        (b"HTTP/1.1 2x0 OK\r\n\r\n", "no HTTP/1.1 response"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n", "Content-Length is '-5'"),
        (CHUNKED + b"zz\r\n", "no size of a chunk"),
        (CHUNKED + b"-5\r\nhello\r\n", "no size of a chunk"),
        (CHUNKED + b"1" * 5000, "a size line without end"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * (70 << 10), "a head line without end"),
        (HELLO + b"HTTP/1.1 200 OK\r\n", "bytes after the end"),
    ],
)
def test_what_is_no_response_is_malformed(data: bytes, reason: str) -> None:
    with pytest.raises(MalformedResponse, match=reason):
        exchange(pieces(data, 1 << 20))


@pytest.mark.parametrize("data", [b"", b"HTTP/1.1 200", CHUNKED + b"5\r\nhel", HELLO[:-2]])
def test_a_connection_that_ends_early_is_told_apart_from_an_answer(data: bytes) -> None:
    with pytest.raises(Disconnected):
        exchange(pieces(data, 100, close=True))


def test_what_a_reader_raises_ends_the_request() -> None:
    def on_body(head: Head, data: bytes, now: float) -> bool:
        raise ValueError("not what I want")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HELLO)
        await reader.read()

    async def run() -> None:
        async with serving(serve) as client:
            await client.request("GET", "/", headers={}, on_body=on_body)

    with pytest.raises(ValueError, match="not what I want"):
        asyncio.run(run())


def test_urls_and_unreachable_hosts() -> None:
    for url in ("ftp://a", "http://", "127.0.0.1:80"):
        with pytest.raises(ValueError, match="no URL"):
            HTTPClient(url)
    with pytest.raises(ConnectFailed):
        asyncio.run(
            HTTPClient("http://127.0.0.1:1").request(
                "GET", "/", headers={}, on_body=lambda head, data, now: False
            )
        )
