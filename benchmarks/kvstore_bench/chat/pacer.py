"""A stub endpoint that answers at a set pace and says in its answer when it wrote each piece.

One asyncio protocol without a framework, so that little of what `overhead` measures is its own.
Each piece of an answer is the time in seconds from the whole request having arrived to that piece
being written.

    python -m kvstore_bench.chat.pacer --first-ms 50 --itl-ms 10 --tokens 32     # prints its URL
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
import time
from dataclasses import dataclass
from typing import cast

import uvloop

from kvstore.system.scheduling import run_promptly

HEAD_END = b"\r\n\r\n"
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)
MODELS = b'{"object":"list","data":[{"id":"pacer","object":"model"}]}'


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds to the first token and between tokens; how many tokens an answer has."""

    first_s: float
    itl_s: float
    tokens: int


class Pacer(asyncio.Protocol):
    """One connection: a request at a time, as HTTP/1.1 without pipelining has it."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._loop = asyncio.get_running_loop()
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None
        self._arrived = 0.0
        self._left = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._received += data
        end = self._received.find(HEAD_END)
        if end < 0:
            return
        head = bytes(self._received[:end])
        if len(self._received) < end + len(HEAD_END) + _content_length(head):
            return
        self._received.clear()
        if head.startswith(b"POST"):
            self._arrived = time.perf_counter()
            self._left = self._pace.tokens
            self._loop.call_at(self._loop.time() + self._pace.first_s, self._first)
        else:
            self._page(head)

    def _page(self, head: bytes) -> None:
        models = head.startswith(b"GET /v1/models")
        status, body = (b"200 OK", MODELS) if models else (b"404 Not Found", b"")
        length = b"Content-Length: %d" % len(body)
        self._write(b"HTTP/1.1 " + status + b"\r\n" + length + HEAD_END + body)

    def _first(self) -> None:
        self._write(STREAM_HEAD)
        self._token(self._loop.time())

    def _token(self, due: float) -> None:
        self._write(_event(_delta(f"{time.perf_counter() - self._arrived:.6f} ")))
        self._left -= 1
        if self._left:
            due += self._pace.itl_s
            self._loop.call_at(due, self._token, due)
        else:
            self._write(_event(_usage(self._pace.tokens)) + _event(b"[DONE]") + b"0\r\n\r\n")

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)


def _content_length(head: bytes) -> int:
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


def _event(data: bytes) -> bytes:
    """Write one server-sent event as one HTTP chunk."""
    event = b"data: " + data + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(event), event)


def _delta(text: str) -> bytes:
    return (
        b'{"id":"chatcmpl-0","object":"chat.completion.chunk","created":0,"model":"pacer",'
        b'"choices":[{"index":0,"delta":{"content":"%b"},"logprobs":null,"finish_reason":null}]}'
    ) % text.encode()


def _usage(tokens: int) -> bytes:
    return b'{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":%d}}' % tokens


async def _serve(pace: Pace) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Pacer(pace), "127.0.0.1", 0, backlog=4096)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    # Whoever started this closes the pipe to end it.
    await asyncio.to_thread(sys.stdin.read)
    server.close()


def main() -> None:
    """Serve until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("--first-ms", type=float, default=50.0)
    parser.add_argument("--itl-ms", type=float, default=10.0)
    parser.add_argument("--tokens", type=int, default=32)
    given = parser.parse_args()
    gc.disable()
    run_promptly()
    uvloop.run(_serve(Pace(given.first_ms / 1e3, given.itl_ms / 1e3, given.tokens)))


if __name__ == "__main__":
    main()
