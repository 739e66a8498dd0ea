"""What Google's XML interface has of its own, in front of a real store that speaks S3's.

There is no emulator of that interface to install. Its objects, listings and uploads in parts are
S3's; not so the credentials, and that deleting what is not there is an error.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from aiohttp import web

from kvstore.testing.seaweed import BUCKET, Seaweed
from tests.tier.object.proxy import Proxy

TOKEN = "not-a-token-77aa"
START_TIMEOUT_S = 30.0
BODY_NBYTES_MAX = 256 << 20


class Google(Proxy):
    """Lets in who brings TOKEN, as `environment` does."""

    environment: ClassVar = {"GOOGLE_BEARER_TOKEN": TOKEN}

    def settings(self, prefix: str) -> dict[str, Any]:
        """Return those of an object tier in the bucket."""
        return {"url": f"gs://{BUCKET}/{prefix}", "endpoint": self.endpoint, "allow_http": True}

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.Response(status=401)
        headers = request.headers.copy()
        del headers["Authorization"]  # the store knows keys, and those who come without
        anonymous = request.clone(headers=headers, client_max_size=BODY_NBYTES_MAX)
        if request.method == "DELETE":
            found = await super().handle(anonymous.clone(method="HEAD"))
            if found.status == 404:
                return web.Response(status=404)
        return await super().handle(anonymous)


@contextmanager
def running() -> Iterator[Google]:
    """Start one in a thread of its own, with its store."""
    with Seaweed(anonymous=True) as store:
        front = Google(store.start().endpoint)
        up = threading.Event()
        loop = asyncio.new_event_loop()
        stop = asyncio.Event()

        async def serve() -> None:
            async with front.running():
                up.set()
                await stop.wait()

        thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
        thread.start()
        try:
            assert up.wait(START_TIMEOUT_S)
            yield front
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join(START_TIMEOUT_S)
            loop.close()
