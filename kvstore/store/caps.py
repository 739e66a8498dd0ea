"""Caps: what may be held of each tier, changed while the node runs, and kept."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from kvstore.decide.policy import WriteBudget
from kvstore.model.errors import ConfigError
from kvstore.model.outcome import Reason
from kvstore.move.file_leases import FileLeases
from kvstore.move.scrub import Scrub
from kvstore.settings import Settings
from kvstore.store.acquire import Acquisition
from kvstore.store.hints import Hints
from kvstore.store.node import Node
from kvstore.system.memory import check_capacity, read_memory

if TYPE_CHECKING:  # a daemon without a bucket starts without what it takes to use one
    from kvstore.tier.object import ObjectTier

SHRINK_AGAIN_S = 0.1
SHED_STEP_NBYTES = 64 << 20  # a few milliseconds of the event loop


class Caps:
    """Derives every bound from settings and memory, and gives back what is over them."""

    def __init__(
        self,
        node: Node,
        acquisition: Acquisition,
        file_leases: FileLeases,
        hints: Hints,
        scrub: Scrub | None,
    ) -> None:
        self._node = node
        self._planner = node.planner
        self._write_behind = node.write_behind
        self._leases = node.leases
        self._objects = node.objects
        self._acquisition = acquisition
        self._file_leases = file_leases
        self._hints = hints
        self._scrub = scrub
        self._resized = asyncio.Event()
        self._gives_back = False  # to other tenants: the cap was not lowered by settings
        self.bucket_is_lent = False  # its cap moves between tenants, and not by settings

    async def check(self, settings: Settings) -> None:
        """Raise ConfigError on what `reconfigure` could not carry out."""
        self._write_behind.caps.check(settings.file.capacity_bytes)
        capacity = settings.dram.capacity_bytes
        specs = [each.spec for each in self._planner.index.namespaces if each.spec is not None]
        records = [group.record_nbytes for spec in specs for group in spec.groups]
        if max(records, default=0) > capacity:
            raise ConfigError(
                f"dram.capacity={capacity} is less than a record of {max(records)} bytes, which "
                "engines use now"
            )
        if self._node.arena.sealed and capacity < self._node.arena.capacity_bytes:
            raise ConfigError(
                "a sealed arena gives no memory back while it is used: lower what this tenant is "
                "guaranteed at a restart"
            )
        if capacity > self._node.arena.capacity_bytes:
            memory = await asyncio.to_thread(read_memory)
            check_capacity(capacity, memory, self._node.arena.reserved_nbytes)

    def reconfigure(self, settings: Settings) -> None:
        """Take what of the settings can change while the node runs. `check` them first."""
        file = settings.file
        self._node.limits = settings.limits
        if settings.dram.capacity_bytes != self._node.arena.capacity_bytes:
            self._gives_back = False
        self._node.arena.growth.set_capacity(settings.dram.capacity_bytes)
        self._resized.set()
        self._write_behind.caps.set(file.capacity_bytes, file.free_bytes_min)
        self._write_behind.group_commit_bytes = self._node.limits.group_commit_bytes
        self._planner.eviction.fine_parts.share = settings.dram.fine_share
        self._planner.admission.set_budget(file.write_bytes_per_day)
        if self._scrub is not None:
            self._scrub.nbytes_per_s, self._scrub.every_s = file.scrub_bytes, file.scrub_every_s
        self.set_bounds()
        if self._objects is not None and not self.bucket_is_lent:
            self._objects.set_capacity(settings.object.capacity_bytes)
        self._node.room.set()

    def set_dram(self, nbytes: int) -> None:
        """Change the cap of the arena alone, between tenants; what is over it is evicted soon."""
        self._gives_back = True
        raised = nbytes > self._node.arena.capacity_bytes
        self._node.arena.growth.set_capacity(nbytes)
        self._resized.set()
        self.set_bounds()
        if raised:
            self._node.room.set()

    @property
    def file_used(self) -> int:
        """Physical bytes of the file tier, over all directories."""
        return self._write_behind.caps.used_bytes

    @property
    def file_cap(self) -> int:
        return self._write_behind.caps.capacity_bytes

    @property
    def bucket(self) -> ObjectTier | None:
        """The object tier, which keeps its own cap; None without one."""
        return self._objects.tier if self._objects is not None else None

    @property
    def write_budget(self) -> WriteBudget | None:
        """What bounds the writes of a day to the file tier, None if nothing does."""
        return self._planner.admission.budget

    def set_file(self, nbytes: int) -> None:
        """Change the cap of the file tier, over all directories, between tenants."""
        self._write_behind.caps.set_all(nbytes)
        self.set_bounds()

    def over_caps(self) -> str:
        """Say what a lowered cap waits for, "" if every cap is kept."""
        excess = max(0, self._node.arena.reserved_nbytes - self._node.arena.capacity_bytes)
        if not excess:
            return self._write_behind.caps.over()
        limbo = self._leases.limbo_bytes
        return (
            f"the arena is {excess} bytes over dram.capacity; leases hold "
            f"{self._leases.leased_bytes - limbo} bytes of it, limbo {limbo}, and "
            f"{self._planner.dirty.nbytes} wait to be written"
        )

    async def keep(self) -> None:
        """Give memory back under a lowered cap: what is free, then what is evicted for it.

        Everything that may leave is evicted first, because that takes far less time than threads
        take to give it back. While nothing may leave, to look again at each change of the cap would
        take the event loop from those who wait for an answer.
        """
        while True:
            self._resized.clear()
            while self._node.arena.holes.excess_nbytes:
                gave = self._node.arena.holes.give_back() or self._shed()
                await asyncio.sleep(0 if gave else SHRINK_AGAIN_S)  # others' turn
            over = self._node.arena.reserved_nbytes > self._node.arena.capacity_bytes
            waits = SHRINK_AGAIN_S if over else None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(waits):
                    await self._resized.wait()

    def _shed(self) -> bool:
        """Evict some. False: everything that is left is held, or to be written."""
        nbytes = min(self._node.arena.holes.excess_nbytes, SHED_STEP_NBYTES)
        self._planner.eviction.write_ahead(self._node.arena.holes.excess_nbytes)
        self._write_behind.wake()
        with self._planner.eviction.because(Reason.OVER_SHARE if self._gives_back else None):
            return self._planner.eviction.shed(nbytes) > 0

    def set_bounds(self) -> None:
        """Derive from limits and caps what each part may hold."""
        limits, arena_bytes = self._node.limits, self._node.arena.capacity_bytes
        if self._node.arena.growth.waits_for_memory:
            arena_bytes = min(arena_bytes, self._node.arena.reserved_nbytes)
        arena_bytes = max(arena_bytes, self._node.arena.growth.promised_bytes)
        self._planner.eviction.fine_parts.resize(arena_bytes)
        self._leases.lease_s = limits.lease_s
        self._leases.sessions_max = limits.sessions_max
        self._leases.limbo_bytes_max = int(arena_bytes * limits.limbo_fraction)
        self._acquisition.leasable_bytes = int(arena_bytes * limits.leased_fraction)
        self._node.fetch.nbytes_max = self._acquisition.leasable_bytes
        self._file_leases.nbytes_max = int(
            self._write_behind.caps.capacity_bytes * limits.leased_fraction
        )
        self._hints.pinned_bytes_max = int(arena_bytes * limits.pinned_fraction)
        self._planner.pins.shrink(self._hints.pinned_bytes_max)
        self._hints.pin_ttl_max_s = limits.pin_ttl_max_s
