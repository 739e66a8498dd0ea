"""Binds the daemon's addresses, serves, and takes everything down again in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from typing import Any, Final

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvstore.metrics import Metrics
from kvstore.model.errors import ConfigError
from kvstore.rpc.v1 import kvstore_pb2_grpc as rpc
from kvstore.server.boundary import Boundary
from kvstore.server.calls import CallServer, Handler, own_session_only
from kvstore.server.health import Health
from kvstore.server.metrics_port import MetricsPort
from kvstore.server.recorder import Recorder
from kvstore.server.service import Service
from kvstore.server.sockets import (
    guard_of,
    listen_unix,
    owned_socket_path,
    private_umask,
)
from kvstore.server.tracing import Tracing
from kvstore.settings import parse_listen
from kvstore.store.live_settings import LiveSettings
from kvstore.store.store import Store
from kvstore.system.background import keep_running
from kvstore.system.descriptors import raise_limit
from kvstore.transport.arena_host import ArenaHost
from kvstore.transport.call_wire import METHODS, Method
from kvstore.transport.messages import MESSAGE_NBYTES_MAX, Epoch
from kvstore.transport.unix_sockets import arena_socket_path, call_socket_path

logger = logging.getLogger(__name__)

RPCS_MAX = 1024
# The largest are keys with checksums: 3 MiB for the largest batch there is.
RECEIVED_NBYTES_MAX = 4 << 20
SERVICE_NAME = "kvstore.rpc.v1.KVStore"
STOP_GRACE_S = 0.5
_OPTIONS: Final = (
    # Without it two daemons would share a port, and the kernel would deal out the clients.
    ("grpc.so_reuseport", 0),
    # It bounds what a message inflates to as well, if it is compressed.
    ("grpc.max_receive_message_length", RECEIVED_NBYTES_MAX),
    # Who connects and says nothing takes a descriptor for no longer than this.
    ("grpc.server_handshake_timeout_ms", 5000),
    ("grpc.max_send_message_length", MESSAGE_NBYTES_MAX),
)


class Server:
    """Serves one store. `open`, then `start`; `drain`, then `close`.

    `open` takes the socket's path and the metrics port, so that both are there, and probes are
    answered, while the store recovers. Each of them binds everything or nothing.
    """

    def __init__(self, store: Store, config: LiveSettings, metrics: Metrics, version: str) -> None:
        settings = config.settings
        self._settings = settings.server
        self._socket = self._settings.socket_path
        self._metrics = metrics
        self._epoch = Epoch.new()
        self._store = store
        endpoint = self._settings.traces_endpoint
        self._tracing = Tracing(endpoint, version) if endpoint else None
        self._boundary = Boundary(metrics, self._tracing)
        self._recorder = Recorder(metrics)
        self._grpc_health = health.aio.HealthServicer()
        self._opened = time.monotonic()
        self._serving = self._draining = self._unready = False
        self._health = Health(self._trouble, self._report)
        self._service = Service(
            store,
            self._epoch,
            metrics,
            arena_socket=str(arena_socket_path(self._socket)),
            call_socket=str(call_socket_path(self._socket)),
            version=version,
            recorder=self._recorder,
            config=config,
            addresses=self._addresses,
        )
        self._open = contextlib.AsyncExitStack()
        self.port = 0
        self.metrics_port = 0

    async def open(self) -> None:
        """Take the socket's path and the metrics port, and see whether the TCP port is free. Raises
        ConfigError that names what cannot be had."""
        self._opened = time.monotonic()
        async with contextlib.AsyncExitStack() as stack:
            raise_limit()
            stack.enter_context(owned_socket_path(self._socket))
            _check_free("server.listen", self._settings.listen)
            beating = asyncio.create_task(
                keep_running("health", self._health.run, self._metrics.task_failed)
            )
            stack.push_async_callback(_cancelled, beating)
            self._open_metrics(stack)
            self._open = stack.pop_all()

    async def start(self) -> None:
        """Bind the rest, and serve. Raises ConfigError that names what cannot be had."""
        async with contextlib.AsyncExitStack() as stack:
            server = grpc.aio.server(
                interceptors=[self._boundary],
                options=_OPTIONS,
                maximum_concurrent_rpcs=RPCS_MAX,
            )
            rpc.add_KVStoreServicer_to_server(self._service, server)
            health_pb2_grpc.add_HealthServicer_to_server(self._grpc_health, server)
            self._bind(server)
            listener = listen_unix(arena_socket_path(self._socket), socket.SOCK_SEQPACKET)
            arena = ArenaHost(
                listener,
                self._store.sessions,
                self._store.arena.extents,
                self._epoch,
                self._boundary.refused,
                task_failed=self._metrics.task_failed,
            )
            arena.start()
            stack.push_async_callback(arena.close)
            calls = CallServer(
                listen_unix(call_socket_path(self._socket), socket.SOCK_STREAM),
                [self._hot(method) for method in METHODS],
                self._store.sessions.processes,
                self._boundary.refused,
            )
            await calls.start()
            stack.push_async_callback(calls.close)
            await server.start()
            if self._tracing is not None:
                stack.push_async_callback(asyncio.to_thread, self._tracing.close)
            stack.push_async_callback(server.stop, STOP_GRACE_S)
            self._serving = True
            await self._health.beat()
            self._open.push_async_exit(stack.pop_all())

    async def drain(self, timeout_s: float) -> bool:
        """Say NOT_SERVING, refuse new calls, wait for running ones. False: some did not end."""
        self._draining = True
        await self._health.beat()
        self._recorder.close()
        return await self._boundary.drain(timeout_s)

    async def close(self) -> None:
        """Stop serving and remove the sockets."""
        await self._open.aclose()

    def _bind(self, server: grpc.aio.Server) -> None:
        with private_umask():
            _bind_one(server, f"unix:{self._socket}", f"server.socket={self._socket}")
        address = parse_listen("server.listen", self._settings.listen)
        if address is not None:
            host, port = address
            host = f"[{host}]" if ":" in host else host
            name = f"server.listen={self._settings.listen}"
            self.port = _bind_one(server, f"{host}:{port}", name)

    def _addresses(self) -> dict[str, Any]:
        """Return where this daemon is reached, and what decides by whom."""
        host, _, _ = self._settings.listen.rpartition(":")
        metrics_host, _, _ = self._settings.metrics_listen.rpartition(":")
        return {
            "socket": guard_of(self._socket),
            "tcp": f"{host}:{self.port}" if self.port else "",
            "metrics": f"{metrics_host}:{self.metrics_port}" if self.metrics_port else "",
        }

    def _hot(self, method: Method) -> Handler:
        """Return what answers a method on the call socket."""
        answer = getattr(self._service, method.name)
        if method.names_session:
            answer = own_session_only(answer)
        return self._boundary.unary(method.name, answer, method.request.FromString)

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


def _check_free(key: str, listen: str) -> None:
    """Raise ConfigError for a port that cannot be had. gRPC would say so only after the recovery,
    which may take a while, and print a line of its own."""
    address = parse_listen(key, listen)
    if address is None:
        return
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    try:
        socket.create_server(address, family=family).close()
    except OSError as error:
        why = os.strerror(error.errno or 0)  # its own text names the address once more
        raise ConfigError(
            f'{key}={listen} cannot be had ({why}): choose another port, or "" for none'
        ) from error


def _bind_one(server: grpc.aio.Server, address: str, name: str) -> int:
    try:
        return server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError(
            f"{name} cannot be had: another process uses it, or it does not exist here"
        ) from error


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
