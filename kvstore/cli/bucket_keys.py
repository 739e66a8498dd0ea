"""The tenants' keys in a bucket, for `kvstore key rotate`."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from kvstore.metrics import Metrics
from kvstore.model.tenant import NO_TENANT_ID, TenantId, tenant_id
from kvstore.sealing import Sealing
from kvstore.settings import Settings
from kvstore.tier.object.connect import connect
from kvstore.tier.object.keys import BucketKeys
from kvstore.tier.object.requests import Requests
from kvstore.tier.object.seal import SealedNames

if TYPE_CHECKING:
    from kvstore.sealing import Root

ROTATE_S = 60.0


def rotate_in_bucket(settings: Settings, root: Root, new_root: Root | None) -> list[str]:
    """Begin a new epoch of each tenant's keys in the bucket of `object.url`, or wrap them by
    another root; return what was done, a line each. Raises Unavailable, ConfigError."""
    return asyncio.run(_rotate(settings, root, new_root)) if settings.object.url else []


async def _rotate(settings: Settings, root: Root, new_root: Root | None) -> list[str]:
    requests = Requests(
        connect(settings.object),
        metrics=Metrics(),
        now=time.monotonic,
        timeout_s=settings.object.timeout_s,
        requests_max=settings.object.requests_max,
    )
    try:
        done = []
        for tenant in _tenants(settings):
            deadline = time.monotonic() + ROTATE_S
            names = SealedNames(tenant, f"t/{tenant.hex()}/")
            keys = BucketKeys(requests, names, Sealing(root, tenant))
            if not await keys.are_there(deadline):
                continue
            if new_root is None:
                epoch = await keys.rotate(deadline)
                done.append(f"{settings.object.url}: tenant {tenant.hex()}: epoch {epoch}")
            else:
                await keys.rewrap(new_root, deadline)
                done.append(f"{settings.object.url}: tenant {tenant.hex()}: wrapped anew")
        return done
    finally:
        requests.close()


def _tenants(settings: Settings) -> list[TenantId]:
    return list({NO_TENANT_ID: None} | {tenant_id(each.name): None for each in settings.tenants})
