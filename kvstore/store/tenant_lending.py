"""What the tenants of a daemon lend each other: room in DRAM, files and bucket, and writes."""

from __future__ import annotations

import time
from functools import partial

from kvstore.decide.policy import SpareWrites
from kvstore.settings import Settings, TenantSettings
from kvstore.store.lending import DramPart, FilePart, Lending, ObjectPart
from kvstore.store.store import Store
from kvstore.store.tenant_shares import object_share, write_max


class TenantLending:
    """dram, file, object: the room of each tier. writes: the write budgets."""

    def __init__(self, settings: Settings) -> None:
        self.dram = Lending(settings.dram.capacity_bytes)
        self.file = Lending(settings.file.capacity_bytes * len(settings.file.paths))
        self.object = Lending(settings.object.capacity_bytes)
        self.writes = SpareWrites(time.monotonic)

    def resize(self, settings: Settings) -> None:
        """Take what all have together; `add` each tenant after that."""
        self.dram.capacity_bytes = settings.dram.capacity_bytes
        self.file.capacity_bytes = settings.file.capacity_bytes * len(settings.file.paths)
        self.object.capacity_bytes = settings.object.capacity_bytes

    def add(self, settings: Settings, tenant: TenantSettings, store: Store) -> None:
        """Let a tenant's room be lent, and let it borrow."""
        name, weight = tenant.name, tenant.weight
        dram = tenant.dram_guaranteed_bytes
        if store.arena.sealed:  # it gives memory back in whole extents only, so its part is fixed
            self.dram.add(name, DramPart(store, dram, dram, weight, fixed=True))
            store.ask_room(self._stir)
        else:
            self.dram.add(name, DramPart(store, dram, tenant.dram_max(settings), weight))
            store.ask_room(partial(self._room, name))
        if settings.file.paths:
            file, most = tenant.file_guaranteed_bytes, tenant.file_max(settings)
            self.file.add(name, FilePart(store, file, most, weight))
        if (tier := store.caps.bucket) is not None:
            bucket, most = tenant.object_guaranteed_bytes, tenant.object_max(settings)
            share = object_share(settings, tenant)
            self.object.add(name, ObjectPart(tier, bucket, most, weight, share))
            tier.share_room(partial(self.object.counted, name), self.object.look)
            store.caps.bucket_is_lent = True
        if (budget := store.caps.write_budget) is not None:
            self.writes.set(name, budget, write_max(settings, tenant), weight)
        else:
            self.writes.remove(name)

    def share(self, name: str, nbytes: int) -> None:
        """Take what a tenant's share of the bucket is, since there are more or fewer tenants."""
        if isinstance(part := self.object.part(name), ObjectPart):
            part.share = nbytes

    def leave(self, name: str) -> None:
        """Move the room of who is about to be closed no more; it is lent after `gone`."""
        for room in (self.dram, self.file, self.object):
            room.leave(name)
        self.writes.remove(name)

    def gone(self, name: str, *, bucket_is_empty: bool) -> None:
        """Lend what somebody had, who is closed and holds nothing on this host any more."""
        self.dram.remove(name)
        self.file.remove(name)
        if bucket_is_empty:
            self.object.remove(name)

    async def _stir(self, nbytes: int) -> None:
        """Note that records are about to be put, which are written behind later."""
        self.file.stir()

    async def _room(self, name: str, nbytes: int) -> None:
        self.file.stir()
        await self.dram.room(name, nbytes)
