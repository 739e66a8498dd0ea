"""The bucket through obstore, one attempt at a time. No other file knows the library.

The library's own retries are off, so that `requests` counts and bounds every request. The headers
of an answer are checked before its body is read. A body is read in chunks, so a store that sends
too much costs no memory. Bodies from S3 bypass the library where possible: see `receive`.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotFoundError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import AzureStore, GCSStore, LocalStore, S3Store

from kvstore.model.block import Buffer
from kvstore.model.errors import ConfigError
from kvstore.settings import ObjectSettings
from kvstore.system.breaker import Breaker, State
from kvstore.system.threads import Threads
from kvstore.tier.object.drain import Drain
from kvstore.tier.object.failure import (
    Cause,
    ObjectExists,
    ObjectFailed,
    ObjectGone,
    ObjectRefused,
)
from kvstore.tier.object.names import Listed
from kvstore.tier.object.receive import Connections, Receipt, Unfit
from kvstore.tier.object.requests import Filled

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

logger = logging.getLogger(__name__)

PAGE_OBJECTS = 1000  # what S3 lists in one request
CHUNK_NBYTES = 256 << 10  # processed at once, while it is in the processor's cache
# Larger objects are uploaded in parts: three requests and one for each part.
WHOLE_NBYTES_MAX = 64 << 20
PART_NBYTES = 16 << 20
PARTS_AT_ONCE = 4
CONNECT_TIMEOUT_S = 5.0
SIGNED_FOR = timedelta(minutes=15)  # from our clock on: the clock skew that S3 accepts in headers
# After an answer that only the library understands, no read bypasses it for so long.
UNFIT_MIN_S = 10.0
UNFIT_MAX_S = 600.0
_STATUS = re.compile(r"status[^0-9]{1,24}([1-5][0-9]{2})\b", re.ASCII)
_TIMED_OUT = re.compile(r"TimedOut|timed out", re.IGNORECASE)
_REDIRECTED = re.compile(r"redirect without LOCATION", re.IGNORECASE)
_METADATA = re.compile(r"https?://(169\.254\.169\.254|metadata(\.google\.internal)?)[/:]")
_CONNECTING = (
    ("dns error", "the name of the store is not known", Cause.NAME),
    ("ConnectionRefused", "the connection was refused", Cause.CONNECTION),
    ("InvalidMessage", "the store does not speak TLS", Cause.TLS),
    ("InvalidCertificate", "the certificate of the store is not trusted", Cause.TLS),
)


def open_bucket(settings: ObjectSettings) -> ObstoreBucket:
    """Return the bucket of `settings.url`. Raises ConfigError if the library refuses it."""
    try:
        return ObstoreBucket(open_store(settings), settings)
    except (BaseError, ValueError, OSError) as error:
        # The library's message may quote values of the environment.
        raise ConfigError(f"object.url cannot be used ({type(error).__name__})") from None


class ObstoreBucket:
    """One bucket and prefix. Implements `Bucket`."""

    def __init__(self, store: ObjectStore, settings: ObjectSettings) -> None:
        """store: opened with these settings."""
        self._store = store
        self._allow_http = settings.allow_http
        self._creates = True  # until the store has refused a put "if absent"
        self._may_sign = isinstance(store, S3Store) and not getproxies()
        # On the event loop, chunks wait for their turns: reads took 7 % longer, on two cores.
        self._threads = Threads(settings.requests_max, "kvstore-object")
        self._connections = Connections(settings.timeout_s)
        self._unfit = Breaker(time.monotonic, UNFIT_MIN_S, UNFIT_MAX_S)

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

    async def get(
        self, name: str, start: int, buffers: Sequence[memoryview], filled: Filled
    ) -> None:
        if self._may_sign and self._unfit.state is not State.OPEN:
            sign = partial(self._sign, name)
            try:
                await self._in_thread(Receipt(self._connections, sign, start, buffers, filled))
            except Unfit as unfit:
                self._by_library_for_now(unfit)
            else:
                self._unfit.success()
                return
        await self._get_by_library(name, start, buffers, filled)

    async def _get_by_library(
        self, name: str, start: int, buffers: Sequence[memoryview], filled: Filled
    ) -> None:
        end = start + sum(map(len, buffers))
        with _translated("get"):
            result = await obstore.get_async(self._store, name, options={"range": (start, end)})
            if result.range != (start, end):
                raise ObjectFailed("get: not the bytes asked for", reason="short")
            body = result.stream(min_chunk_size=CHUNK_NBYTES)
            await self._in_thread(Drain(body, buffers, filled))

    async def _in_thread(self, transfer: Receipt | Drain) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._threads, transfer.run)
        finally:
            transfer.stop()

    def _sign(self, name: str) -> str:
        store: Any = self._store
        try:
            url: str = obstore.sign(store, "GET", name, SIGNED_FOR)
        except (BaseError, OSError, ValueError) as error:
            raise Unfit(f"not signed: {type(error).__name__}") from None
        if not (self._allow_http or url.startswith("https://")):
            raise Unfit("not https")
        return url

    def _by_library_for_now(self, unfit: Unfit) -> None:
        if self._unfit.closed:
            logger.info("object=read_by_library reason=%r", str(unfit))
            self._unfit.trip()
        elif self._unfit.state is State.HALF_OPEN:  # else other reads have just noted it
            self._unfit.probe_failed()

    async def put(
        self, name: str, buffers: Sequence[Buffer], nbytes: int, *, absent: bool = False
    ) -> int:
        several = nbytes > WHOLE_NBYTES_MAX
        if absent and self._creates and not several:
            try:
                with _translated("put"):
                    await obstore.put_async(
                        self._store, name, iter(buffers), use_multipart=False, mode="create"
                    )
                return 1
            except NotSupportedError:
                logger.info("object=no_create: a later write takes the place of an earlier one")
                self._creates = False
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
            if len(names) > 1:  # a folder stops at the first file that does not exist
                for name in names:
                    await self.delete([name])

    def close(self) -> None:
        self._connections.close()


@contextmanager
def _translated(kind: str) -> Iterator[None]:
    """Translate the library's errors to those of `failure`, without their text."""
    try:
        yield
    except (NotFoundError, FileNotFoundError):
        raise _not_found(kind) from None
    except (AlreadyExistsError, PreconditionError):
        raise ObjectExists(f"{kind}: there is one", reason="exists") from None
    except NotSupportedError:
        raise
    except (PermissionDeniedError, UnauthenticatedError, PermissionError):
        raise _forbidden(f"{kind}: not allowed") from None
    except (BaseError, OSError) as error:
        raise _failure(kind, str(error)) from None


def _not_found(kind: str) -> ObjectGone | ObjectRefused:
    if kind in ("list", "put"):
        return _no_bucket(kind)
    return ObjectGone(f"{kind}: no such object", reason="gone")


def _no_bucket(kind: str) -> ObjectRefused:
    return ObjectRefused(f"{kind}: no such bucket", reason="refused", cause=Cause.BUCKET)


def _forbidden(text: str) -> ObjectRefused:
    return ObjectRefused(text, reason="refused", cause=Cause.FORBIDDEN)


def _failure(kind: str, text: str) -> ObjectFailed | ObjectRefused:
    found = _STATUS.search(text)
    status = int(found[1]) if found else 0
    if _METADATA.search(text):  # the library asks the machine's metadata service last
        return _no_credentials(kind, status)
    if _TIMED_OUT.search(text):
        return ObjectFailed(f"{kind}: timed out", reason="timeout", cause=Cause.CONNECTION)
    if _REDIRECTED.search(text):
        status = 301
    return _answered(kind, status) if status else _unconnected(kind, text)


def _answered(kind: str, status: int) -> ObjectFailed | ObjectRefused:
    if status in (429, 503):
        return ObjectFailed(f"{kind}: slow down, HTTP {status}", reason="throttled")
    if status in (401, 403):
        return _forbidden(f"{kind}: not allowed, HTTP {status}")
    if status == 404:
        return _no_bucket(kind)
    if 300 <= status <= 400:
        text = f"{kind}: not the region or store of this bucket, HTTP {status}"
        return ObjectRefused(text, reason="refused", cause=Cause.REGION)
    if status < 500 and status != 408:
        return ObjectRefused(f"{kind}: HTTP {status}", reason="refused")
    return ObjectFailed(f"{kind}: HTTP {status}", reason="server")


def _no_credentials(kind: str, status: int) -> ObjectFailed | ObjectRefused:
    text = f"{kind}: there are no credentials, and this machine gives none"
    if 400 <= status < 500:
        return ObjectRefused(text, reason="refused", cause=Cause.CREDENTIALS)
    return ObjectFailed(text, reason="connection", cause=Cause.CREDENTIALS)


def _unconnected(kind: str, text: str) -> ObjectFailed:
    for pattern, words, cause in _CONNECTING:
        if pattern in text:
            return ObjectFailed(f"{kind}: {words}", reason="connection", cause=cause)
    words = "the connection failed"
    return ObjectFailed(f"{kind}: {words}", reason="connection", cause=Cause.CONNECTION)


def open_store(settings: ObjectSettings) -> ObjectStore:
    """Return the library's own store for `settings`."""
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
    endpoint = settings.endpoint
    if parts.scheme == "s3":
        return S3Store(host, **common, **_given(endpoint=endpoint, region=settings.region))
    if parts.scheme == "az":
        return AzureStore(host, **common, **_given(endpoint=endpoint))
    return GCSStore(host, **common, **_given(base_url=endpoint))


def _given(**options: str) -> Any:
    """Return the options that are set; the library takes the others from the environment."""
    return {name: value for name, value in options.items() if value}
