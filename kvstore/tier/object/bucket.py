"""obstore, one attempt at a time: the only file that knows the library.

Its own retries are off, so that every request is counted and bounded where `requests` says so.
What an answer claims is checked before its body is read, and a body is read in chunks, so a store
that sends more than was asked for costs no memory.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import (
    BaseError,
    NotFoundError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from obstore.store import AzureStore, GCSStore, LocalStore, S3Store

from kvstore.block import Buffer
from kvstore.config import ObjectSettings
from kvstore.errors import ConfigError
from kvstore.tier.object.failure import ObjectFailed, ObjectGone, ObjectRefused
from kvstore.tier.object.names import Listed
from kvstore.tier.object.requests import Sink

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

PAGE_OBJECTS = 1000  # what S3 lists in one request
CHUNK_NBYTES = 256 << 10  # handed over at once: the processor's cache still has it
WHOLE_NBYTES_MAX = 64 << 20  # larger objects go up in parts: three requests and one for each part
PART_NBYTES = 16 << 20
PARTS_AT_ONCE = 4
CONNECT_TIMEOUT_S = 5.0
_STATUS = re.compile(r"status[^0-9]{1,24}([1-5][0-9]{2})\b", re.ASCII)
_TIMED_OUT = re.compile(r"TimedOut|timed out", re.IGNORECASE)


def open_bucket(settings: ObjectSettings) -> ObstoreBucket:
    """Return the bucket of `settings.url`. Raises ConfigError if the library refuses it."""
    try:
        return ObstoreBucket(open_store(settings), settings.requests_max)
    except (BaseError, ValueError, OSError) as error:
        # What the library says may quote what it found in the environment.
        raise ConfigError(f"object.url cannot be used ({type(error).__name__})") from None


class ObstoreBucket:
    """One bucket and prefix. Implements `Bucket`."""

    def __init__(self, store: ObjectStore, requests_max: int) -> None:
        self._store = store
        # On the event loop, chunks wait for their turns: reads took 7 % longer, on two cores.
        self._threads = ThreadPoolExecutor(requests_max, thread_name_prefix="kvstore-object")

    async def pages(self, prefix: str) -> AsyncGenerator[list[Listed], None]:
        stream = obstore.list(self._store, prefix or None, chunk_size=PAGE_OBJECTS)
        while True:
            with _translated("list"):
                page = await anext(stream, None)
            if page is None:
                return
            yield [Listed(m["path"], m["size"], m["last_modified"].timestamp()) for m in page]

    async def head(self, name: str) -> Listed:
        with _translated("head"):
            meta = await obstore.head_async(self._store, name)
        return Listed(meta["path"], meta["size"], meta["last_modified"].timestamp())

    async def get(self, name: str, start: int, nbytes: int, sink: Sink) -> None:
        with _translated("get"):
            options: obstore.GetOptions = {"range": (start, start + nbytes)}
            result = await obstore.get_async(self._store, name, options=options)
            if result.range != (start, start + nbytes):
                raise ObjectFailed("get: not the bytes asked for", reason="short")
            drain = _Drain(result.stream(min_chunk_size=CHUNK_NBYTES), nbytes, sink)
            try:
                loop = asyncio.get_running_loop()
                filled = await loop.run_in_executor(self._threads, drain.run)
            finally:
                drain.stop()
        if filled < nbytes:
            raise ObjectFailed(f"get: {filled} of {nbytes} bytes", reason="short")

    async def put(self, name: str, buffers: Sequence[Buffer], nbytes: int) -> int:
        several = nbytes > WHOLE_NBYTES_MAX
        with _translated("put"):
            await obstore.put_async(
                self._store,
                name,
                iter(buffers),
                use_multipart=several,
                chunk_size=PART_NBYTES,
                max_concurrency=PARTS_AT_ONCE,
            )
        return 2 + -(-nbytes // PART_NBYTES) if several else 1

    async def delete(self, names: Sequence[str]) -> None:
        try:
            with _translated("delete"):
                await obstore.delete_async(self._store, list(names))
        except ObjectGone:
            if len(names) > 1:  # a folder says so of the first that is not there, and stops
                for name in names:
                    await self.delete([name])


class _Drain:
    """A body on its way to a sink, by a thread that waits for each chunk of it."""

    def __init__(self, body: Iterable[Buffer], nbytes: int, sink: Sink) -> None:
        self._body = body
        self._nbytes = nbytes
        self._sink = sink
        self._lock = threading.Lock()
        self._stopped = False

    def run(self) -> int:
        """Hand the body over; return how many bytes it had. Raises ObjectFailed for too many."""
        filled = 0
        for chunk in self._body:
            data = memoryview(chunk)
            if filled + len(data) > self._nbytes:
                raise ObjectFailed("get: more bytes than asked for", reason="short")
            with self._lock:
                if self._stopped:
                    break
                self._sink(filled, data)
            filled += len(data)
        return filled

    def stop(self) -> None:
        """From now on nothing reaches the sink; the thread ends with the next chunk, or timeout."""
        with self._lock:
            self._stopped = True


@contextmanager
def _translated(kind: str) -> Iterator[None]:
    """Raise the errors of `failure` for the library's: see there why nothing else goes on."""
    try:
        yield
    except (NotFoundError, FileNotFoundError):
        raise _not_found(kind) from None
    except (PermissionDeniedError, UnauthenticatedError, PermissionError):
        raise ObjectRefused(f"{kind}: not allowed", reason="refused") from None
    except (BaseError, OSError) as error:
        raise _failure(kind, str(error)) from None


def _not_found(kind: str) -> ObjectGone | ObjectRefused:
    if kind in ("list", "put"):
        return ObjectRefused(f"{kind}: no such bucket", reason="refused")
    return ObjectGone(f"{kind}: no such object", reason="gone")


def _failure(kind: str, text: str) -> ObjectFailed | ObjectRefused:
    found = _STATUS.search(text)
    status = int(found[1]) if found else 0
    if _TIMED_OUT.search(text):
        return ObjectFailed(f"{kind}: timed out", reason="timeout")
    if status in (429, 503):
        return ObjectFailed(f"{kind}: slow down, HTTP {status}", reason="throttled")
    if 400 <= status < 500 and status != 408:
        return ObjectRefused(f"{kind}: HTTP {status}", reason="refused")
    if status:
        return ObjectFailed(f"{kind}: HTTP {status}", reason="server")
    return ObjectFailed(f"{kind}: the connection failed", reason="connection")


def open_store(settings: ObjectSettings) -> ObjectStore:
    """Return the library's own store for `settings`, as it comes."""
    parts = urlsplit(settings.url)
    host, prefix = parts.netloc, unquote(parts.path).strip("/")
    if parts.scheme == "file":
        folder = Path("/", host, prefix)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return LocalStore(folder, automatic_cleanup=True)
    client: ClientConfig = {
        "allow_http": settings.allow_http,
        "connect_timeout": timedelta(seconds=CONNECT_TIMEOUT_S),
        "timeout": timedelta(seconds=settings.timeout_s),
        "pool_max_idle_per_host": str(settings.requests_max),
    }
    retry: RetryConfig = {"max_retries": 0}
    common: dict[str, Any] = {
        "prefix": prefix or None,
        "client_options": client,
        "retry_config": retry,
    }
    given = {"endpoint": settings.endpoint, "region": settings.region}
    options: Any = {key: value for key, value in given.items() if value}
    if parts.scheme == "s3":
        return S3Store(host, **common, **options)
    if parts.scheme == "az":
        return AzureStore(host, **common, **options)
    return GCSStore(host, **common)
