"""The tenants of one daemon: a store each, and what they share of its settings.

No index, planner, policy or lease table ever sees two tenants. What a tenant's store may hold of
each tier is part of the daemon's: its settings are derived here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from kvstore.metrics import Metrics
from kvstore.model.errors import ConfigError, InvalidRequest, Unavailable
from kvstore.model.tenant import DEFAULT_TENANT, tenant_id
from kvstore.settings import Settings, TenantSettings
from kvstore.store.erasure import Place
from kvstore.store.lanes import LaneMaker, Lanes
from kvstore.store.left_arenas import LeftArenas
from kvstore.store.lending import STEP_NBYTES, ObjectPart
from kvstore.store.store import HOUSEKEEPING_S, Store
from kvstore.store.tenant_lending import TenantLending
from kvstore.store.tenant_shares import object_share, write_share
from kvstore.system.background import keep_running
from kvstore.system.turns import TurnPool, TurnUser
from kvstore.tier.file import holds_blocks

logger = logging.getLogger(__name__)

MIB = 1 << 20
EXTENT_SHARE = 8  # of a tenant's guarantee, one part is an extent,
EXTENT_NBYTES_MIN = 64 * MIB  # unless the guarantee is small
STARTS_AT_ONCE = 4
IDLE_TURNS = 8  # of the housekeeping, until a store that nobody uses has its turn
TENANTS_DIRECTORY = "tenants"
OBJECT_PREFIX = "t"


@dataclass(slots=True)
class Tenant:
    """One tenant that is served. settings: None for the only user of a daemon without tenants."""

    name: str
    settings: TenantSettings | None
    store: Store
    metrics: Metrics
    turns: Sequence[TurnUser] = ()
    lanes: Lanes | None = None


@dataclass(slots=True)
class Leaving:
    """A tenant that is deleted: its calls are refused, and something of it may still be stored.

    blocks: it had. settings: of its own store. places: where something may be. erased: how far
    nothing can be read again, of those places whose keys are destroyed. open: the tenant, until
    its store is closed. left: what is there, and why.
    """

    blocks: int
    settings: Settings
    places: Sequence[Place]
    open: Tenant | None
    erased: dict[str, str] = field(default_factory=dict)
    left: str = ""

    @property
    def has_files(self) -> bool:
        return any(Path(path).exists() for path in self.settings.file.paths)


class Elsewhere(Protocol):
    """The rest of the fleet, for tenants that come and go."""

    async def add(self, tenant: Tenant) -> None:
        """Let a tenant lend and borrow."""

    async def remove(self, tenant: Tenant) -> None:
        """Let a tenant neither lend nor borrow; return when nobody reads any of it."""

    def stats(self) -> dict[str, Any]:
        """Return what the operator sees of the fleet."""


class Tenants:
    """All tenants of a daemon, by name. make: puts one store together of settings of its own."""

    def __init__(
        self,
        settings: Settings,
        make: Callable[..., Store],
        metrics: Metrics,
        places_of: Callable[[Settings, str], Sequence[Place]] = lambda own, name: (),
    ) -> None:
        """metrics: the daemon's; those of its only tenant, where none is configured. places_of:
        where something may be stored of a tenant, by its own settings."""
        self._places_of = places_of
        self.leaving: dict[str, Leaving] = {}
        self.left = LeftArenas(metrics)
        self._make = make
        self._metrics = metrics
        self.elsewhere: Elsewhere | None = None  # set once this daemon is in a fleet
        self.configured = bool(settings.tenants)
        self._by_name: dict[str, Tenant] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._told: set[str] = set()  # of whose housekeeping an error was logged, once
        self._turns: list[TurnPool] = []
        self._lanes = LaneMaker(settings.object.in_flight_bytes_max)
        if self.configured:
            self._turns = [
                TurnPool(settings.file.threads, "kvstore-file") for _ in settings.file.paths
            ]
        self.lending = TenantLending(settings)
        self.dram, self.file = self.lending.dram, self.lending.file
        if not self.configured:
            self._by_name[DEFAULT_TENANT] = Tenant(
                DEFAULT_TENANT, None, make(settings, metrics), metrics
            )
        for each in settings.tenants:
            self.add(settings, each)

    def __iter__(self) -> Iterator[Tenant]:
        return iter(list(self._by_name.values()))

    def __len__(self) -> int:
        return len(self._by_name)

    def get(self, name: str) -> Tenant:
        """Return a tenant. Raises InvalidRequest if there is none of that name."""
        found = self._by_name.get(name)
        if found is None:
            raise InvalidRequest(f"there is no tenant {name}: `kvstore tenant list` names them")
        return found

    def find(self, name: str) -> Tenant | None:
        return self._by_name.get(name)

    def add(self, settings: Settings, tenant: TenantSettings) -> Tenant:
        """Make a tenant's store; the caller starts it."""
        metrics = Metrics()
        sealed = tenant.arena == "sealed"
        own, number = settings_of_tenant(settings, tenant), tenant_id(tenant.name)
        turns = [pool.user(tenant.weight) for pool in self._turns]
        lanes = self._lanes.lanes(tenant)
        store = self._make(own, metrics, sealed=sealed, tenant=number, turns=turns, lanes=lanes)
        self._by_name[tenant.name] = Tenant(tenant.name, tenant, store, metrics, turns, lanes)
        store.namespaces.require_salt = tenant.require_salt
        self.lending.add(settings, tenant, store)
        return self._by_name[tenant.name]

    async def start(self) -> None:
        """Open every store, several at once. None indexes what it finds until all are open."""
        if not self.configured:
            await self.get(DEFAULT_TENANT).store.start()
            return
        places = asyncio.Semaphore(STARTS_AT_ONCE)

        async def start(tenant: Tenant) -> None:
            async with places:
                await tenant.store.start(house=False)

        async with self._lanes.recall_turn:
            await asyncio.gather(*map(start, self))
        for name, work in (
            ("tenants_house", self._keep_house),
            ("left_arenas", self.left.run),
            ("lend_dram", self.dram.run),
            ("lend_file", self.file.run),
            ("lend_object", self.lending.object.run),
        ):
            task = keep_running(name, work, self._metrics.task_failed)
            self._tasks.append(asyncio.create_task(task))

    async def start_one(self, tenant: Tenant) -> None:
        """Open the store of a tenant that came while others run: its room is given back to it
        first, so it begins with little."""
        growth = tenant.store.arena.growth
        if (file := self.file.part(tenant.name)) is not None:
            file.set_cap(file.least)
        if isinstance(bucket := self.lending.object.part(tenant.name), ObjectPart):
            bucket.start_empty()
        if not tenant.store.arena.sealed:
            growth.set_capacity(min(growth.capacity_bytes, STEP_NBYTES))
        elif not await self.dram.given_back(tenant.name):
            raise Unavailable("others hold what a sealed arena would need: try again in a while")
        await tenant.store.start(house=False)
        if self.elsewhere is not None:
            await self.elsewhere.add(tenant)

    async def leave_fleet(self, tenant: Tenant) -> None:
        """Let a tenant that is about to be closed be read by no other host."""
        if self.elsewhere is not None:
            await self.elsewhere.remove(tenant)

    async def close(self, drain_s: float) -> None:
        """Flush and close every store, each for at most `drain_s`, all at once. Raises the first
        error after all have ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        closings = (each.store.close(drain_s) for each in self)
        results = await asyncio.gather(*closings, return_exceptions=True)
        for pool in self._turns:
            pool.close()
        for failed in filter(None, results):
            raise failed

    async def _keep_house(self) -> None:
        """Look after all stores in one task: the busy ones each time, the others now and then, one
        after the other: each for itself would find cold caches."""
        turn = 0
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            turn += 1
            for tenant in self:
                if turn % IDLE_TURNS == 0 or tenant.store.is_busy:
                    await self._keep_one(tenant)
                    await asyncio.sleep(0)  # others' turn

    async def _keep_one(self, tenant: Tenant) -> None:
        """Look after one store. An error in it is counted, and keeps no other from its turn."""
        try:
            await tenant.store.keep_house()
            await tenant.store.look_for_holes()
        except Exception:
            tenant.metrics.task_failed("tenants_house")
            if tenant.name not in self._told:
                logger.exception("tenant=not_kept name=%s", tenant.name)
            self._told.add(tenant.name)

    # ---- settings: see `Configurable` ---------------------------------------------------------

    async def check(self, settings: Settings) -> None:
        """Raise ConfigError on what `reconfigure` could not carry out."""
        for tenant, derived in self._derived(settings):
            await tenant.store.caps.check(derived)

    def reconfigure(self, settings: Settings) -> None:
        """Take what of the settings can change while the daemon runs. `check` them first."""
        self.divide(settings)
        self.lending.resize(settings)
        for each in settings.tenants:
            if (found := self._by_name.get(each.name)) is not None:
                found.settings = each
                if found.lanes is not None:
                    found.lanes.set(each)
                for turn in found.turns:
                    turn.weight = each.weight
                self.lending.add(settings, each, found.store)

    def divide(self, settings: Settings) -> None:
        """Give each tenant its own share, since they have become more or fewer."""
        for tenant, derived in self._derived(settings):
            tenant.store.caps.reconfigure(self._as_lent(tenant, derived))
            self.lending.share(tenant.name, derived.object.capacity_bytes)

    def _as_lent(self, tenant: Tenant, derived: Settings) -> Settings:
        """Return a store's settings with the caps that it has now: `Lending` moves those."""
        if not self.configured:
            return derived
        directories = max(1, len(derived.file.paths))
        file = tenant.store.caps.file_cap // directories
        dram = tenant.store.arena.capacity_bytes
        return replace(
            derived,
            dram=replace(derived.dram, capacity_bytes=dram),
            file=replace(derived.file, capacity_bytes=file or derived.file.capacity_bytes),
        )

    def over_caps(self) -> str:
        """Say what a lowered cap waits for, "" if every cap is kept."""
        if not self.configured:
            return self.get(DEFAULT_TENANT).store.caps.over_caps()
        over = ((each.name, each.store.caps.over_caps()) for each in self)
        return "; ".join(f"tenant {name}: {what}" for name, what in over if what)

    def _derived(self, settings: Settings) -> Iterator[tuple[Tenant, Settings]]:
        """Yield each tenant with the settings of its store."""
        if not self.configured:
            yield self.get(DEFAULT_TENANT), settings
        for each in settings.tenants:
            if (found := self._by_name.get(each.name)) is not None:
                yield found, settings_of_tenant(settings, each)

    def leave(self, tenant: Tenant, settings: Settings) -> Leaving:
        """Begin to delete a tenant whose calls are refused: as `remove`, but until it is deleted it
        is among those that are `leaving`. settings: the daemon's."""
        assert tenant.settings is not None
        own = settings_of_tenant(settings, tenant.settings)
        blocks = tenant.store.report.stats()["blocks"]
        self.leaving[tenant.name] = Leaving(blocks, own, self._places_of(own, tenant.name), tenant)
        self.remove(tenant.name)
        return self.leaving[tenant.name]

    def remove(self, name: str) -> None:
        """Forget a tenant; the caller closes its store, and then says that it is `gone`."""
        self.get(name)
        del self._by_name[name]
        self.lending.leave(name)

    def gone(self, name: str) -> None:
        """Lend to others what a tenant had that is closed and holds nothing."""
        leaving = self.leaving.get(name)
        self.lending.gone(name, bucket_is_empty=leaving is None or not leaving.left)


def settings_of_tenant(settings: Settings, tenant: TenantSettings) -> Settings:
    """Return the settings of one tenant's store: those of a daemon that has nothing else.

    It begins with what it is guaranteed; more is lent to it later.
    """
    file, limits = settings.file, settings.limits
    paths = directories_of(settings, tenant.name)
    guaranteed = tenant.dram_guaranteed_bytes
    if tenant.leased_fraction:
        limits = replace(limits, leased_fraction=tenant.leased_fraction)
    if paths:
        file = replace(
            file,
            path=tuple(map(str, paths)),
            capacity_bytes=_pages(tenant.file_guaranteed_bytes // len(paths)),
            write_bytes_per_day=write_share(settings, tenant),
        )
    return replace(
        settings,
        dram=replace(
            settings.dram,
            capacity_bytes=guaranteed,
            extent_bytes=extent_bytes(guaranteed, settings.dram.extent_bytes),
        ),
        file=file,
        object=replace(
            settings.object,
            url=_url_of(settings, tenant.name),
            capacity_bytes=object_share(settings, tenant),
        ),
        limits=limits,
        tenants=(),
    )


def extent_bytes(guaranteed_bytes: int, extent_bytes_max: int) -> int:
    """Return how large the extents of a tenant's arena are."""
    wanted = max(min(EXTENT_NBYTES_MIN, guaranteed_bytes), guaranteed_bytes // EXTENT_SHARE)
    return max(MIB, min(extent_bytes_max, wanted // MIB * MIB))


def directories_of(settings: Settings, name: str) -> list[Path]:
    """Return a tenant's directories, one on each disk. `default` has those of file.path: what a
    daemon without tenants has written there is its own."""
    roots = [Path(path) for path in settings.file.paths]
    if name == DEFAULT_TENANT:
        return roots
    return [root / TENANTS_DIRECTORY / tenant_id(name).hex() for root in roots]


def check_left_over(settings: Settings) -> None:
    """Raise ConfigError if blocks lie in file.path that no tenant would serve or count."""
    if not settings.tenants or any(each.name == DEFAULT_TENANT for each in settings.tenants):
        return
    left = [path for path in settings.file.paths if holds_blocks(Path(path))]
    if left:
        raise ConfigError(
            f"{left[0]} holds blocks of a daemon without tenants. Keep them as those of the "
            'operator: [tenants.default] file.guaranteed="..."; or remove its *.segment files'
        )


def _url_of(settings: Settings, name: str) -> str:
    url = settings.object.url
    if not url or name == DEFAULT_TENANT:
        return url
    return f"{url.rstrip('/')}/{OBJECT_PREFIX}/{tenant_id(name).hex()}"


def _pages(nbytes: int) -> int:
    return nbytes // 4096 * 4096
