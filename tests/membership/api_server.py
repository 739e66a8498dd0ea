"""A Kubernetes API server for tests: kmock's emulator over HTTP, and what kubelets do to it."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import kmock

from kvstore.membership.kubernetes_account import Account
from kvstore.testing.ports import free_ports

NAMESPACE, SERVICE = "prod", "kvstore-peers"
CLOSING_S = 0.05  # for the loop to close connections that it took while the last call ended
SLICES = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"


def slice_of(address: str, **conditions: Any) -> dict[str, Any]:
    """Return the EndpointSlice of one ready pod at HOST:PORT."""
    host, port = address.rsplit(":", 1)
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": f"{SERVICE}-{port}",
            "namespace": NAMESPACE,
            "labels": {"kubernetes.io/service-name": SERVICE},
        },
        "addressType": "IPv4",
        "endpoints": [{"addresses": [host], "conditions": {"ready": True, **conditions}}],
        "ports": [{"name": "metrics", "port": 7701}, {"name": "peer", "port": int(port)}],
    }


class Cluster:
    """The server. list, watch: what answers instead of the emulator, if it returns something.

    directory: that of the service account. token: what is let in; it is in the file at first.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.token = "first"
        self.lists = 0
        self.watches = 0
        self.asked: list[dict[str, str]] = []  # the queries
        self.list: Callable[[kmock.Request], Any] = lambda _: None
        self.watch: Callable[[], Any] | None = None
        self.emulator = kmock.KubernetesEmulator()
        self.emulator.resources["discovery.k8s.io/v1/endpointslices"] = {}
        self.emulator[kmock.action.LIST] << self._list
        self.emulator[kmock.action.WATCH] << self._watch
        (self.port,) = free_ports(1)
        self._going = asyncio.Event()
        self._running = contextlib.AsyncExitStack()
        self._server: kmock.Server | None = None
        for name, text in (("token", self.token), ("namespace", NAMESPACE), ("ca.crt", "")):
            (directory / name).write_text(text)

    @property
    def account(self) -> Account:
        return Account("127.0.0.1", self.port, NAMESPACE, self.directory, tls=False)

    async def up(self) -> None:
        self._going.clear()
        self._server = kmock.Server(self.emulator, port=self.port)
        await self._running.enter_async_context(self._server)

    async def down(self) -> None:
        """Answer no more; what it knows stays."""
        self._going.set()
        await self._running.aclose()
        self._server = None

    async def ready(self, address: str, **conditions: Any) -> None:
        """Let the pod at an address be a ready one."""
        assert self._server is not None
        made = slice_of(address, **conditions)
        async with self._server.client.post(SLICES, json=made) as answer:
            if answer.status < 300:
                return
        name = made["metadata"]["name"]
        async with self._server.client.patch(f"{SLICES}/{name}", json=made) as answer:
            assert answer.status < 300

    async def gone(self, address: str) -> None:
        """Let there be no pod at an address."""
        assert self._server is not None
        name = slice_of(address)["metadata"]["name"]
        async with self._server.client.delete(f"{SLICES}/{name}"):
            pass

    async def _list(self, request: kmock.Request) -> Any:
        self.lists += 1
        self.asked.append(dict(request.params))
        found = self._refusal(request) or self.list(request)
        if inspect.isawaitable(found):
            found = await found
        # A reaction that returns nothing is not asked again: so the emulator's is called from here.
        return _whole(await self.emulator._serve_list(request) if found is None else found)

    def _watch(self, request: kmock.Request) -> Any:
        self.watches += 1
        self.asked.append(dict(request.params))
        refusal = self._refusal(request)
        if refusal is not None:
            return refusal
        events = self.watch() if self.watch is not None else self.emulator._serve_watch(request)
        return _whole(self._while_up(events) if hasattr(events, "__anext__") else events)

    async def _while_up(self, events: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """Yield events until the server goes down, which would else wait for the last of them."""
        going = asyncio.ensure_future(self._going.wait())
        try:
            while True:
                coming = asyncio.ensure_future(anext(events))
                await asyncio.wait({coming, going}, return_when=asyncio.FIRST_COMPLETED)
                if not coming.done():
                    coming.cancel()
                    return
                try:
                    yield coming.result()
                except StopAsyncIteration:
                    return
        finally:
            going.cancel()

    def _refusal(self, request: kmock.Request) -> kmock.Response | None:
        if request.headers.get("Authorization") == f"Bearer {self.token}":
            return None
        return kmock.Response(status=401, payload={"kind": "Status", "code": 401})


def _whole(answer: Any) -> Any:
    """Return an answer with a status of its own: kmock keeps the one of the answer before."""
    if isinstance(answer, kmock.Response):
        return answer
    return kmock.Response(status=200, payload=answer)


@contextlib.asynccontextmanager
async def cluster(directory: Path) -> AsyncIterator[Cluster]:
    """Yield a server that answers."""
    server = Cluster(directory)
    await server.up()
    try:
        yield server
    finally:
        await asyncio.wait_for(server.down(), 10)
        await asyncio.sleep(CLOSING_S)
