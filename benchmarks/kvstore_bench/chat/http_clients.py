"""Our HTTP client beside kept libraries: how late each stamps the first and the following tokens.

    python -m kvstore_bench.chat.http_clients --rate 200 --seconds 5

Every client sends the same open-loop requests to the stub of `overhead`, which writes into each
piece of an answer when it wrote it. What a client measures beyond that is its error. The clients
take turns, and the median over the rounds is told. Prints JSON, errors in milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import re
import statistics
import time
from collections.abc import Awaitable, Callable, Coroutine
from itertools import pairwise
from typing import Any

import uvloop

from kvstore.system.scheduling import run_promptly
from kvstore_bench.chat.http1 import HTTPClient
from kvstore_bench.chat.overhead import paced

PATH = "/v1/chat/completions"
BODY = json.dumps({"model": "pacer", "stream": True, "messages": []}).encode()
HEADERS = {"Content-Type": "application/json"}
STAMP = re.compile(rb'"content":"([0-9.]+) "')
PIECES = tuple[float, list[tuple[float, bytes]]]
Ask = Callable[[], Coroutine[Any, Any, PIECES]]


def _http1(url: str) -> tuple[Ask, Callable[[], Awaitable[None]]]:
    client = HTTPClient(url)

    async def ask() -> PIECES:
        pieces: list[tuple[float, bytes]] = []
        began = time.perf_counter()

        def on_body(head: Any, data: bytes, at: float) -> bool:
            pieces.append((at, bytes(data)))
            return False

        await client.request("POST", PATH, headers=HEADERS, body=BODY, on_body=on_body)
        return began, pieces

    async def close() -> None:
        client.close()

    return ask, close


def _aiohttp(url: str) -> tuple[Ask, Callable[[], Awaitable[None]]]:
    import aiohttp

    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def ask() -> PIECES:
        pieces: list[tuple[float, bytes]] = []
        began = time.perf_counter()
        async with session.post(url + PATH, data=BODY, headers=HEADERS) as answer:
            async for data in answer.content.iter_any():
                pieces.append((time.perf_counter(), data))
        return began, pieces

    return ask, session.close


def _httpx(url: str) -> tuple[Ask, Callable[[], Awaitable[None]]]:
    import httpx

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    session = httpx.AsyncClient(limits=limits, timeout=60)

    async def ask() -> PIECES:
        pieces: list[tuple[float, bytes]] = []
        began = time.perf_counter()
        async with session.stream("POST", url + PATH, content=BODY, headers=HEADERS) as answer:
            async for data in answer.aiter_raw():
                pieces.append((time.perf_counter(), data))
        return began, pieces

    return ask, session.aclose


CLIENTS = {"http1": _http1, "aiohttp": _aiohttp, "httpx": _httpx}


async def _run(name: str, url: str, rate: float, seconds: float) -> dict[str, float]:
    """Send requests at a constant rate; return the percentiles of both errors."""
    run_promptly()
    ask, close = CLIENTS[name](url)
    await ask()  # imports, first connection
    loop = asyncio.get_running_loop()
    gc.collect()
    gc.disable()
    asked: list[asyncio.Task[PIECES]] = []
    began = loop.time()
    for number in range(int(rate * seconds)):
        await asyncio.sleep(began + number / rate - loop.time())
        asked.append(asyncio.create_task(ask()))
    answers = await asyncio.gather(*asked)
    gc.enable()
    await close()
    first, gaps = [], []
    for sent, pieces in answers:
        stamps = [(at, float(text)) for at, data in pieces for text in STAMP.findall(data)]
        first.append((stamps[0][0] - sent) - stamps[0][1])
        gaps += [(b[0] - a[0]) - (b[1] - a[1]) for a, b in pairwise(stamps)]
    late = {"ttft": sorted(first), "itl": sorted(map(abs, gaps))}
    return {
        f"{what}_error_p{share}_ms": round(1e3 * each[int(len(each) * share / 100)], 3)
        for what, each in late.items()
        for share in (50, 99)
    }


def measure(rate: float, seconds: float, rounds: int) -> dict[str, Any]:
    """Let the clients take turns; return the median of each figure by client."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in CLIENTS}
    for _ in range(rounds):
        for name in CLIENTS:
            with paced(50.0, 10.0, 32) as (url, _):
                found[name].append(uvloop.run(_run(name, url, rate, seconds)))
    return {
        "rate": rate,
        "seconds": seconds,
        "rounds": rounds,
        "clients": {
            name: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            for name, runs in found.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("--rate", type=float, default=200.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each run")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    print(json.dumps(measure(given.rate, given.seconds, given.rounds), indent=2))


if __name__ == "__main__":
    main()
