"""What serves one address: a unix socket with the arena and call sockets beside it, or TCP.

Each listener has a gRPC server of its own, because gRPC does not tell by which address a call came:
what holds for the calls of one address is in its `Boundary`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc

from kvstore.metrics import Metrics
from kvstore.model.errors import ConfigError
from kvstore.rpc.v1 import kvstore_pb2_grpc as rpc
from kvstore.server import calls
from kvstore.server.boundary import Boundary
from kvstore.server.calls import CallServer, Handler, own_session_only
from kvstore.server.grpc_health import GrpcHealth
from kvstore.server.sockets import guard_of, listen_unix, owned_socket_path, private_umask
from kvstore.server.tenant_sockets import Access
from kvstore.server.tls import Certificates
from kvstore.settings import Settings, listen_address
from kvstore.store.store import Store
from kvstore.system.descriptors import LinkPool
from kvstore.transport import arena_host
from kvstore.transport.arena_host import ArenaHost
from kvstore.transport.call_wire import METHODS, Method
from kvstore.transport.messages import MESSAGE_NBYTES_MAX, Epoch
from kvstore.transport.unix_sockets import arena_socket_path, call_socket_path

RPCS_MAX = 1024
# The largest are keys with checksums: 3 MiB for the largest batch there is.
RECEIVED_NBYTES_MAX = 4 << 20
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

CONNECTION_AGE_MS = 3_600_000  # over TLS; then its client shows its certificate again
CONNECTION_IDLE_MS = 600_000
"""Over TCP, without a call: whoever is gone without a word takes no place for ever. A client that
is there connects again at its next call."""


@dataclass(frozen=True, slots=True)
class Served:
    """One service: what listeners serve. store: None for one without blocks, which then has no
    arena and no call socket. epoch: of this start."""

    store: Store | None
    service: rpc.KVStoreServicer
    epoch: Epoch
    metrics: Metrics
    reads: Sequence[Served] = ()  # others, whose arenas its clients map as well


class Links:
    """How many links the listeners of one daemon have together."""

    def __init__(self) -> None:
        self.arena = LinkPool(arena_host.LINKS_MAX, arena_host.LINK_DESCRIPTORS)
        self.calls = LinkPool(calls.LINKS_MAX)


class UnixListener:
    """One unix socket, <path>.arena and <path>.calls, over one store.

    `owned` takes the path; `start`, then `close`.
    """

    def __init__(
        self,
        path: Path,
        served: Served,
        boundary: Boundary,
        grpc_health: GrpcHealth,
        access: Access | None = None,
        *,
        links: Links,
    ) -> None:
        """access: who may use it, if not the daemon's user alone."""
        self._links = links
        self.path = path
        self.boundary = boundary
        self._access = access
        self._key = f"tenants.{access.tenant}: socket" if access else "server.socket"
        self._served = served
        self._grpc_health = grpc_health
        self._running = contextlib.AsyncExitStack()

    @contextlib.contextmanager
    def owned(self) -> Iterator[None]:
        """Own the socket's path for the time of the context. Raises ConfigError."""
        if self._access is not None:
            self._access.make_directory(self.path.parent)
        with owned_socket_path(self.path, self._key):
            yield

    async def start(self, connections: int) -> None:
        """Bind and serve all three sockets, or none. connections: that gRPC may have here; it
        closes those beyond at once. Raises ConfigError."""
        async with contextlib.AsyncExitStack() as stack:
            server = _grpc_server(
                self._served.service, self.boundary, self._grpc_health, connections
            )
            with private_umask():
                bind_port(server, f"unix:{self.path}", f"{self._key}={self.path}")
            if (store := self._served.store) is not None:
                self._start_arena(store, stack)
                await self._start_calls(store, stack)
            self._hand_over()
            await server.start()
            stack.push_async_callback(server.stop, STOP_GRACE_S)
            self._running = stack.pop_all()

    async def close(self) -> None:
        """Stop serving; the sessions of this listener end."""
        await self._running.aclose()

    def guard(self) -> dict[str, Any]:
        """Return the socket's path, and what decides who may use it."""
        return guard_of(self.path)

    def _start_arena(self, store: Store, stack: contextlib.AsyncExitStack) -> None:
        arena = ArenaHost(
            listen_unix(arena_socket_path(self.path), socket.SOCK_SEQPACKET),
            store.sessions,
            store.arena.extents,
            self._served.epoch,
            self.boundary.refused,
            task_failed=self._served.metrics.task_failed,
            check_peer=self._access.check_peer if self._access is not None else None,
            also=[
                (each.store.arena.extents, each.epoch) for each in self._served.reads if each.store
            ],
            count=self._links.arena.listener(),
        )
        arena.start()
        stack.push_async_callback(arena.close)

    async def _start_calls(self, store: Store, stack: contextlib.AsyncExitStack) -> None:
        server = CallServer(
            listen_unix(call_socket_path(self.path), socket.SOCK_STREAM),
            [self._hot(method) for method in METHODS],
            store.sessions.processes,
            self.boundary.refused,
            check_peer=self._access.check_peer if self._access is not None else None,
            quota=lambda: self.boundary.quota,
            count=self._links.calls.listener(),
        )
        await server.start()
        stack.push_async_callback(server.close)

    def _hand_over(self) -> None:
        """Let the tenant's user reach the sockets."""
        if self._access is None:
            return
        for path in (self.path, arena_socket_path(self.path), call_socket_path(self.path)):
            if path.exists():
                self._access.give(path)

    def _hot(self, method: Method) -> Handler:
        """Return what answers a method on the call socket."""
        answer = getattr(self._served.service, method.name)
        if method.names_session:
            answer = own_session_only(answer)
        return self.boundary.unary(method.name, answer, method.request.FromString)


class TcpListener:
    """One TCP address over one service. `check_free`, `start`, then `close`. port: what it has."""

    def __init__(
        self,
        settings: Settings,
        service: rpc.KVStoreServicer,
        boundary: Boundary,
        grpc_health: GrpcHealth,
        certificates: Certificates | None = None,
    ) -> None:
        """certificates: for TLS; None: plaintext."""
        self.boundary = boundary
        self.port = 0
        self._listen = settings.server.listen
        self._address = listen_address(settings)
        self._certificates = certificates
        self._service = service
        self._grpc_health = grpc_health
        self._server: grpc.aio.Server | None = None

    @property
    def listens(self) -> bool:
        """Whether it has an address at all."""
        return self._address is not None

    def check_free(self) -> None:
        """Raise ConfigError for a port that cannot be had. gRPC would say so only after the
        recovery, which may take a while, and print a line of its own."""
        check_free("server.listen", self._listen, self._address)

    async def start(self, connections: int) -> None:
        """Bind and serve. connections: as for `UnixListener.start`. Raises ConfigError."""
        if self._address is None:
            return
        host, port = self._address
        host = f"[{host}]" if ":" in host else host
        credentials = self._certificates.grpc_credentials() if self._certificates else None
        options = [("grpc.max_connection_idle_ms", CONNECTION_IDLE_MS)]
        if credentials is not None:
            options.append(("grpc.max_connection_age_ms", CONNECTION_AGE_MS))
        server = _grpc_server(self._service, self.boundary, self._grpc_health, connections, options)
        name = f"server.listen={self._listen}"
        self.port = bind_port(server, f"{host}:{port}", name, credentials)
        await server.start()
        self._server = server

    async def close(self) -> None:
        if self._server is not None:
            await self._server.stop(STOP_GRACE_S)

    def address(self) -> str:
        """Return where it listens, "" if it does not."""
        host, _, _ = self._listen.rpartition(":")
        return f"{host}:{self.port}" if self.port else ""


def check_free(key: str, listen: str, address: tuple[str, int] | None) -> None:
    """Raise ConfigError for a port that cannot be had now. listen: the address, for people."""
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


def bind_port(
    server: grpc.aio.Server,
    address: str,
    name: str,
    credentials: grpc.ServerCredentials | None = None,
) -> int:
    """Bind, with TLS if there are credentials. Raises ConfigError with the setting's `name`."""
    try:
        if credentials is not None:
            return server.add_secure_port(address, credentials)
        return server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError(
            f"{name} cannot be had: another process uses it, or it does not exist here"
        ) from error


async def drain_all(boundaries: list[Boundary], timeout_s: float) -> bool:
    """Refuse new calls and wait for those that run. Returns whether all ended in time."""
    return all(await asyncio.gather(*(each.drain(timeout_s) for each in boundaries)))


def _grpc_server(
    service: rpc.KVStoreServicer,
    boundary: Boundary,
    grpc_health: GrpcHealth,
    connections: int,
    options: Sequence[tuple[str, Any]] = (),
) -> grpc.aio.Server:
    server = grpc.aio.server(
        interceptors=[boundary],
        options=(*_OPTIONS, ("grpc.max_allowed_incoming_connections", connections), *options),
        maximum_concurrent_rpcs=RPCS_MAX,
    )
    rpc.add_KVStoreServicer_to_server(service, server)
    health_pb2_grpc.add_HealthServicer_to_server(grpc_health, server)
    return server
