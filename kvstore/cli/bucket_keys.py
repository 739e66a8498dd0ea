"""The tenants' keys in a bucket, for `kvstore key rotate`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvstore.metrics import Metrics
from kvstore.model.tenant import NO_TENANT_ID, TenantId, tenant_id
from kvstore.sealing import Sealing
from kvstore.settings import Settings
from kvstore.tier.object.connect import connect
from kvstore.tier.object.failure import ObjectRefused
from kvstore.tier.object.keys import BucketKeys
from kvstore.tier.object.requests import Requests
from kvstore.tier.object.seal import SealedNames

if TYPE_CHECKING:
    from kvstore.sealing import Root

ROTATE_S = 60.0


def roots_in_bucket(settings: Settings, root: Root, new_root: Root | None) -> dict[TenantId, Root]:
    """Return which of the roots opens each tenant's keys in the bucket of `object.url`. Changes
    nothing. Raises Unavailable if the bucket does not answer, or neither opens them."""
    if not settings.object.url:
        return {}
    return asyncio.run(_roots(settings, [root] if new_root is None else [new_root, root]))


def rotate_in_bucket(
    settings: Settings,
    roots: Mapping[TenantId, Root],
    new_root: Root | None,
    tell: Callable[[str], None],
) -> None:
    """Begin a new epoch of each tenant's keys in the bucket, or wrap them by another root; tell a
    line of each that is done. roots: what `roots_in_bucket` found. Raises Unavailable,
    ConfigError."""
    if roots:
        asyncio.run(_rotate(settings, roots, new_root, tell))


async def _roots(settings: Settings, candidates: list[Root]) -> dict[TenantId, Root]:
    found = {}
    with _requests(settings) as requests:
        for tenant in _tenants(settings):
            deadline = time.monotonic() + ROTATE_S
            if await _keys(requests, tenant, candidates[-1]).are_there(deadline):
                found[tenant] = await _opening(requests, tenant, candidates, deadline)
    return found


async def _opening(
    requests: Requests, tenant: TenantId, candidates: list[Root], deadline: float
) -> Root:
    """Return the first root that opens the tenant's keys. Raises ObjectRefused if none does."""
    *first, last = candidates
    for root in first:
        try:
            await _keys(requests, tenant, root).load(deadline)
        except ObjectRefused:
            continue
        return root
    await _keys(requests, tenant, last).load(deadline)
    return last


async def _rotate(
    settings: Settings,
    roots: Mapping[TenantId, Root],
    new_root: Root | None,
    tell: Callable[[str], None],
) -> None:
    with _requests(settings) as requests:
        for tenant, root in roots.items():
            deadline = time.monotonic() + ROTATE_S
            keys = _keys(requests, tenant, root)
            where = f"{settings.object.url}: tenant {tenant.hex()}"
            if new_root is None:
                tell(f"{where}: epoch {await keys.rotate(deadline)}")
                continue
            # Also if that is so already: an earlier try may have left the old ones beside it.
            await keys.rewrap(new_root, deadline)
            tell(f"{where}: wrapped anew{' already' if root is new_root else ''}")


def _keys(requests: Requests, tenant: TenantId, root: Root) -> BucketKeys:
    names = SealedNames(tenant, f"t/{tenant.hex()}/")
    return BucketKeys(requests, names, Sealing(root, tenant))


@contextmanager
def _requests(settings: Settings) -> Iterator[Requests]:
    requests = Requests(
        connect(settings.object),
        metrics=Metrics(),
        now=time.monotonic,
        timeout_s=settings.object.timeout_s,
        requests_max=settings.object.requests_max,
    )
    try:
        yield requests
    finally:
        requests.close()


def _tenants(settings: Settings) -> list[TenantId]:
    return list({NO_TENANT_ID: None} | {tenant_id(each.name): None for each in settings.tenants})
