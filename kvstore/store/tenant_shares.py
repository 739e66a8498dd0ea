"""What each tenant has of the bucket, and of what may be written a day, when all want more than
there is. What one does not use of it is lent to others."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.decide.shares import by_weight
from kvstore.settings import Settings, TenantSettings


def write_share(settings: Settings, tenant: TenantSettings) -> int:
    """Return the bytes a day that may be written to the file tier for a tenant whatever others do,
    0 for no limit: its part of the daemon's by weight. What others may not have, by their own
    limits, is divided, too."""
    whole = settings.file.write_bytes_per_day
    if not whole:
        return tenant.write_bytes_per_day
    return max(1, _part(settings, tenant, whole, lambda each: each.write_bytes_per_day or whole))


def write_max(settings: Settings, tenant: TenantSettings) -> int:
    """Return the bytes a day that may be written to the file tier for a tenant when others leave
    them, 0 for no limit."""
    whole = settings.file.write_bytes_per_day
    return min(filter(None, (whole, tenant.write_bytes_per_day)), default=0)


def object_share(settings: Settings, tenant: TenantSettings) -> int:
    """Return the bytes that a tenant begins with in the bucket: what it is guaranteed, and its part
    by weight of what nobody is, up to its own limit."""
    whole = settings.object.capacity_bytes
    guaranteed = tenant.object_guaranteed_bytes
    free = whole - sum(each.object_guaranteed_bytes for each in _among(settings, tenant))

    def more(each: TenantSettings) -> int:
        most = each.object_max_bytes or whole
        return max(0, most - each.object_guaranteed_bytes)

    return max(1, guaranteed + _part(settings, tenant, free, more))


def _part(
    settings: Settings, tenant: TenantSettings, whole: int, most: Callable[[TenantSettings], int]
) -> int:
    """Return a tenant's part of a whole by weight. most: what each may have, in bytes."""
    among = _among(settings, tenant)
    wanted = [min(most(each), whole) for each in among]
    parts = by_weight(whole, wanted, [each.weight for each in among])
    return parts[among.index(tenant)]


def _among(settings: Settings, tenant: TenantSettings) -> list[TenantSettings]:
    """Return all tenants, with this one as it is given."""
    return [*(each for each in settings.tenants if each.name != tenant.name), tenant]
