"""An HTTP proxy in front of a real S3 server, which answers some requests badly on purpose."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from enum import Enum
from io import BytesIO

import aiohttp
from aiohttp import web
from yarl import URL

SLOW_S = 1.0
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "date", "server"}


class Fault(Enum):
    """What to do instead of passing on an answer."""

    ERROR_500 = 500
    SLOW_DOWN = 503
    NOT_FOUND = 404
    FORBIDDEN = 403
    STALL = "no answer until the client gives up"
    STALL_IN_BODY = "half of the body, then nothing"
    DROP = "the connection closes instead of an answer"
    CUT = "half of the body, then the connection closes"
    SHORT = "half of the body, as if it were all"
    OVERSIZE = "the body, and then the same again"
    SLOW = "half of the body, and the rest a second later"


class Proxy:
    """fault: asked before each request what to do with it. seen: how many there were by method.
    upstream: the endpoint of the real server, which may be another one after a restart."""

    def __init__(self, upstream: str) -> None:
        self.endpoint = ""
        self.fault: Callable[[web.BaseRequest], Fault | None] = lambda _: None
        self.seen: Counter[str] = Counter()
        self.upstream = upstream
        self._released = asyncio.Event()

    def times(self, count: int, fault: Fault, method: str = "GET") -> None:
        """Answer the next `count` requests of a method badly."""
        left = iter(range(count))

        def decide(request: web.BaseRequest) -> Fault | None:
            return fault if request.method == method and next(left, None) is not None else None

        self.fault = decide

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self.seen[request.method] += 1
        fault = self.fault(request)
        body = await request.read()
        if fault is Fault.STALL:
            await self._released.wait()
        if fault in (Fault.STALL, Fault.DROP):
            _hang_up(request)
            return web.Response()
        if fault is not None and isinstance(fault.value, int):
            return web.Response(status=fault.value, text="<Error><Code>Fault</Code></Error>")
        try:
            return await self._pass_on(request, body, fault)
        except aiohttp.ClientError:  # the real server is down
            _hang_up(request)
            return web.Response()

    async def _pass_on(
        self, request: web.BaseRequest, body: bytes, fault: Fault | None
    ) -> web.StreamResponse:
        url = URL(self.upstream + request.raw_path, encoded=True)
        async with self._session.request(
            request.method,
            url,
            headers=request.headers,
            data=BytesIO(body) if body else None,
            allow_redirects=False,
        ) as answer:
            data = await answer.read()
        kept = {k: v for k, v in answer.headers.items() if k.lower() not in HOP_BY_HOP}
        if fault is Fault.SHORT:
            data = data[: len(data) // 2]
        if fault is Fault.OVERSIZE:
            data += data
        if request.method == "HEAD" and "Content-Length" in answer.headers:
            kept["Content-Length"] = answer.headers["Content-Length"]
        if fault not in (Fault.CUT, Fault.STALL_IN_BODY, Fault.SLOW):
            return web.Response(status=answer.status, headers=kept, body=data)
        response = web.StreamResponse(status=answer.status, headers=kept)
        response.content_length = len(data)
        await response.prepare(request)
        await response.write(data[: len(data) // 2])
        if fault is Fault.SLOW:
            await asyncio.sleep(SLOW_S)
            await response.write(data[len(data) // 2 :])
            return response
        if fault is Fault.STALL_IN_BODY:
            await self._released.wait()
        _hang_up(request)
        return response

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Proxy]:
        timeout = aiohttp.ClientTimeout(total=30)
        self._session = aiohttp.ClientSession(auto_decompress=False, timeout=timeout)
        runner = web.ServerRunner(web.Server(self.handle), shutdown_timeout=1.0)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            host, port = runner.addresses[0][:2]
            self.endpoint = f"http://{host}:{port}"
            yield self
        finally:
            self._released.set()
            await runner.cleanup()
            await self._session.close()


def _hang_up(request: web.BaseRequest) -> None:
    if request.transport is not None:  # else the client was faster
        request.transport.abort()
