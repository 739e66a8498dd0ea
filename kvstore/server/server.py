"""Binds the daemon's addresses, serves, and takes everything down again in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any

from grpc_health.v1 import health, health_pb2

from kvstore.metrics import Metrics
from kvstore.model.errors import ConfigError
from kvstore.server.boundary import Boundary
from kvstore.server.health import Health
from kvstore.server.identity import OPEN_LOOPBACK, UNIX_SOCKET, Fixed, Identity
from kvstore.server.listeners import Served, TcpListener, UnixListener, drain_all
from kvstore.server.metrics_port import MetricsPort
from kvstore.server.recorder import Recorder
from kvstore.server.service import Service
from kvstore.server.tracing import Tracing
from kvstore.settings import parse_listen
from kvstore.store.live_settings import LiveSettings
from kvstore.store.store import Store
from kvstore.system.background import keep_running
from kvstore.system.descriptors import raise_limit
from kvstore.transport.messages import Epoch
from kvstore.transport.unix_sockets import arena_socket_path, call_socket_path

logger = logging.getLogger(__name__)

SERVICE_NAME = "kvstore.rpc.v1.KVStore"


class Server:
    """Serves one store. `open`, then `start`; `drain`, then `close`.

    `open` takes the socket's path and the metrics port, so that both are there, and probes are
    answered, while the store recovers. Each of them binds everything or nothing.
    """

    def __init__(self, store: Store, config: LiveSettings, metrics: Metrics, version: str) -> None:
        settings = config.settings
        self._settings = settings.server
        self._metrics = metrics
        self._store = store
        endpoint = self._settings.traces_endpoint
        self._tracing = Tracing(endpoint, version) if endpoint else None
        self._recorder = Recorder(metrics)
        self._grpc_health = health.aio.HealthServicer()
        self._opened = time.monotonic()
        self._serving = self._draining = self._unready = False
        self._health = Health(self._trouble, self._report)
        served = self._served(store, config, version)
        self._unix = UnixListener(
            self._settings.socket_path,
            served,
            self._boundary(Fixed(UNIX_SOCKET)),
            self._grpc_health,
        )
        self._tcp = TcpListener(
            self._settings.listen,
            served.service,
            self._boundary(Fixed(OPEN_LOOPBACK)),
            self._grpc_health,
        )
        self._open = contextlib.AsyncExitStack()
        self.metrics_port = 0

    @property
    def port(self) -> int:
        """Return the TCP port, 0 if there is none."""
        return self._tcp.port

    async def open(self) -> None:
        """Take the socket's path and the metrics port, and see whether the TCP port is free. Raises
        ConfigError that names what cannot be had."""
        self._opened = time.monotonic()
        async with contextlib.AsyncExitStack() as stack:
            raise_limit()
            stack.enter_context(self._unix.owned())
            self._tcp.check_free()
            beating = asyncio.create_task(
                keep_running("health", self._health.run, self._metrics.task_failed)
            )
            stack.push_async_callback(_cancelled, beating)
            self._open_metrics(stack)
            self._open = stack.pop_all()

    async def start(self) -> None:
        """Bind the rest, and serve. Raises ConfigError that names what cannot be had."""
        async with contextlib.AsyncExitStack() as stack:
            if self._tracing is not None:
                stack.push_async_callback(asyncio.to_thread, self._tracing.close)
            for listener in (self._unix, self._tcp):
                await listener.start()
                stack.push_async_callback(listener.close)
            self._serving = True
            await self._health.beat()
            self._open.push_async_exit(stack.pop_all())

    async def drain(self, timeout_s: float) -> bool:
        """Say NOT_SERVING, refuse new calls, wait for running ones. False: some did not end."""
        self._draining = True
        await self._health.beat()
        self._recorder.close()
        return await drain_all([self._unix.boundary, self._tcp.boundary], timeout_s)

    async def close(self) -> None:
        """Stop serving and remove the sockets."""
        await self._open.aclose()

    def _served(self, store: Store, config: LiveSettings, version: str) -> Served:
        socket, epoch = self._settings.socket_path, Epoch.new()
        service = Service(
            store,
            epoch,
            self._metrics,
            arena_socket=str(arena_socket_path(socket)),
            call_socket=str(call_socket_path(socket)),
            version=version,
            recorder=self._recorder,
            config=config,
            addresses=self._addresses,
        )
        return Served(store, service, epoch, self._metrics)

    def _boundary(self, identity: Identity) -> Boundary:
        """Return the boundary of one more listener."""
        return Boundary(self._metrics, self._tracing, identity=identity)

    def _addresses(self) -> dict[str, Any]:
        """Return where this daemon is reached, and what decides by whom."""
        metrics_host, _, _ = self._settings.metrics_listen.rpartition(":")
        return {
            "socket": self._unix.guard(),
            "tcp": self._tcp.address(),
            "metrics": f"{metrics_host}:{self.metrics_port}" if self.metrics_port else "",
        }

    def _open_metrics(self, stack: contextlib.AsyncExitStack) -> None:
        address = parse_listen("server.metrics_listen", self._settings.metrics_listen)
        if address is None:
            return
        try:
            http = MetricsPort(
                *address,
                registry=self._metrics.registry,
                not_alive=self._health.not_alive,
                not_ready=self._health.not_ready,
            )
        except OSError as error:
            raise ConfigError(
                f"server.metrics_listen={self._settings.metrics_listen} cannot be had "
                f'({error.strerror}): choose another port, or "" for none'
            ) from error
        http.start()
        self.metrics_port = http.port
        stack.push_async_callback(asyncio.to_thread, http.close)

    def _trouble(self) -> str:
        """Return why clients should not ask this daemon now."""
        if self._draining:
            return "draining: the daemon is shutting down"
        if not self._serving:
            return f"starting for {time.monotonic() - self._opened:.0f} s: see the daemon's log"
        return self._store.report.trouble()

    async def _report(self, ready: bool) -> None:
        """Tell gRPC's health service, and the log, whether the daemon is ready."""
        states = health_pb2.HealthCheckResponse
        for name in ("", SERVICE_NAME):
            await self._grpc_health.set(name, states.SERVING if ready else states.NOT_SERVING)
        if ready and self._unready:
            logger.info("node=ready")
        self._unready = self._serving and not self._draining and not ready
        if self._unready:
            logger.warning("node=not_ready reason=%r", self._trouble())


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
