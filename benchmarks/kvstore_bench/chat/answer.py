"""One streamed answer: bytes in, what was said and when out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvstore_bench.chat.http1 import Head
from kvstore_bench.chat.sample import ErrorKind, Failure
from kvstore_bench.chat.sse import EventParser, MalformedStream

ERROR_NBYTES_MAX = 64 << 10
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


class Failed(Exception):
    """A request that has no complete answer."""

    def __init__(self, kind: ErrorKind, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.failure = Failure(kind, message[:MESSAGE_CHARACTERS_MAX], status)


@dataclass(slots=True)
class Recording:
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
            raise Failed("server", _error_text(chunk.error))
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


class Answer:
    """Reads one response: events of a stream, or what the server says is wrong."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._parser = EventParser()
        self._error = bytearray()

    def read(self, head: Head, data: bytes, now: float) -> bool:
        """Take the next bytes; return True after the last event."""
        if head.status != 200:
            self._error += data[: ERROR_NBYTES_MAX - len(self._error)]
            return False
        content_type = head.headers.get("content-type", "no content type")
        if "event-stream" not in content_type:
            raise MalformedStream(f"expected an event stream, got {content_type}")
        ended = False
        for event in self._parser.feed(data):
            ended = self._recording.take(event, now) or ended
        return ended

    def check(self, head: Head) -> None:
        """Raise Failed unless a whole answer has come."""
        if head.status != 200:
            message = f"HTTP {head.status}: {_error_body(bytes(self._error))}"
            raise Failed("http", message, head.status)
        if not self._recording.finished:
            raise Failed("cut", "the stream ended before the answer did")


def _decode(event: bytes) -> _Chunk:
    try:
        return msgspec.json.decode(event, type=_Chunk)
    except msgspec.DecodeError as error:
        shown = event[:80].decode(errors="replace")
        raise MalformedStream(f"an event is no completion chunk ({error}): {shown}") from error


def _error_body(body: bytes) -> str:
    try:
        return _error_text(msgspec.json.decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body.decode(errors="replace").strip() or "no explanation"


def _error_text(error: Any) -> str:
    """Find the message in the shapes that servers use: text, {message} or {error: {message}}."""
    while isinstance(error, dict):
        inner = error.get("error", error.get("message", error.get("detail")))
        if inner is None:
            break
        error = inner
    return error if isinstance(error, str) else msgspec.json.encode(error).decode()
