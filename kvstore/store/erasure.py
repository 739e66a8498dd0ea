"""Where something of a tenant is stored, to be destroyed for good. The tenant's store is closed."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kvstore.metrics import Metrics
from kvstore.model.tenant import tenant_id
from kvstore.sealing import Root, Sealing
from kvstore.settings import ObjectSettings, Settings
from kvstore.tier.file import RealDisk
from kvstore.tier.file.keys import destroy_keys

if TYPE_CHECKING:
    from kvstore.tier.object import ObjectTier

KEYS_S = 10.0  # for the keys in a bucket to be destroyed,
OBJECTS_S = 30.0  # and then for its objects to be deleted


class Place(Protocol):
    """One place. Both may be called again, also after they have failed, or ended well."""

    @property
    def name(self) -> str:
        """What people call it, and what is there."""

    async def destroy_keys(self) -> str:
        """Destroy the keys; return how far nothing of the place can be read again: see `Erasure`.
        Raises KVStoreError, OSError."""

    async def empty(self) -> None:
        """Delete all that is stored there. Raises KVStoreError, OSError."""


class Directory:
    """A directory of the file tier. root: what its keys are wrapped by; None: there are none."""

    def __init__(self, path: Path, tenant: str, root: Root | None) -> None:
        self._path, self._tenant, self._root = path, tenant, root

    @property
    def name(self) -> str:
        return f"its files in {self._path}"

    async def destroy_keys(self) -> str:
        root = self._root
        if root is None or not self._path.exists():
            return "none"
        tenant = tenant_id(self._tenant)
        return str(await asyncio.to_thread(destroy_keys, RealDisk(), self._path, root, tenant))

    async def empty(self) -> None:
        if self._path.exists():
            await asyncio.to_thread(shutil.rmtree, self._path)


class InBucket:
    """A tenant's part of the bucket. settings: with its own prefix in `url`."""

    name = "its objects in the bucket"

    def __init__(self, settings: ObjectSettings, tenant: str, root: Root | None) -> None:
        self._settings = settings
        self._sealing = Sealing(root, tenant_id(tenant)) if root is not None else None

    async def destroy_keys(self) -> str:
        async with self._opened() as tier:
            return str(await tier.keys.destroy(time.monotonic() + KEYS_S))

    async def empty(self) -> None:
        async with self._opened() as tier:
            await tier.erase(OBJECTS_S)

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[ObjectTier]:
        from kvstore.tier.object import ObjectTier  # needs an extra

        tier = ObjectTier(self._settings, Metrics(), sealing=self._sealing)
        try:
            yield tier
        finally:
            await tier.close()


def places_of(root: Root | None, settings: Settings, tenant: str) -> Sequence[Place]:
    """Return where something of a tenant may be stored. settings: its own."""
    places: list[Place] = [Directory(Path(path), tenant, root) for path in settings.file.paths]
    if settings.object.url:
        places.append(InBucket(settings.object, tenant, root))
    return places
