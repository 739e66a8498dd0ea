"""Whose blocks a request of a peer is about: each tenant lends its own, and no other's."""

from __future__ import annotations

from collections.abc import Mapping

from kvstore.model.tenant import NO_TENANT_ID, TenantId
from kvstore.peer.base import Lender, PeerIncompatible


class Lenders:
    """The lenders of one daemon, by tenant. The peers of the fleet are believed when they say for
    which tenant they ask: they have shown its certificate."""

    def __init__(self, lenders: Mapping[TenantId, Lender] | None = None) -> None:
        self._by_tenant = dict(lenders or {})

    @classmethod
    def only(cls, lender: Lender) -> Lenders:
        """Return those of a daemon without tenants."""
        return cls({NO_TENANT_ID: lender})

    def __len__(self) -> int:
        return len(self._by_tenant)

    def add(self, tenant: TenantId, lender: Lender) -> None:
        self._by_tenant[tenant] = lender

    def remove(self, tenant: TenantId) -> None:
        """Lend nothing of a tenant from now on."""
        self._by_tenant.pop(tenant, None)

    def engines_busy(self) -> bool:
        """Whether engines of any tenant copy records now. Called by any thread."""
        return any(lender.engines_busy() for lender in list(self._by_tenant.values()))

    def of(self, tenant: TenantId) -> Lender:
        """Return a tenant's. Raises PeerIncompatible, reason "tenant", if it is not here."""
        found = self._by_tenant.get(tenant)
        if found is None:
            raise PeerIncompatible("this tenant is not here", reason="tenant")
        return found
