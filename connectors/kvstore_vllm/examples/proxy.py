"""A proxy in front of two vLLM servers: one computes the prompt, the other one the answer.

    python -m kvstore_vllm.examples.proxy \
        --prefill http://10.0.0.1:8000 --decode http://10.0.0.2:8000 --listen 0.0.0.0:9000

Both servers run with `KVStoreConnector`, each on the daemon of its own host, and the prefilling one
has been told its `engine_address`. Sequentially, the prefill is sent first, as a request for one
token, and what it answers (`kv_transfer_params`) goes with the request to the decoding server. With
`--concurrent` both are sent at once: blocks travel while the rest is being computed.

Whatever happens to the prefill, the decoding server answers: it computes what did not come.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout, web

logger = logging.getLogger("kvstore.proxy")

PATHS = ("/v1/completions", "/v1/chat/completions")
REQUEST_NBYTES_MAX = 64 << 20
ANSWER_NBYTES_MAX = 16 << 20  # of a prefill: one token and its parameters
PASSED_ON = ("Authorization", "X-Request-Id", "traceparent")
SENT_BACK = ("Content-Type", "Retry-After", "X-Request-Id")


@dataclass(frozen=True, slots=True)
class Options:
    """prefill, decode: URLs. prefill_s: after that long the decoding server goes on alone. idle_s:
    the longest silence of a server. requests_max: at once; more are told to come back."""

    prefill: str
    decode: str
    concurrent: bool = False
    prefill_s: float = 60.0
    connect_s: float = 5.0
    idle_s: float = 300.0
    requests_max: int = 256


@dataclass(slots=True)
class Timeline:
    """Of one request: what became of its prefill, and when, in seconds since it came."""

    began: float = field(default_factory=time.perf_counter)
    prefill: str = "none"
    prefill_s: float | None = None
    first_s: float | None = None  # of the answer's bytes

    def now(self) -> float:
        return time.perf_counter() - self.began

    def line(self, request_id: str, status: int) -> str:
        """Return it as a line of the log."""
        times = {"prefill_s": self.prefill_s, "first_s": self.first_s, "total_s": self.now()}
        shown = (f"{name}={value:.4f}" for name, value in times.items() if value is not None)
        return " ".join((f"request={request_id} status={status} prefill={self.prefill}", *shown))


class Refused(Exception):
    """The prefilling server does not accept the request: `body` says why."""

    def __init__(self, status: int, body: bytes, content_type: str) -> None:
        super().__init__(f"HTTP {status}")
        self.status, self.body, self.content_type = status, body, content_type


class Proxy:
    """The two servers, and the requests under way."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._under_way = 0
        self._session: ClientSession

    def app(self) -> web.Application:
        app = web.Application(client_max_size=REQUEST_NBYTES_MAX)
        app.cleanup_ctx.append(self._opened)
        for path in PATHS:
            app.router.add_post(path, self._complete)
        app.router.add_get("/{path:.*}", self._pass)  # models, health, metrics: the decoder's
        return app

    async def _opened(self, _: web.Application) -> AsyncIterator[None]:
        options = self._options
        timeout = ClientTimeout(
            total=None, sock_connect=options.connect_s, sock_read=options.idle_s
        )
        async with ClientSession(timeout=timeout) as self._session:
            yield

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        if self._under_way >= self._options.requests_max:
            return _failed(503, "too many requests: try again", {"Retry-After": "1"})
        self._under_way += 1
        timeline = Timeline()
        request_id = request.headers.get("X-Request-Id") or uuid.uuid4().hex
        headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
        headers["X-Request-Id"] = request_id
        status = 499  # the client went away
        try:
            body = await _body_of(request)
            response = await self._both(request, body, headers, timeline)
            status = response.status
            return response
        except web.HTTPException as error:
            status = error.status
            raise
        finally:
            self._under_way -= 1
            logger.info(timeline.line(request_id, status))

    async def _both(
        self,
        request: web.Request,
        body: dict[str, Any],
        headers: Mapping[str, str],
        timeline: Timeline,
    ) -> web.StreamResponse:
        """Send the prefill, and the request itself: after it, or at once."""
        path, request_id = request.path, headers["X-Request-Id"]
        if not self._options.concurrent:
            ask = prefill_of(body, {"do_remote_decode": True})
            try:
                told = await self._prefill(path, ask, headers, timeline)
            except Refused as refused:
                return web.Response(
                    body=refused.body,
                    status=refused.status,
                    headers={"Content-Type": refused.content_type},
                )
            return await self._answer(request, with_params(body, told), headers, timeline)
        prefiller = remote(request_id, self._options.prefill)
        decoder = remote(request_id, self._options.decode)
        ask = prefill_of(body, {"remote_decoder": decoder})
        prefill = asyncio.create_task(self._prefill(path, ask, headers, timeline))
        try:
            asked = with_params(body, {"remote_prefiller": prefiller})
            return await self._answer(request, asked, headers, timeline)
        finally:  # its blocks are not waited for any more
            prefill.cancel()
            await asyncio.gather(prefill, return_exceptions=True)

    async def _prefill(
        self, path: str, ask: Mapping[str, Any], headers: Mapping[str, str], timeline: Timeline
    ) -> Mapping[str, Any]:
        """Compute a prompt; return the `kv_transfer_params` with which it goes on, {} if it failed.

        Raises Refused if the request itself is wrong.
        """
        url = self._options.prefill + path
        timeline.prefill = "cancelled"  # unless it ends
        try:
            async with (
                asyncio.timeout(self._options.prefill_s),
                self._session.post(url, json=ask, headers=headers) as answer,
            ):
                read = await _read_at_most(answer, ANSWER_NBYTES_MAX)
        except TimeoutError:
            timeline.prefill = "late"
            return {}
        except (ClientError, OSError, ValueError) as error:
            timeline.prefill = type(error).__name__
            return {}
        timeline.prefill_s = timeline.now()
        timeline.prefill = "ok" if answer.status == 200 else f"HTTP-{answer.status}"
        if 400 <= answer.status < 500:
            raise Refused(answer.status, read, answer.content_type)
        return _params_of(read) if answer.status == 200 else {}

    async def _answer(
        self,
        request: web.Request,
        ask: Mapping[str, Any],
        headers: Mapping[str, str],
        timeline: Timeline,
    ) -> web.StreamResponse:
        """Pass on what the decoding server answers, as it comes."""
        call = self._session.post(self._options.decode + request.path, json=ask, headers=headers)
        try:
            upstream = await call
        except (ClientError, OSError) as error:  # TimeoutError, too
            late = isinstance(error, TimeoutError)
            return _failed(504 if late else 502, f"the decoding server: {error or 'no answer'}")
        async with upstream:
            return await _pass_on(request, upstream, timeline)

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        try:
            upstream = await self._session.get(self._options.decode + request.path_qs)
        except (ClientError, OSError) as error:
            return _failed(502, f"the decoding server: {error or 'no answer'}")
        async with upstream:
            return await _pass_on(request, upstream, Timeline())


def prefill_of(body: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request that computes the prompt of another one, and one token."""
    ask = {
        name: value
        for name, value in body.items()
        if name not in ("stream_options", "min_tokens", "best_of", "max_completion_tokens")
    }
    length = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    return with_params({**ask, length: 1, "n": 1, "stream": False}, params)


def with_params(body: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request with more `kv_transfer_params`; the client's own, such as hints, stay."""
    own = body.get("kv_transfer_params")
    both = dict(own) if isinstance(own, dict) else {}
    for name, value in params.items():
        before = both.get(name)
        if isinstance(before, dict) and isinstance(value, dict):
            both[name] = {**before, **value}
        else:
            both[name] = value
    return {**body, "kv_transfer_params": both}


def remote(request_id: str, url: str) -> dict[str, Any]:
    """Name an engine as vLLM's peer-to-peer tier and llm-d do."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return {"kv_request_id": request_id, "remote_host": parts.hostname, "remote_port": port}


async def _body_of(request: web.Request) -> dict[str, Any]:
    """Return a request's body. Raises HTTPException."""
    try:
        body = await request.json()
    except ValueError as error:
        raise web.HTTPBadRequest(text=f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise web.HTTPBadRequest(text="the body is not a JSON object")
    return body


async def _read_at_most(answer: ClientResponse, most: int) -> bytes:
    """Return a body. Raises ValueError if it is longer."""
    pieces: list[bytes] = []
    async for piece in answer.content.iter_any():
        pieces.append(piece)
        most -= len(piece)
        if most < 0:
            raise ValueError("the answer is too long")
    return b"".join(pieces)


def _params_of(body: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(body)["kv_transfer_params"]
    except (ValueError, KeyError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


async def _pass_on(
    request: web.Request, upstream: ClientResponse, timeline: Timeline
) -> web.StreamResponse:
    headers = {name: upstream.headers[name] for name in SENT_BACK if name in upstream.headers}
    response = web.StreamResponse(status=upstream.status, headers=headers)
    await response.prepare(request)
    try:
        async for piece in upstream.content.iter_any():
            if timeline.first_s is None:
                timeline.first_s = timeline.now()
            await response.write(piece)
        await response.write_eof()
    except (ClientError, TimeoutError):
        # The head is sent: all that is left is to end in a way that no client takes for the end.
        if request.transport is not None:
            request.transport.abort()
    return response


def _failed(status: int, message: str, headers: Mapping[str, str] | None = None) -> web.Response:
    error = {"error": {"message": message, "type": "proxy_error", "code": status}}
    return web.json_response(error, status=status, headers=headers)


def parse(arguments: list[str] | None = None) -> tuple[Options, str, int]:
    """Return options, and where to listen. Exits with a line for what is wrong."""
    parser = argparse.ArgumentParser(
        "python -m kvstore_vllm.examples.proxy", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--prefill", required=True, metavar="URL", help="computes prompts")
    parser.add_argument("--decode", required=True, metavar="URL", help="computes answers")
    parser.add_argument("--listen", default="127.0.0.1:9000", metavar="HOST:PORT")
    parser.add_argument("--concurrent", action="store_true", help="send both requests at once")
    parser.add_argument("--prefill-s", type=float, default=60.0, help="deadline of a prefill")
    parser.add_argument("--idle-s", type=float, default=300.0, help="longest silence of a server")
    parser.add_argument("--requests-max", type=int, default=256, help="at once")
    found = parser.parse_args(arguments)
    for url in (found.prefill, found.decode):
        parts = urlsplit(url)
        if (
            parts.scheme not in ("http", "https")
            or not parts.hostname
            or parts.path not in ("", "/")
        ):
            parser.error(f"{url!r} is no URL of the form http://HOST:PORT")
    host, _, port = found.listen.rpartition(":")
    if not host or not port.isdigit():
        parser.error(f"--listen {found.listen!r} is not HOST:PORT")
    options = Options(
        prefill=found.prefill.rstrip("/"),
        decode=found.decode.rstrip("/"),
        concurrent=found.concurrent,
        prefill_s=found.prefill_s,
        idle_s=found.idle_s,
        requests_max=found.requests_max,
    )
    return options, host.strip("[]"), int(port)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    options, host, port = parse()
    # A client that goes away cancels what was asked for it: the engines stop computing.
    web.run_app(Proxy(options).app(), host=host, port=port, handler_cancellation=True)


if __name__ == "__main__":
    main()
