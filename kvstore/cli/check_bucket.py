"""What the object tier needs of its bucket: rights to list, put, get and delete."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing

from kvstore.model.errors import ConfigError, CorruptBlock, KVStoreError
from kvstore.model.words import duration
from kvstore.settings import ObjectSettings
from kvstore.store.findings import Finding, ok, wrong
from kvstore.tier.object import Bucket
from kvstore.tier.object.advice import advice
from kvstore.tier.object.connect import connect

ABOUT = "bucket"
PROBE_NBYTES = 64


def check_bucket(settings: ObjectSettings) -> Iterator[Finding]:
    """Yield findings about `object.url`, if it is set. Leaves nothing behind if it may delete."""
    if not settings.url:
        return
    try:
        bucket = connect(settings)
    except ConfigError as error:
        yield wrong(ABOUT, str(error), "correct object.url, object.endpoint and the environment")
        return
    try:
        yield asyncio.run(_try_out(bucket, settings))
    finally:
        bucket.close()


async def _try_out(bucket: Bucket, settings: ObjectSettings) -> Finding:
    name, sent = f"doctor-{secrets.token_hex(8)}", secrets.token_bytes(PROBE_NBYTES)
    steps: dict[str, Callable[[], Awaitable[object]]] = {
        "list": lambda: _list(bucket),
        "put": lambda: bucket.put(name, [sent], PROBE_NBYTES),
        "get": lambda: _get(bucket, name, sent),
        "delete": lambda: bucket.delete([name]),
    }
    began = time.perf_counter()
    for step, work in steps.items():
        try:
            async with asyncio.timeout(settings.timeout_s):
                await work()
        except TimeoutError:
            found = f"{settings.url}: {step}: no answer in {settings.timeout_s:g} s"
            return wrong(ABOUT, found, "check object.endpoint, the network and proxies")
        except KVStoreError as error:
            do = advice(error, settings) or "look at the store's own log"
            return wrong(ABOUT, f"{settings.url}: {error}", do)
    took = duration(time.perf_counter() - began)
    return ok(ABOUT, f"{settings.url}: list, put, get and delete work, in {took}")


async def _list(bucket: Bucket) -> None:
    async with aclosing(bucket.pages("")) as pages:
        await anext(pages, None)


async def _get(bucket: Bucket, name: str, sent: bytes) -> None:
    got = memoryview(bytearray(PROBE_NBYTES))
    await bucket.get(name, 0, [got], lambda _: None)
    if got != sent:
        raise CorruptBlock("get: other bytes than were put")
