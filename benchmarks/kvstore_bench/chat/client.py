"""One streamed request to an OpenAI-compatible endpoint -> one Sample."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from kvstore.model.errors import InvalidRequest, Unauthorized, Unavailable
from kvstore_bench.chat.answer import MESSAGE_CHARACTERS_MAX, Answer, Failed, Recording
from kvstore_bench.chat.http1 import (
    ConnectFailed,
    Disconnected,
    Head,
    HTTPClient,
    MalformedResponse,
)
from kvstore_bench.chat.sample import Failure, Sample
from kvstore_bench.chat.sse import MalformedStream
from kvstore_bench.chat.workloads.workload import Message, transcript

EndpointKind = Literal["chat", "completions"]

QUICK_TIMEOUT_S = 10.0
PAGE_NBYTES_MAX = 64 << 20


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class Endpoint:
    """A model behind an OpenAI-compatible URL, asked over connections that are kept alive.

    `body` is merged into every request and wins over what is set here. Use it as an async context
    manager, in one event loop. Raises InvalidRequest for what is no http(s) URL.
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
        self._http = HTTPClient(self.url)
        self._path = urlsplit(self.url).path

    async def __aenter__(self) -> Endpoint:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._http.close()

    async def fetch(self, path: str) -> tuple[int, str]:
        """Get a small page of the same server: status and text. Raises Unavailable."""
        try:
            return await _page(self._http, self.url + path, self._headers)
        except Unavailable as error:
            raise Unavailable(
                f"{error}. Start the server (for example: vllm serve MODEL --port 8000) and wait"
                f" until {self.url}/health answers, or give another --url"
            ) from error

    async def fetch_elsewhere(self, url: str) -> tuple[int, str]:
        """Get a small page of another server, which is not shown the API key."""
        http = HTTPClient(base_url(url))
        try:
            return await _page(http, url, {})
        finally:
            http.close()

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
        max_tokens: int,
        epoch: float = 0.0,
        due_s: float | None = None,
        hints: Mapping[str, Any] | None = None,
    ) -> Sample:
        """Send a history, read the whole answer, return the measurement. Never raises for a
        request that went wrong: that is `Sample.failure`. epoch: perf_counter at the run's start;
        due_s: when the request should have started, counted from there. hints: what kvstore's
        connector is told of the conversation.
        """
        request = self._request(messages, model, max_tokens)
        if hints is not None:
            request.setdefault("kv_transfer_params", {"kvstore": hints})
        body = msgspec.json.encode(request)
        recording = Recording(time.perf_counter())
        failure = None
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._stream(body, recording)
        except Failed as error:
            failure = error.failure
        except (MalformedStream, MalformedResponse) as error:
            failure = Failure("malformed", str(error)[:MESSAGE_CHARACTERS_MAX])
        except TimeoutError:
            failure = Failure("timeout", f"no complete answer within {self._timeout_s:g} s")
        except ConnectFailed as error:
            failure = Failure("connect", f"cannot connect to {self.url}: {error}")
        except Disconnected as error:
            failure = Failure("cut", f"the connection broke: {error}")
        text_ended = failure is None and recording.first is not None
        ended = recording.last if text_ended else time.perf_counter()
        usage = recording.usage
        details = usage.prompt_tokens_details if usage else None
        return Sample(
            conversation_id=conversation_id,
            turn=turn,
            messages=len(messages),
            started_s=recording.started - epoch,
            queued_s=0.0 if due_s is None else max(0.0, recording.started - epoch - due_s),
            ttft_s=None if recording.first is None else recording.first - recording.started,
            itl_s=tuple(recording.gaps),
            latency_s=ended - recording.started,
            input_tokens=usage.prompt_tokens if usage else None,
            output_tokens=usage.completion_tokens if usage else None,
            cached_tokens=details.cached_tokens if details else None,
            output_text="".join(recording.text),
            failure=failure,
        )

    def _request(self, messages: Sequence[Message], model: str, max_tokens: int) -> dict[str, Any]:
        asked = {"messages": messages} if self._kind == "chat" else {"prompt": transcript(messages)}
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        return {"model": model, **asked, **stream, "max_tokens": max_tokens, **self._body}

    async def _stream(self, body: bytes, recording: Recording) -> None:
        path = "/v1/chat/completions" if self._kind == "chat" else "/v1/completions"
        answer = Answer(recording)
        head = await self._http.request(
            "POST",
            self._path + path,
            headers={"Content-Type": "application/json", **self._headers},
            body=body,
            on_body=answer.read,
        )
        answer.check(head)


async def _page(http: HTTPClient, url: str, headers: Mapping[str, str]) -> tuple[int, str]:
    """Get a small page: status and text. Raises Unavailable."""
    pieces: list[bytes] = []

    def read(head: Head, data: bytes, now: float) -> bool:
        pieces.append(data)
        if sum(map(len, pieces)) > PAGE_NBYTES_MAX:
            raise MalformedResponse(f"a page is longer than {PAGE_NBYTES_MAX} bytes")
        return False

    parts = urlsplit(url)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        async with asyncio.timeout(QUICK_TIMEOUT_S):
            head = await http.request("GET", path, headers=headers, on_body=read)
    except TimeoutError as error:
        raise Unavailable(f"{url} does not answer within {QUICK_TIMEOUT_S:g} s") from error
    except ConnectFailed as error:
        raise Unavailable(f"nothing answers at {url} ({error})") from error
    except (Disconnected, MalformedResponse) as error:
        raise Unavailable(f"{url} cannot be read ({error})") from error
    return head.status, b"".join(pieces).decode(errors="replace")


def base_url(url: str) -> str:
    """Return scheme, host and path before /v1. Raises InvalidRequest unless it is http(s)."""
    if not url.startswith(("http://", "https://")):
        raise InvalidRequest(f"{url!r} is no URL: it starts with http:// or https://")
    try:
        HTTPClient(url)
    except ValueError as error:
        raise InvalidRequest(str(error)) from error
    return url.rstrip("/").removesuffix("/v1")


def _model_ids(text: str) -> list[str]:
    try:
        return [model.id for model in msgspec.json.decode(text, type=_Models).data]
    except msgspec.DecodeError:
        return []  # not a model list; the caller says what that means
