"""A scripted OpenAI server on loopback, in a thread of the test's own process.

It sends what its script says, notes when (time.perf_counter, so comparable with the client's
clock), remembers every request, and counts prompt tokens as vLLM does: one token a word, those of
a message list it has answered before are hits.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from aiohttp import web

START_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Script:
    """One answer. pieces of text, or bytes that are sent as they are; end: done, finish or cut."""

    pieces: tuple[str | bytes, ...] = ("Hello", " there", ".")
    first_s: float = 0.0
    gap_s: float = 0.0
    status: int = 200
    error: Any = None
    usage: bool = True
    end: str = "done"
    content_type: str = "text/event-stream"
    reasoning: int = 0


@dataclass
class Received:
    """A request as it arrived, and when its answer's pieces were written."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    arrived: float
    sent: list[float] = field(default_factory=list)
    ended: float | None = None

    @property
    def contents(self) -> list[str]:
        return [message["content"] for message in self.body["messages"]]


class StubServer:
    """Use as a context manager. `script` is called with each request to choose its answer."""

    def __init__(
        self,
        script: Script | Callable[[Received], Script] | None = None,
        *,
        models: tuple[str, ...] = ("stub",),
        metrics: bool = True,
    ) -> None:
        self._script = script if callable(script) else lambda _: script or Script()
        self._models = models
        self._metrics = metrics
        self._sources = {"local_compute": 0, "external_kv_transfer": 0}
        self._known: set[str] = set()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self.received: list[Received] = []
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> StubServer:
        self._thread.start()
        assert self._ready.wait(START_TIMEOUT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_TIMEOUT_S)
        assert not self._thread.is_alive()

    def _serve(self) -> None:
        app = web.Application()
        app.router.add_get("/v1/models", self._list_models)
        app.router.add_get("/metrics", self._show_metrics)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_post("/v1/completions", self._complete)
        runner = web.AppRunner(app, shutdown_timeout=0.05, access_log=None)
        self._loop.run_until_complete(self._listen(runner))
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    async def _listen(self, runner: web.AppRunner) -> None:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.port = runner.addresses[0][1]

    async def _list_models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name} for name in self._models]})

    async def _show_metrics(self, request: web.Request) -> web.Response:
        if not self._metrics:
            return web.Response(status=404)
        name = "vllm:prompt_tokens_by_source"
        lines = [f"# TYPE {name}_total counter"]
        for source, count in self._sources.items():
            lines.append(f'{name}_total{{engine="0",source="{source}"}} {count}')
        lines += ["# TYPE vllm:num_preemptions_total counter", "vllm:num_preemptions_total 0"]
        lines += ["# TYPE kvstore_hits_total counter", f"kvstore_hits_total {len(self._known)}", ""]
        return web.Response(text="\n".join(lines))

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = msgspec.json.decode(await request.read())
        received = Received(request.path, body, dict(request.headers), time.perf_counter())
        self.received.append(received)
        script = self._script(received)
        if script.status != 200:
            return web.json_response(script.error, status=script.status)
        return await self._stream(request, received, script)

    async def _stream(
        self, request: web.Request, received: Received, script: Script
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": script.content_type})
        await response.prepare(request)
        chat = request.path.startswith("/v1/chat")
        await response.write(_event(_chunk("", chat)))
        for number, piece in enumerate(script.pieces):
            await asyncio.sleep(script.gap_s if number else script.first_s)
            field_name = "reasoning_content" if number < script.reasoning else "content"
            chunk = piece if isinstance(piece, bytes) else _event(_chunk(piece, chat, field_name))
            received.sent.append(time.perf_counter())
            await response.write(chunk)
        if script.end == "cut":
            assert request.transport is not None
            request.transport.abort()
            return response
        if script.end in ("done", "finish"):
            await response.write(_event(_chunk("", chat, finish="stop")))
        usage = self._usage(received, len(script.pieces))
        if script.usage:
            await response.write(_event({"choices": [], "usage": usage}))
        if script.end == "done":
            await response.write(b": keep-alive\r\n\r\ndata: [DONE]\r\n\r\n")
        received.ended = time.perf_counter()
        return response

    def _usage(self, received: Received, pieces: int) -> dict[str, Any]:
        texts = received.contents if "messages" in received.body else [received.body["prompt"]]
        words = [len(text.split()) for text in texts]
        hits = sum(count for text, count in zip(texts, words, strict=True) if text in self._known)
        self._known.update(texts)
        self._sources["external_kv_transfer"] += hits
        self._sources["local_compute"] += sum(words) - hits
        return {
            "prompt_tokens": sum(words),
            "completion_tokens": pieces,
            "prompt_tokens_details": {"cached_tokens": hits},
        }


def failing(script: Script, *, requests: set[int]) -> Callable[[Received], Script]:
    """Answer as usual, but with `script` for the requests with these numbers (from 0)."""
    count = -1

    def choose(_: Received) -> Script:
        nonlocal count
        count += 1
        return script if count in requests else replace(Script())

    return choose


def _chunk(
    text: str, chat: bool, field_name: str = "content", finish: str | None = None
) -> dict[str, Any]:
    content: dict[str, Any] = {"delta": {field_name: text}} if chat else {"text": text}
    return {"id": "x", "choices": [{"index": 0, **content, "finish_reason": finish}]}


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"
