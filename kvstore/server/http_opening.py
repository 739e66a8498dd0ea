"""Settings -> the HTTP port, with what it answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry

from kvstore.metrics import Metrics
from kvstore.model.errors import ConfigError
from kvstore.model.tenant import Principal
from kvstore.server.access import TcpAccess
from kvstore.server.audit import AuditLog
from kvstore.server.health import Health
from kvstore.server.http_rights import HttpRights
from kvstore.server.match_page import MatchPage
from kvstore.server.metrics_port import MetricsPort
from kvstore.server.page_calls import PageCalls
from kvstore.server.page_relay import NoPage, PagePort
from kvstore.server.tenant_report import TenantCollector
from kvstore.settings import Settings, is_loopback, metrics_address, metrics_are_open
from kvstore.store.tenants import Tenants
from kvstore.system.host_names import HostNames


class HttpOpening:
    """Puts the HTTP port of one daemon together."""

    def __init__(
        self, settings: Settings, access: TcpAccess, tenants: Tenants, metrics: Metrics
    ) -> None:
        self._settings = settings
        self._access = access
        self._tenants = tenants
        self._metrics = metrics

    def open(
        self,
        health: Health,
        audit: AuditLog | None,
        *,
        calls_of: Callable[[Principal], Any],
        make_page: Callable[[PageCalls], PagePort] | None,
    ) -> MetricsPort | None:
        """Bind it; None if there is none. calls_of: what answers a principal's calls. Raises
        ConfigError."""
        address = metrics_address(self._settings)
        if address is None:
            return None
        certificates = self._access.certificates
        host_names = None
        if is_loopback(address[0]):
            own = f"[{address[0]}]" if ":" in address[0] else address[0]
            host_names = HostNames((own, *self._settings.server.page_names))
        allowed = HttpRights(
            self._access, self._tenants, self._metrics, audit, host_names=host_names
        )
        page: PagePort | None = None
        if make_page is not None and self._settings.server.page:
            if certificates is None and not is_loopback(address[0]):
                page = NoPage("beyond loopback the page needs TLS: set tls.cert and tls.key")
            else:
                loop = asyncio.get_running_loop()
                page = make_page(PageCalls(loop, calls_of, allowed, audit))
        try:
            return MetricsPort(
                *address,
                registry=self._registry(),
                registry_of=self._registry_of,
                not_alive=health.not_alive,
                not_ready=health.not_ready,
                tls=certificates.http_context if certificates else None,
                check=None if metrics_are_open(self._settings) else allowed.check_metrics,
                match=MatchPage(asyncio.get_running_loop(), allowed.store_of),
                page=page,
            )
        except OSError as error:
            raise ConfigError(
                f"server.metrics_listen={self._settings.server.metrics_listen} cannot be had "
                f'({error.strerror}): choose another port, or "" for none'
            ) from error

    def _registry_of(self, name: str) -> CollectorRegistry | None:
        """Return the metrics of one tenant. Any thread may call it."""
        tenant = self._tenants.find(name)
        return tenant.metrics.registry if tenant is not None else None

    def _registry(self) -> CollectorRegistry:
        if not self._tenants.configured:
            return self._metrics.registry
        return TenantCollector(self._metrics.registry, self._tenants).registry()
