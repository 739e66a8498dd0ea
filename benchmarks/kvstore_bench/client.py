"""One streamed request to an OpenAI-compatible endpoint -> one Sample."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
import msgspec

from kvstore.errors import InvalidRequest, Unauthorized, Unavailable
from kvstore_bench.sample import ErrorKind, Failure, Sample
from kvstore_bench.sse import EventParser, MalformedStream
from kvstore_bench.workload import Message, transcript

EndpointKind = Literal["chat", "completions"]

CONNECT_TIMEOUT_S = 10.0
QUICK_TIMEOUT_S = 10.0
# uvicorn, which vLLM runs on, closes idle connections after 5 s. Letting go of them first avoids
# sending a request into a connection that is being closed.
KEEPALIVE_S = 2.0
MESSAGE_CHARACTERS_MAX = 500


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _Failed(Exception):
    def __init__(self, kind: ErrorKind, message: str) -> None:
        super().__init__(message)
        self.failure = Failure(kind, message[:MESSAGE_CHARACTERS_MAX])


@dataclass(slots=True)
class _Recording:
    """What has arrived of one answer so far; times are those of the bytes' arrival."""

    started: float
    first: float | None = None
    last: float = 0.0
    gaps: list[float] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    usage: _Usage | None = None
    finished: bool = False

    def take(self, event: bytes, now: float) -> bool:
        """Note one event; return True when it was the last."""
        if event == b"[DONE]":
            self.finished = True
            return True
        chunk = _decode(event)
        if chunk.error is not None:
            raise _Failed("server", _error_text(chunk.error))
        self.usage = chunk.usage or self.usage
        for choice in chunk.choices:
            self._choice(choice, now)
        return False

    def _choice(self, choice: _Choice, now: float) -> None:
        delta = choice.delta or _Delta()
        text = delta.content or choice.text or ""
        if text or delta.reasoning_content or delta.reasoning:
            if self.first is None:
                self.first = now
            else:
                self.gaps.append(now - self.last)
            self.last = now
            self.text.append(text)
        # Not every server sends [DONE]; a finish reason is as good an end.
        self.finished = self.finished or choice.finish_reason is not None


class Endpoint:
    """A model behind an OpenAI-compatible URL, asked over one pooled HTTP session.

    `body` is merged into every request and wins over what is set here. The session belongs to
    this object: use it as an async context manager, in one event loop.
    """

    def __init__(
        self,
        url: str,
        *,
        kind: EndpointKind = "chat",
        api_key: str | None = None,
        body: Mapping[str, Any] | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self.url = base_url(url)
        self._kind = kind
        self._body = dict(body or {})
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Endpoint:
        # limit=0: the schedule bounds what is in flight; a pool that queued would hide waiting
        # inside TTFT.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def fetch(self, path: str) -> tuple[int, str]:
        """Get a small page of the same server: status and text. Raises Unavailable."""
        try:
            return await self._get(self.url + path, self._headers)
        except Unavailable as error:
            raise Unavailable(
                f"{error}. Start the server (for example: vllm serve MODEL --port 8000) and wait"
                f" until {self.url}/health answers, or give another --url"
            ) from error

    async def fetch_elsewhere(self, url: str) -> tuple[int, str]:
        """Get a small page of another server, which is not shown the API key."""
        return await self._get(url, {})

    async def resolve_model(self, model: str | None) -> str:
        """Return the model to ask for: the one named, or the only one served.

        Raises Unavailable (nothing answers), Unauthorized, or InvalidRequest with the served
        models' names. A server without a model list is believed if a model is named.
        """
        status, text = await self.fetch("/v1/models")
        if status in (401, 403):
            raise Unauthorized(f"{self.url} refuses (HTTP {status}): pass --api-key")
        served = _model_ids(text) if status == 200 else []
        if model is None and len(served) == 1:
            return served[0]
        if model is not None and (model in served or not served):
            return model
        names = ", ".join(served) or f"unknown: /v1/models answered HTTP {status}"
        problem = "no model given" if model is None else f"model {model!r} is not served"
        raise InvalidRequest(f"{problem} at {self.url}; pass --model with one of: {names}")

    async def ask(
        self,
        messages: Sequence[Message],
        *,
        model: str,
        conversation_id: str,
        turn: int,
        epoch: float = 0.0,
        queued_s: float = 0.0,
    ) -> Sample:
        """Send a history, read the whole answer, return the measurement. Never raises for a
        request that went wrong: that is `Sample.failure`. epoch: perf_counter at the run's start.
        """
        body = msgspec.json.encode(self._request(messages, model))
        recording = _Recording(time.perf_counter())
        failure = None
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._stream(body, recording)
        except _Failed as error:
            failure = error.failure
        except MalformedStream as error:
            failure = Failure("malformed", str(error)[:MESSAGE_CHARACTERS_MAX])
        except TimeoutError:
            failure = Failure("timeout", f"no complete answer within {self._timeout_s:g} s")
        except aiohttp.ClientConnectorError as error:
            failure = Failure("connect", f"cannot connect to {self.url}: {error.strerror}")
        except aiohttp.ClientError as error:
            failure = Failure("cut", f"the connection broke: {error or type(error).__name__}")
        ended = time.perf_counter()
        usage = recording.usage
        details = usage.prompt_tokens_details if usage else None
        return Sample(
            conversation_id=conversation_id,
            turn=turn,
            started_s=recording.started - epoch,
            queued_s=queued_s,
            ttft_s=None if recording.first is None else recording.first - recording.started,
            itl_s=tuple(recording.gaps),
            latency_s=ended - recording.started,
            input_tokens=usage.prompt_tokens if usage else None,
            output_tokens=usage.completion_tokens if usage else None,
            cached_tokens=details.cached_tokens if details else None,
            output_text="".join(recording.text),
            failure=failure,
        )

    def _request(self, messages: Sequence[Message], model: str) -> dict[str, Any]:
        asked = {"messages": messages} if self._kind == "chat" else {"prompt": transcript(messages)}
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        return {"model": model, **asked, **stream, **self._body}

    async def _stream(self, body: bytes, recording: _Recording) -> None:
        path = "/v1/chat/completions" if self._kind == "chat" else "/v1/completions"
        headers = {"Content-Type": "application/json", **self._headers}
        parser = EventParser()
        async with self._open().post(self.url + path, data=body, headers=headers) as response:
            if response.status != 200:
                raise _Failed("http", f"HTTP {response.status}: {await _error_body(response)}")
            if "event-stream" not in response.content_type:
                raise MalformedStream(f"expected an event stream, got {response.content_type}")
            async for piece in response.content.iter_any():
                now = time.perf_counter()
                for event in parser.feed(piece):
                    if recording.take(event, now):
                        return
        if not recording.finished:
            raise _Failed("cut", "the stream ended before the answer did")

    async def _get(self, url: str, headers: Mapping[str, str]) -> tuple[int, str]:
        try:
            async with (
                asyncio.timeout(QUICK_TIMEOUT_S),
                self._open().get(url, headers=headers) as response,
            ):
                return response.status, await response.text(errors="replace")
        except TimeoutError as error:
            raise Unavailable(f"{url} does not answer within {QUICK_TIMEOUT_S:g} s") from error
        except aiohttp.ClientConnectorError as error:
            raise Unavailable(f"nothing answers at {url} ({error.strerror})") from error
        except (aiohttp.ClientError, ValueError) as error:
            raise Unavailable(f"{url} cannot be read ({error})") from error

    def _open(self) -> aiohttp.ClientSession:
        assert self._session is not None, "use Endpoint as an async context manager"
        return self._session


def base_url(url: str) -> str:
    """Return scheme, host and path before /v1. Raises InvalidRequest unless it is http(s)."""
    if not url.startswith(("http://", "https://")):
        raise InvalidRequest(f"{url!r} is no URL: it starts with http:// or https://")
    return url.rstrip("/").removesuffix("/v1")


def _decode(event: bytes) -> _Chunk:
    try:
        return msgspec.json.decode(event, type=_Chunk)
    except msgspec.DecodeError as error:
        shown = event[:80].decode(errors="replace")
        raise MalformedStream(f"an event is no completion chunk ({error}): {shown}") from error


def _model_ids(text: str) -> list[str]:
    try:
        return [model.id for model in msgspec.json.decode(text, type=_Models).data]
    except msgspec.DecodeError:
        return []  # not a model list; the caller says what that means


async def _error_body(response: aiohttp.ClientResponse) -> str:
    body = await response.content.read(64 << 10)
    try:
        return _error_text(msgspec.json.decode(body))
    except msgspec.DecodeError:
        return body.decode(errors="replace").strip() or "no explanation"


def _error_text(error: Any) -> str:
    """Find the message in the shapes that servers use: text, {message} or {error: {message}}."""
    while isinstance(error, dict):
        inner = error.get("error", error.get("message", error.get("detail")))
        if inner is None:
            break
        error = inner
    return error if isinstance(error, str) else msgspec.json.encode(error).decode()
