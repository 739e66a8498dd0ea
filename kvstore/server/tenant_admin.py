"""Tenants that come and go while the daemon runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from kvstore.model.errors import ConfigError, InvalidRequest, KVStoreError
from kvstore.model.tenant import DEFAULT_TENANT, check_tenant_name
from kvstore.settings import Settings, overridden
from kvstore.store.erasure import Place
from kvstore.store.live_settings import LiveSettings
from kvstore.store.tenants import Leaving, Tenant, Tenants

logger = logging.getLogger(__name__)

DELETE_S = 30.0  # for its calls to end


class Removed(NamedTuple):
    """What became of a tenant. erased: how far nothing of it can be read again. left: what is
    stored of it still, and why; "" if nothing is."""

    blocks: int
    erased: str
    left: str


class TenantAdmin:
    """Adds and deletes tenants of a daemon. host, unhost: begin and end to serve one."""

    def __init__(
        self,
        tenants: Tenants,
        config: LiveSettings,
        host: Callable[[Tenant], Awaitable[Path]],
        unhost: Callable[[str, float], Awaitable[None]],
    ) -> None:
        self._tenants = tenants
        self._config = config
        self._host = host
        self._unhost = unhost
        self._changing = asyncio.Lock()
        self._deleting: set[asyncio.Task[Removed]] = set()

    async def add(self, name: str, assignments: Sequence[str]) -> Path:
        """Serve one more tenant until the daemon ends; return the path of its socket.

        assignments: such as "dram.guaranteed=8GiB". Raises ConfigError or InvalidRequest, and has
        changed nothing then.
        """
        async with self._changing, self._config.changing:
            wanted = self._with(name, assignments)
            settings = next(each for each in wanted.tenants if each.name == name)
            if settings.shared:
                raise ConfigError("a shared tenant comes with a start: name it in the settings")
            tenant = self._tenants.add(wanted, settings)
            try:
                await self._tenants.start_one(tenant)
                path = await self._host(tenant)
            except BaseException:
                self._tenants.remove(name)
                await self._unhost(name, 0.0)
                await self._tenants.leave_fleet(tenant)
                await tenant.store.close(0.0)
                self._tenants.gone(name)
                raise
            self._config.adopt(wanted)
            self._tenants.divide(wanted)
        logger.info("tenant=added name=%s socket=%s", name, path)
        return path

    def _with(self, name: str, assignments: Sequence[str]) -> Settings:
        check_tenant_name(name)
        if not self._tenants.configured:
            raise ConfigError(
                "this daemon has one user and no tenants: name the first tenants in its settings, "
                "and start it again"
            )
        if name in self._tenants.leaving:
            raise InvalidRequest(
                f"{name} is being deleted, and something of it is left: `kvstore tenant delete "
                f"{name}` again"
            )
        if self._tenants.find(name) is not None or name == DEFAULT_TENANT:
            raise InvalidRequest(f"there is a tenant {name} already: `kvstore tenant set` it")
        given = [f"tenants.{name}.{each}" for each in assignments]
        given = given or [f"tenants.{name}.weight=1"]
        return overridden(self._config.settings, given, adds=name)

    async def delete(self, name: str) -> Removed:
        """End a tenant's sessions, destroy its keys, and delete what is stored of it.

        It goes on if the caller is gone. Where something is left, the tenant's calls stay refused,
        and this can be called again. Raises InvalidRequest for one that is not there, or that is
        the operator's.
        """
        task = asyncio.create_task(self._delete(name))
        self._deleting.add(task)
        task.add_done_callback(self._deleting.discard)
        return await asyncio.shield(task)

    async def _delete(self, name: str) -> Removed:
        async with self._changing:
            leaving = self._tenants.leaving.get(name) or await self._end(name)
            await self._close(leaving)
            failed = await _destroy_keys(leaving)
            # Every key first: what it opened cannot be read then, however long it lies there.
            erased = least_erased(list(leaving.erased.values())) if not failed else "none"
            for place in leaving.places:
                if place.name not in failed:
                    with _noted(failed, place):
                        await place.empty()
            leaving.left = "; ".join(f"{where} ({why})" for where, why in failed.items())
            if not leaving.has_files:
                self._tenants.gone(name)
            if not failed:
                del self._tenants.leaving[name]
                async with self._config.changing:
                    kept = [each for each in self._config.settings.tenants if each.name != name]
                    with contextlib.suppress(ConfigError):
                        self._config.adopt(self._config.without(kept))
                    self._tenants.divide(self._config.settings)
        done = Removed(leaving.blocks, erased, leaving.left)
        told = "not_deleted" if done.left else "deleted"
        logger.info("tenant=%s name=%s blocks=%d erased=%s left=%r", told, name, *done)
        return done

    async def _end(self, name: str) -> Leaving:
        """Refuse a tenant's calls from now on."""
        if name == DEFAULT_TENANT:
            raise InvalidRequest("default is the operator's: `kvstore clear --all` empties it")
        tenant = self._tenants.get(name)
        if tenant.settings is not None and tenant.settings.shared:
            raise InvalidRequest(f"others read {name}: take it out of the settings and restart")
        await self._unhost(name, DELETE_S)
        return self._tenants.leave(tenant, self._config.settings)

    async def _close(self, leaving: Leaving) -> None:
        """Close a tenant's store, if it is not closed yet. Raises what keeps it open: nothing of it
        may be destroyed then."""
        if (tenant := leaving.open) is None:
            return
        await self._tenants.leave_fleet(tenant)
        await tenant.store.end_uploads()
        try:
            await tenant.store.close(0.0, retire=True)
        except (KVStoreError, OSError) as error:  # what is stored of it is deleted anyway
            logger.error("tenant=not_closed name=%s reason=%r", tenant.name, str(error))
        await self._tenants.left.take(tenant.store.arena)
        leaving.open = None


async def _destroy_keys(leaving: Leaving) -> dict[str, str]:
    """Destroy the keys in every place; return those where that failed, and why."""
    failed: dict[str, str] = {}
    for place in leaving.places:
        with _noted(failed, place):
            erased = await place.destroy_keys()
            before = leaving.erased.get(place.name, "none")
            leaving.erased[place.name] = least_erased([before, erased])
    return failed


@contextlib.contextmanager
def _noted(failed: dict[str, str], place: Place) -> Iterator[None]:
    try:
        yield
    except (KVStoreError, OSError) as error:
        failed[place.name] = str(error)


def least_erased(places: Sequence[str]) -> str:
    """Return how far nothing can be read again of what was in some places. Where there were no keys
    there was nothing, or nothing was encrypted anywhere."""
    return next((each for each in ("backups", "forgotten") if each in places), "none")
