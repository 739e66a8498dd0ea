"""Who may ask what on the HTTP port; refusals are counted, and noted."""

from __future__ import annotations

from kvstore.metrics import Metrics
from kvstore.model.errors import InvalidRequest, Unauthorized, Unavailable
from kvstore.model.tenant import DEFAULT_TENANT, Principal
from kvstore.server import rights
from kvstore.server.access import TcpAccess
from kvstore.server.audit import AuditLog
from kvstore.store.store import Store
from kvstore.store.tenants import Tenants
from kvstore.system.host_names import SAY, HostNames


class HttpRights:
    """Any thread may ask."""

    def __init__(
        self,
        access: TcpAccess,
        tenants: Tenants,
        metrics: Metrics,
        audit: AuditLog | None,
        *,
        host_names: HostNames | None,
    ) -> None:
        """host_names: by which browsers reach a loopback port; None: it is reached by others."""
        self._access = access
        self._tenants = tenants
        self._metrics = metrics
        self._audit = audit
        self._host_names = host_names

    def check_metrics(
        self, authorization: str, names: tuple[str, ...] | None, host: str, tenant: str
    ) -> None:
        """See `TcpAccess.check_metrics`."""
        try:
            self._access.check_metrics(authorization, names, host, tenant)
        except Unauthorized as error:
            self._refused("metrics", host, error)
            raise

    def store_of(
        self, authorization: str, names: tuple[str, ...] | None, host: str, hosts: list[str]
    ) -> Store:
        """Return the store that a caller may ask what is stored, as by gRPC's Match. On loopback,
        where nobody has credentials, that is everybody but the sites in a browser.

        hosts: the headers Host. Raises InvalidRequest for another's name, Unauthorized.
        """
        try:
            principal = self._access.caller(authorization, names, host)
            if principal is not None:
                rights.check("Match", principal)
            elif self._host_names is not None and not self._host_names.include(hosts):
                self._refused("match", host, Unauthorized(SAY, reason="host"))
                raise InvalidRequest(SAY)
            elif self._tenants.configured:
                raise Unauthorized(
                    "a tenant's prompts are told to its credentials only: set security.tokens",
                    reason="credential",
                )
            tenant = principal.tenant if principal is not None else DEFAULT_TENANT
            found = self._tenants.find(tenant)
            if found is None:
                raise Unauthorized(f"there is no tenant {tenant} here", reason="tenant")
        except Unauthorized as error:
            self._refused("match", host, error)
            raise
        return found.store

    def visitor(
        self, authorization: str, names: tuple[str, ...] | None, host: str
    ) -> Principal | None:
        """Return who looks at the page; None where nobody has credentials. Raises Unauthorized."""
        try:
            return self._access.caller(authorization, names, host)
        except Unauthorized as error:
            self._refused("page", host, error)
            raise

    def refused_visitor(self, host: str, error: Unauthorized | Unavailable) -> None:
        """Count a visitor of the page that is not let in, and note it if it was not allowed."""
        if isinstance(error, Unauthorized):
            self._refused("page", host, error)
        else:
            self._metrics.rpc_errors.labels("page", "Unavailable", error.reason).inc()

    def refused_call(
        self, method: str, principal: Principal, host: str, error: Unauthorized
    ) -> None:
        """Count a call that the page does not make for somebody, and note it."""
        self._refused(method, host, error, principal)

    def _refused(
        self, what: str, host: str, error: Unauthorized, principal: Principal | None = None
    ) -> None:
        self._metrics.rpc_errors.labels(what, "Unauthorized", error.reason).inc()
        if self._audit is not None:
            self._audit.refused(what, principal, host, error.reason, str(error))
