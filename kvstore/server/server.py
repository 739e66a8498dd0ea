"""Binds the daemon's addresses, serves, and takes everything down again in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvstore.metrics import Metrics
from kvstore.model.errors import Unauthorized
from kvstore.model.tenant import DEFAULT_TENANT, Principal, Role
from kvstore.rpc.v1.kvstore_pb2_grpc import KVStoreServicer
from kvstore.server.access import WATCH_S, CertifiedNames, TcpAccess
from kvstore.server.audit import open_audit
from kvstore.server.boundary import Boundary
from kvstore.server.grpc_health import GrpcHealth
from kvstore.server.health import Health
from kvstore.server.http_opening import HttpOpening
from kvstore.server.identity import UNIX_SOCKET, Fixed, Identity
from kvstore.server.listeners import Links, Served, TcpListener, UnixListener, drain_all
from kvstore.server.operator import OperatorService
from kvstore.server.page_calls import PageCalls
from kvstore.server.page_relay import PagePort
from kvstore.server.quota import Quota, Quotas
from kvstore.server.recorder import Recorder
from kvstore.server.service import Service
from kvstore.server.shared import SharingService
from kvstore.server.sockets import guard_of
from kvstore.server.tenant_admin import TenantAdmin
from kvstore.server.tenant_report import TenantReport
from kvstore.server.tenant_sockets import Access
from kvstore.server.tracing import Tracing
from kvstore.store.live_settings import LiveSettings
from kvstore.store.tenants import Tenant, Tenants
from kvstore.system.background import keep_running
from kvstore.system.descriptors import connections_max, raise_limit
from kvstore.transport.messages import Epoch
from kvstore.transport.unix_sockets import arena_socket_path, call_socket_path

logger = logging.getLogger(__name__)

SERVICE_NAME = "kvstore.rpc.v1.KVStore"


class Server:
    """Serves all tenants of a daemon. `open`, then `start`; `drain`, then `close`.

    `open` takes the sockets' paths and the metrics port, so that all are there, and probes are
    answered, while the stores recover. Each of them binds everything or nothing.
    """

    def __init__(
        self,
        tenants: Tenants,
        config: LiveSettings,
        metrics: Metrics,
        version: str,
        page: Callable[[PageCalls], PagePort] | None = None,
    ) -> None:
        """page: makes what answers `/` of the metrics port; None: nothing does."""
        self._make_page = page
        self._settings = config.settings.server
        self._config = config
        self._version = version
        self._metrics = metrics
        self._tenants = tenants
        endpoint = self._settings.traces_endpoint
        self._tracing = Tracing(endpoint, version) if endpoint else None
        self._recorders: dict[str, Recorder] = {}
        self._services: dict[str, KVStoreServicer] = {}
        self.audit = open_audit(config.settings.security, metrics.audited)
        self._grpc_health = GrpcHealth()
        self._opened = time.monotonic()
        self._serving = self._draining = self._unready = False
        self._health = Health(self._trouble, self._report)
        self._report_all = TenantReport(tenants)
        self._admin = TenantAdmin(tenants, config, self._host, self._unhost)
        self._quotas = Quotas()
        self._links = Links()
        self._hosted: dict[str, contextlib.AsyncExitStack] = {}  # what each tenant's sockets take
        self._listeners: dict[str, UnixListener] = {}
        self._shared: Served | None = None  # what every tenant may read
        for tenant in sorted(tenants, key=_is_shared, reverse=True):
            if tenant.settings is not None and tenant.name != DEFAULT_TENANT:
                self._listeners[tenant.name] = self._listener_of(tenant)
        served = self._served_by_default()
        self._unix = UnixListener(
            self._settings.socket_path,
            served,
            self._boundary(served.metrics, Fixed(UNIX_SOCKET)),
            self._grpc_health,
            links=self._links,
        )
        self._services.setdefault(DEFAULT_TENANT, served.service)
        self._access = TcpAccess(
            config.settings, self._reloaded, certified=CertifiedNames(lambda: config.settings)
        )
        self._tcp = TcpListener(
            config.settings,
            served.service,
            self._boundary(
                served.metrics, self._access.identity, self._service_of, self._quotas.of
            ),
            self._grpc_health,
            self._access.certificates,
        )
        self.bound_calls()
        config.on_change.append(self.bound_calls)
        self._open = contextlib.AsyncExitStack()
        self.metrics_port = 0
        self.page_address = ""  # for a browser, with the page's token

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
            for name, listener in self._listeners.items():
                hosted = self._hosted[name] = contextlib.AsyncExitStack()
                stack.push_async_callback(hosted.aclose)
                hosted.enter_context(listener.owned())
            if self.audit is not None:
                self.audit.start(version=self._version, pid=os.getpid())
                stack.push_async_callback(asyncio.to_thread, self.audit.close)
            self._tcp.check_free()
            beating = asyncio.create_task(
                keep_running("health", self._health.run, self._metrics.task_failed)
            )
            stack.push_async_callback(_cancelled, beating)
            if self._access.changes:
                watching = asyncio.create_task(
                    keep_running("credentials", self._watch_credentials, self._metrics.task_failed)
                )
                stack.push_async_callback(_cancelled, watching)
            self._open_metrics(stack)
            self._open = stack.pop_all()

    async def start(self) -> None:
        """Bind the rest, and serve. Raises ConfigError that names what cannot be had."""
        async with contextlib.AsyncExitStack() as stack:
            if self._tracing is not None:
                stack.push_async_callback(asyncio.to_thread, self._tracing.close)
            connections = self._connections()
            for listener in self._all:
                await listener.start(connections)
                stack.push_async_callback(listener.close)
            self._serving = True
            await self._health.beat()
            self._open.push_async_exit(stack.pop_all())

    async def drain(self, timeout_s: float) -> bool:
        """Say NOT_SERVING, refuse new calls, wait for running ones. False: some did not end."""
        self._draining = True
        await self._health.beat()
        for recorder in self._recorders.values():
            recorder.close()
        return await drain_all([each.boundary for each in self._all], timeout_s)

    async def close(self) -> None:
        """Stop serving and remove the sockets."""
        await self._open.aclose()

    @property
    def _all(self) -> list[UnixListener | TcpListener]:
        return [self._unix, *self._listeners.values(), self._tcp]

    def _connections(self, more: int = 0) -> int:
        """Return how many connections gRPC may have at a listener. more: listeners that come."""
        return connections_max(1 + len(self._listeners) + self._tcp.listens + more)

    def _served_by_default(self) -> Served:
        """Return what is served on the daemon's own socket, and over TCP."""
        default = self._tenants.find(DEFAULT_TENANT)
        if default is not None:
            return self._served(default, self._settings.socket_path, self._addresses)
        epoch = Epoch.new()
        service = OperatorService(
            version=self._version,
            instance=epoch.name,
            config=self._config,
            admin=self._admin,
            stats=self._stats_of_all,
        )
        return Served(None, service, epoch, self._metrics)

    async def _host(self, tenant: Tenant) -> Path:
        """Begin to serve a tenant that came while the daemon runs. Raises ConfigError."""
        listener = self._listener_of(tenant)
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(listener.owned())
            await listener.start(self._connections(1))
            stack.push_async_callback(listener.close)
            self._hosted[tenant.name] = stack.pop_all()
            self._open.push_async_callback(self._hosted[tenant.name].aclose)
        self._listeners[tenant.name] = listener
        self.bound_calls()
        return listener.path

    async def _unhost(self, name: str, timeout_s: float) -> None:
        """Refuse a tenant's calls, wait for those that run, and end its sessions."""
        self._services.pop(name, None)
        self._tcp.boundary.revocation.sweep()  # its calls over TCP
        if (recorder := self._recorders.pop(name, None)) is not None:
            recorder.close()
        listener = self._listeners.pop(name, None)
        if listener is not None:
            await listener.boundary.drain(timeout_s)
            await listener.close()
        if (hosted := self._hosted.pop(name, None)) is not None:
            await hosted.aclose()
        self.bound_calls()

    def bound_calls(self) -> None:
        """Give each tenant its part of the calls that may be answered at once, by weight."""
        weights = {each.name: each.settings.weight for each in self._tenants if each.settings}
        for name, quota in self._quotas.divide(weights).items():
            listener = self._unix if name == DEFAULT_TENANT else self._listeners.get(name)
            if listener is not None:
                listener.boundary.quota = quota

    def _listener_of(self, tenant: Tenant) -> UnixListener:
        """Return the listener of a tenant's own sockets."""
        assert tenant.settings is not None
        path = self._settings.tenant_socket_path(tenant.name)
        principal = Principal(tenant.name, "unix socket", Role.OPERATOR)
        served = self._served(
            tenant, path, lambda: {"socket": guard_of(path), "tcp": "", "metrics": ""}
        )
        if tenant.settings.shared:
            self._shared = served
        return UnixListener(
            path,
            served,
            self._boundary(tenant.metrics, Fixed(principal)),
            self._grpc_health,
            Access.of(tenant.settings),
            links=self._links,
        )

    def _served(
        self, tenant: Tenant, socket: Path, addresses: Callable[[], dict[str, Any]]
    ) -> Served:
        epoch = Epoch.new()
        recorder = self._recorders[tenant.name] = Recorder(tenant.metrics, tenant.store.answers)
        shared = self._shared if tenant.settings is None or not tenant.settings.shared else None
        service = (SharingService if shared is not None else Service)(
            tenant.store,
            epoch,
            tenant.metrics,
            arena_socket=str(arena_socket_path(socket)),
            call_socket=str(call_socket_path(socket)),
            version=self._version,
            recorder=recorder,
            config=self._config,
            admin=self._admin,
            addresses=addresses,
            tenants=self._all_tenants,
        )
        service.streams.lane = tenant.lanes.tcp if tenant.lanes else None
        self._services[tenant.name] = service
        if shared is None:
            return Served(tenant.store, service, epoch, tenant.metrics)
        assert isinstance(service, SharingService)
        assert shared.store is not None
        assert isinstance(shared.service, Service)
        service.share(shared.store, shared.service, lambda: len(self._tenants))
        return Served(tenant.store, service, epoch, tenant.metrics, [shared])

    async def _stats_of_all(self) -> dict[str, Any]:
        return {**await self._told_of_all(), "addresses": self._addresses()}

    async def _all_tenants(self) -> dict[str, Any]:
        """Return what an admin is told of all tenants, if there are several."""
        if not self._tenants.configured:
            return {}
        return {"tenants": (await self._told_of_all())["tenants"]}

    async def _told_of_all(self) -> dict[str, Any]:
        told = await self._report_all.stats()
        own = {DEFAULT_TENANT: self._settings.socket_path}
        for name, each in told["tenants"].items():
            each["socket"] = str(own.get(name) or self._settings.tenant_socket_path(name))
        return told

    def _boundary(
        self,
        metrics: Metrics,
        identity: Identity,
        service_of: Callable[[Principal], KVStoreServicer] | None = None,
        quota_of: Callable[[Principal], Quota | None] | None = None,
    ) -> Boundary:
        """Return the boundary of one more listener."""
        return Boundary(
            metrics,
            self._tracing,
            identity=identity,
            service_of=service_of,
            quota_of=quota_of,
            audit=self.audit,
        )

    def _service_of(self, principal: Principal) -> KVStoreServicer:
        """Return what answers a caller over TCP. Raises Unauthorized."""
        service = self._services.get(principal.tenant)
        if service is None:
            raise Unauthorized(f"there is no tenant {principal.tenant} here", reason="tenant")
        if isinstance(service, OperatorService) and principal.role < Role.ADMIN:
            raise Unauthorized("what is of all tenants takes the role admin", reason="role")
        return service

    def _reloaded(self, what: str, result: str) -> None:
        """Note that a file of credentials has changed. Any thread may call it."""
        self._metrics.credential_reloads.labels(what, "ok" if result == "ok" else "failed").inc()
        if self.audit is not None:
            self.audit.event("reload", what=what, outcome=result)

    async def _watch_credentials(self) -> None:
        """Take what changes in their files, and end the calls of those that are revoked."""
        while True:
            await asyncio.sleep(WATCH_S)
            await self._access.look()
            self._tcp.boundary.revocation.sweep()

    def _addresses(self) -> dict[str, Any]:
        """Return where this daemon is reached, and what decides by whom."""
        metrics_host, _, _ = self._settings.metrics_listen.rpartition(":")
        return {
            "socket": self._unix.guard(),
            "tcp": self._tcp.address(),
            "tcp_guard": self._access.guard(),
            "metrics": f"{metrics_host}:{self.metrics_port}" if self.metrics_port else "",
            "page": self.page_address.partition("?")[0],  # without the token
        }

    def _open_metrics(self, stack: contextlib.AsyncExitStack) -> None:
        opening = HttpOpening(self._config.settings, self._access, self._tenants, self._metrics)
        http = opening.open(
            self._health, self.audit, calls_of=self._service_of, make_page=self._make_page
        )
        if http is None:
            return
        http.start()
        self.metrics_port = http.port
        self.page_address = http.page_address
        stack.push_async_callback(asyncio.to_thread, http.close)

    def _trouble(self, *, named: bool = False) -> str:
        """Return why clients should not ask this daemon now. named: of which tenant it is; no word
        for those who show no credential."""
        if self._draining:
            return "draining: the daemon is shutting down"
        if not self._serving:
            return f"starting for {time.monotonic() - self._opened:.0f} s: see the daemon's log"
        troubles = []
        for each in self._tenants:
            if not (trouble := each.store.report.trouble()):
                return ""  # most of its clients are better served here than elsewhere
            troubles.append((each.name, trouble))
        if not self._tenants.configured:
            return troubles[0][1]
        if not named:
            return "no tenant can be served now: see the daemon's log"
        return "; ".join(f"tenant {name}: {trouble}" for name, trouble in troubles)

    async def _report(self, ready: bool) -> None:
        """Tell gRPC's health service, and the log, whether the daemon is ready."""
        for name in ("", SERVICE_NAME):
            self._grpc_health.set(name, ready=ready)
        if ready and self._unready:
            logger.info("node=ready")
        self._unready = self._serving and not self._draining and not ready
        if self._unready:
            logger.warning("node=not_ready reason=%r", self._trouble(named=True))


def _is_shared(tenant: Tenant) -> bool:
    return tenant.settings is not None and tenant.settings.shared


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
