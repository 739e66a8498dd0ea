"""A real S3 server behind a proxy that answers badly when told to, and dies when told to."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from random import Random
from types import TracebackType
from typing import Self

from aiohttp import web

from kvstore.testing.seaweed import Seaweed
from tests.tier.object.proxy import Fault, Proxy

# What a life's trouble is; half of the requests are answered so, of `down` all.
FAULTS: dict[str, tuple[Fault, ...]] = {
    "down": (Fault.DROP,),
    "errors": (Fault.ERROR_500, Fault.SLOW_DOWN, Fault.FORBIDDEN),
    "missing": (Fault.NOT_FOUND,),
    "slow": (Fault.SLOW, Fault.STALL, Fault.STALL_IN_BODY),
    "garbled": (Fault.CUT, Fault.SHORT, Fault.OVERSIZE, Fault.DROP),
    "anything": tuple(Fault),
}
STARTED_S = 10.0


class Bucket:
    """A context manager. Every daemon reaches the server through `endpoint`, killed or not."""

    def __init__(self) -> None:
        self.met: Counter[str] = Counter()
        self._server = Seaweed()
        self._proxy = Proxy("")
        self._loop = asyncio.new_event_loop()
        self._up = threading.Event()
        self._over = asyncio.Event()
        self._thread = threading.Thread(
            target=self._loop.run_until_complete, args=(self._run(),), daemon=True
        )

    @property
    def environment(self) -> dict[str, str]:
        return self._server.environment

    @property
    def settings(self) -> list[str]:
        """Return those of a daemon that uses it, as `--set` takes them."""
        given = {**self._server.settings(), "endpoint": self._proxy.endpoint, "allow_http": "true"}
        return [f"object.{key}={value}" for key, value in given.items()]

    @property
    def requests(self) -> int:
        return self._proxy.seen.total()

    def trouble(self, name: str, draw: Random) -> None:
        """Answer badly until `calm`."""
        faults, share = FAULTS[name], 1.0 if name == "down" else 0.5

        def decide(_: web.BaseRequest) -> Fault | None:
            if draw.random() >= share:
                return None
            fault = draw.choice(faults)
            self.met[fault.name] += 1
            return fault

        self._proxy.fault = decide

    def calm(self) -> None:
        self._proxy.fault = lambda _: None

    def kill_server(self) -> None:
        """Kill it in the middle of whatever it does."""
        self._server.stop()
        self.met["server killed"] += 1

    def start_server(self) -> None:
        """Start it on what it stored."""
        self._server.start()
        self._proxy.upstream = self._server.endpoint

    def __enter__(self) -> Self:
        self.start_server()
        self._thread.start()
        if not self._up.wait(STARTED_S):
            raise TimeoutError("the proxy did not start")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(STARTED_S)
        self._loop.close()
        self._server.__exit__(kind, error, trace)

    async def _run(self) -> None:
        async with self._proxy.running():
            self._up.set()
            await self._over.wait()
