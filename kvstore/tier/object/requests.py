"""All requests to the bucket: bounded, timed, retried and counted; refused while the store is down.

A request is tried at most ATTEMPTS_MAX times, with pauses drawn from an exponentially growing range
("full jitter", so that daemons that failed together do not retry together). After
FAILURES_MAX failures in a row the breaker opens: calls are refused in microseconds, and only the
upkeep's probe finds out whether the store is back.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from functools import partial
from typing import Protocol, TypeAlias, TypeVar

from kvstore.metrics import Metrics
from kvstore.model.block import Buffer
from kvstore.model.errors import Unavailable
from kvstore.system.bandwidth import ChannelLane
from kvstore.system.breaker import Breaker
from kvstore.tier.object.failure import (
    ObjectExists,
    ObjectFailed,
    ObjectGone,
    ObjectRefused,
)
from kvstore.tier.object.names import Listed

T = TypeVar("T")
# Called by a thread with the index of the buffer that is full; must not raise.
Filled: TypeAlias = Callable[[int], None]
ATTEMPTS_MAX = 4
PAUSE_MIN_S = 0.1
PAUSE_MAX_S = 5.0
FAILURES_MAX = 5
BACKOFF_MIN_S = 1.0
BACKOFF_MAX_S = 30.0
DELETES_MAX = 1000  # what S3 deletes in one request
PAGES_MAX = 100_000  # of a thousand objects each
# A timeout below this says little about the store, so it is not counted as its failure.
STALL_S = 1.0


class Bucket(Protocol):
    """One attempt for each call. Raises the errors of `failure`. A cancelled call does nothing
    more."""

    def pages(self, prefix: str) -> AsyncGenerator[list[Listed], None]:
        """Yield a listing, one request's answer at a time; names begin with `prefix` + "/"."""

    async def head(self, name: str) -> Listed: ...

    async def get(
        self, name: str, start: int, buffers: Sequence[memoryview], filled: Filled
    ) -> None:
        """Fill `buffers`, one after the other, with an object's bytes from `start` on, or raise;
        from then on they are the caller's again."""

    async def put(
        self, name: str, buffers: Sequence[Buffer], nbytes: int, *, absent: bool = False
    ) -> int:
        """Store an object as a whole or not at all. Returns how many requests that took.

        absent: raise ObjectExists if there is one of that name, as far as the store can tell.
        """

    async def delete(self, names: Sequence[str]) -> None:
        """Delete at most DELETES_MAX objects, as far as they exist."""

    def close(self) -> None:
        """Close idle connections."""


class Requests:
    """timeout_s: for one attempt; a put has until its deadline, because its size is not bounded."""

    def __init__(
        self,
        bucket: Bucket,
        *,
        metrics: Metrics,
        now: Callable[[], float],
        timeout_s: float,
        requests_max: int,
        lane: ChannelLane | None = None,
    ) -> None:
        """lane: what may be moved, beside others."""
        self._lane = lane
        self._bucket = bucket
        self._metrics = metrics
        self._now = now
        self._timeout_s = timeout_s
        self._places = asyncio.Semaphore(requests_max)
        self._failures = 0
        self.breaker = Breaker(now, BACKOFF_MIN_S, BACKOFF_MAX_S)
        metrics.object_breaker_open.set_function(lambda: float(not self.breaker.closed))

    def close(self) -> None:
        """Close idle connections. Callers cancel their requests before."""
        self._bucket.close()

    def left_s(self, deadline: float) -> float:
        """Return the seconds until a deadline."""
        return max(0.0, deadline - self._now())

    async def first_page(
        self, prefix: str, deadline: float, *, probe: bool = False
    ) -> list[Listed]:
        """Return the first page of a listing. probe: ask even if the breaker is open."""

        async def call() -> list[Listed]:
            async with aclosing(self._bucket.pages(prefix)) as pages:
                return await anext(pages, [])

        return await self._send("list", call, deadline, probe=probe)

    async def pages(self, prefix: str) -> AsyncIterator[list[Listed]]:
        """Yield a whole listing. It cannot be resumed, so nothing is retried. Raises ObjectFailed
        for one that does not end."""
        async with aclosing(self._bucket.pages(prefix)) as pages:
            for _ in range(PAGES_MAX):
                page = await self._attempt("list", lambda: anext(pages, []), self._timeout_s)
                if not page:
                    return
                yield page
        raise ObjectFailed(f"a listing of more than {PAGES_MAX} pages", reason="long")

    async def head(self, name: str, deadline: float) -> Listed:
        return await self._send("head", lambda: self._bucket.head(name), deadline)

    async def get(
        self,
        name: str,
        start: int,
        buffers: Sequence[memoryview],
        deadline: float,
        filled: Filled = lambda _: None,
    ) -> None:
        """Fill `buffers` with exactly these bytes. Raises ObjectGone, ObjectRefused, ObjectFailed;
        then their content is unspecified. A retry fills all of them again."""
        nbytes = sum(map(len, buffers))
        async with self._moving(nbytes, deadline, waits=False):
            await self._send(
                "get", lambda: self._bucket.get(name, start, buffers, filled), deadline
            )
        self._metrics.bytes.labels("object", "read").inc(nbytes)

    async def fetch(self, name: str, start: int, nbytes: int, deadline: float) -> memoryview:
        """Return a few bytes."""
        answer = memoryview(bytearray(nbytes))
        await self.get(name, start, [answer], deadline)
        return answer

    async def put(
        self,
        name: str,
        buffers: Sequence[Buffer],
        nbytes: int,
        deadline: float,
        *,
        absent: bool = False,
    ) -> None:
        """Store an object. The buffers stay untouched until this returns. absent: see `Bucket`."""

        async def call() -> None:
            if absent:
                requests = await self._bucket.put(name, buffers, nbytes, absent=True)
            else:
                requests = await self._bucket.put(name, buffers, nbytes)
            self._metrics.object_requests.labels("put").inc(requests - 1)

        async with self._moving(nbytes, deadline):
            await self._send("put", call, deadline, attempt_s=deadline - self._now())
        self._metrics.bytes.labels("object", "write").inc(nbytes)

    async def delete(self, names: Sequence[str], deadline: float) -> None:
        for start in range(0, len(names), DELETES_MAX):
            call = partial(self._bucket.delete, names[start : start + DELETES_MAX])
            await self._send("delete", call, deadline)

    @asynccontextmanager
    async def _moving(
        self, nbytes: int, deadline: float, *, waits: bool = True
    ) -> AsyncIterator[None]:
        """Have the turn of so many bytes. waits: for those of others, too. Raises ObjectFailed."""
        if self._lane is None:
            yield
            return
        limit_s = max(0.0, deadline - self._now())
        async with AsyncExitStack() as stack:
            try:
                if waits:
                    await stack.enter_async_context(self._lane.moving(nbytes, limit_s))
                else:
                    await self._lane.take(nbytes, limit_s)
            except (TimeoutError, Unavailable) as error:
                raise ObjectFailed("no turn for these bytes in time", reason="busy") from error
            yield

    async def _send(
        self,
        kind: str,
        call: Callable[[], Awaitable[T]],
        deadline: float,
        *,
        attempt_s: float | None = None,
        probe: bool = False,
    ) -> T:
        for attempt in range(ATTEMPTS_MAX):
            if not (probe or self.breaker.closed):
                raise ObjectFailed(
                    "the object store does not answer",
                    retry_after_s=max(PAUSE_MIN_S, self.breaker.retry_after_s),
                    reason="breaker",
                )
            try:
                limit_s = min(deadline - self._now(), attempt_s or self._timeout_s)
                return await self._attempt(kind, call, limit_s)
            except ObjectFailed as error:
                pause_s = random.uniform(0, min(PAUSE_MAX_S, PAUSE_MIN_S * 2**attempt))
                late = self._now() + pause_s >= deadline
                if probe or late or error.reason == "busy" or attempt + 1 == ATTEMPTS_MAX:
                    raise
            self._metrics.object_retries.labels(kind).inc()
            await asyncio.sleep(pause_s)
        raise AssertionError("the last attempt returns or raises")

    async def _attempt(self, kind: str, call: Callable[[], Awaitable[T]], limit_s: float) -> T:
        began = self._now()
        try:
            async with asyncio.timeout(limit_s):
                await self._places.acquire()
        except TimeoutError:
            raise ObjectFailed("too many requests under way", reason="busy") from None
        try:
            self._metrics.object_requests.labels(kind).inc()
            async with asyncio.timeout(limit_s - (self._now() - began)):
                result = await call()
        except TimeoutError:
            failed = ObjectFailed(f"{kind}: no answer in {limit_s:.1f} s", reason="timeout")
            self._failed(kind, failed, counts=limit_s >= min(STALL_S, self._timeout_s))
            raise failed from None
        except (ObjectGone, ObjectExists):
            self._answered()
            raise
        except (ObjectFailed, ObjectRefused) as error:
            self._failed(kind, error, counts=isinstance(error, ObjectFailed))
            raise
        finally:
            self._places.release()
        self._answered()
        return result

    def _answered(self) -> None:
        self._failures = 0
        self.breaker.success()

    def _failed(self, kind: str, error: ObjectFailed | ObjectRefused, *, counts: bool) -> None:
        self._metrics.object_errors.labels(kind, error.reason).inc()
        self._failures += counts
        if self._failures >= FAILURES_MAX:
            self.breaker.trip()
