"""Deletes of the fleet, with an engine that keeps them for those who are away.

Who deletes: keeps the delete in etcd, then learns who is in the fleet, then tells them all. Who
joins: registers, and then applies what etcd keeps, before it lends or borrows. So either the one
who deletes knows of the one who joins, or that one finds the delete. Etcd may register it long
before it hears of that: so it lends nothing from when it asks for it. Deletes that are applied
twice cost misses alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol, runtime_checkable

from kvstore.membership.etcd_deletes import Delete, EtcdDeletes
from kvstore.membership.state_files import AppliedDeletes
from kvstore.metrics import Metrics
from kvstore.model.block import BlockKey, NamespaceId
from kvstore.model.errors import ConfigError, KVStoreError, Unavailable
from kvstore.model.member import NodeId
from kvstore.model.tenant import TenantId
from kvstore.store.deletes import Burial, Deletes, FleetDeletes

logger = logging.getLogger(__name__)

LOOK_S = 15.0
RETRY_S = 0.5  # before what failed is tried again; it doubles up to LOOK_S
PATIENCE_S = 5.0  # after a delete that failed, for those behind it
STARTS_MAX = 4  # attempts of a start, if etcd answers others of its calls
TOKENS_MAX = 16  # that etcd did not confirm, and may have
RENEWALS = 20  # of the token, in its time


@runtime_checkable
class KeepsDeletes(Protocol):
    """The driver of the members. claims: how often this daemon was registered."""

    @property
    def claims(self) -> int: ...

    @property
    def claiming(self) -> bool:
        """Whether others may come to know of this daemon before it hears that it is registered."""

    @property
    def away_s(self) -> float | None: ...

    @property
    def doubtful(self) -> Collection[NodeId]:
        """The members that may not have applied what is kept: nothing is borrowed from them."""

    def settling(self) -> Callable[[], bool]:
        """Return what tells whether every member, but for doubtful ones, is one that a delete kept
        before now was told to, or that has to apply it before it lends."""

    def on_claim(self, told: Callable[[], None]) -> Callable[[], None]:
        """Call `told` whenever this daemon is registered; returns how to stop that."""

    def deletes_of(self, tenant: TenantId) -> EtcdDeletes:
        """Return what is kept of a tenant's deletes."""

    async def refresh(self) -> None: ...


class KeptDeletes:
    """Applies what etcd keeps, and lets deletes of this daemon be kept. note: None: nothing here
    outlives a restart. told: the members that are there."""

    def __init__(
        self,
        engine: KeepsDeletes,
        log: EtcdDeletes,
        *,
        node: NodeId,
        deletes: Deletes,
        told: FleetDeletes,
        note: AppliedDeletes | None,
        metrics: Metrics,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._log = log
        self._node = node
        self._deletes = deletes
        self._told = told
        self._note = note
        self._metrics = metrics
        self._now = now
        self._revision = 0  # of what was applied
        self._applied: dict[Delete, Burial | None] = {}  # since then; None: done, else in part
        self._dropped: Burial | None = None  # of all files, until the rest is applied as well
        self._tokens: list[str] = []
        self._begun = self._unread = False
        self._claims = 0  # whose deletes were applied
        self._applied_at = now()
        self._renewed_at = float("-inf")
        self._look = asyncio.Event()
        # Until what was deleted meanwhile is applied, nothing is lent.
        self._stop_claims = engine.on_claim(self.look)

    @property
    def current(self) -> bool:
        """Whether all is applied that was deleted before others could know of this daemon."""
        engine = self._engine
        return self._begun and not engine.claiming and self._claims == engine.claims

    def look(self) -> None:
        """Look soon for what is new."""
        self._look.set()

    def close(self) -> None:
        """Hear of no more registrations. Cancel `run` before; once is enough."""
        self._stop_claims()

    async def start(self) -> None:
        """Apply what is kept; if etcd does not answer, `run` does it later."""
        for _ in range(STARTS_MAX):
            if await self._try() or self._engine.away_s is not None:
                return
            await asyncio.sleep(RETRY_S)

    async def run(self) -> None:
        pause_s = RETRY_S
        while True:
            self._look.clear()
            claims = self._engine.claims
            if await self._try():
                pause_s = RETRY_S
                await self._rest()
                continue
            await self._pause(pause_s, claims)
            anew = self._engine.claims != claims
            pause_s = RETRY_S if anew else min(2 * pause_s, LOOK_S)

    async def _rest(self) -> None:
        """Wait until it is time to look, or there is a reason to: all is applied."""
        until = self._now() + LOOK_S
        while self._now() < until and not self._look.is_set():
            if self._claims != self._engine.claims:
                return
            await self._looked()

    async def _pause(self, pause_s: float, claims: int) -> None:
        """Wait before what failed is tried again; not if this daemon was registered anew since, nor
        if etcd has answered again."""
        until, was_away = self._now() + pause_s, self._engine.away_s is not None
        while self._now() < until and self._engine.claims == claims:
            await self._looked()
            self._look.clear()
            if was_away and self._engine.away_s is None:
                return

    async def _looked(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RETRY_S):
                await self._look.wait()

    async def delete(
        self, namespace_id: NamespaceId | None, keys: Sequence[BlockKey] | None
    ) -> None:
        """Keep a delete, and tell every member. Raises Unavailable if one of that failed."""
        forgotten: KVStoreError | None = None
        try:
            await self._log.write(namespace_id, keys)
            await self._engine.refresh()
        except (Unavailable, ConfigError) as error:
            forgotten = error
            self._metrics.fleet_deletes.labels("not_kept").inc()
        else:
            self._metrics.fleet_deletes.labels("kept").inc()
        await self._told.delete(namespace_id, keys)
        if forgotten is not None:
            raise Unavailable(
                "deleted on this daemon and on every member that is there, but etcd did not keep "
                f"it for those that are away ({forgotten}): delete again once it answers, or their "
                "copies may return",
                reason="fleet",
            )

    # ---- applying ------------------------------------------------------------------------------

    async def _try(self) -> bool:
        try:
            await self._apply()
        except (Unavailable, ConfigError) as error:
            self._metrics.fleet_deletes.labels("unread").inc()
            if not self._unread:
                logger.warning("deletes=unread error=%s", error)
            self._unread = True
            return False
        self._unread = False
        return True

    async def _apply(self) -> None:
        """Read what is kept and apply it. Raises Unavailable, ConfigError."""
        engine, log = self._engine, self._log
        claims = engine.claims
        if not self._begun:
            await self._begin()
        found = await log.read(self._revision)
        was_away = self._now() - self._applied_at > log.token_s
        lost = found.revision < self._revision
        if lost or (not was_away and await self._has_begun_anew(claims)):  # all it keeps is new
            logger.warning(
                "deletes=etcd_lost revision=%d before=%d", found.revision, self._revision
            )
            self._revision, self._renewed_at = 0, float("-inf")
            self._applied.clear()
            found = await log.read(0)
        elif was_away:
            await self._drop_all("away")
        if found.deletes or claims != self._claims:  # it may have lost the token with the key
            self._renewed_at = float("-inf")
        await self._apply_all(found.deletes)
        self._metrics.fleet_deletes.labels("refused").inc(found.refused)
        self._revision, self._applied_at, self._begun = found.revision, self._now(), True
        self._applied.clear()
        self._dropped = None
        if self._now() - self._renewed_at > log.token_s / RENEWALS:
            await self._renew(log)
        if claims:
            self._claims = claims

    async def _has_begun_anew(self, claims: int) -> bool:
        """Tell whether etcd, with which this daemon is registered anew, does not know how far it
        is: it has lost what it had, and may have come further since."""
        if not self._begun or claims == self._claims or not self._tokens:
            return False
        return await self._log.token(self._node) not in self._tokens

    async def _begin(self) -> None:
        """Find out how far an earlier start has come, and whether etcd keeps all since then."""
        note = await asyncio.to_thread(self._note.read) if self._note is not None else None
        if note is None:
            return
        token = await self._log.token(self._node)
        newest = (await self._log.read(1 << 62)).revision
        if token in note.tokens and newest >= note.revision:
            self._revision, self._tokens = note.revision, [token]
            return
        await self._drop_all("unknown")

    async def _drop_all(self, why: str) -> None:
        """Drop what the files hold, once, however often it is tried until all is applied."""
        first = self._dropped is None
        dropped = self._dropped = self._dropped or self._deletes.burial_of_files()
        try:
            await dropped.run()
        finally:
            if first:
                self._metrics.fleet_deletes.labels("dropped_all").inc()
                logger.warning(
                    "deletes=away_too_long why=%s dropped_blocks=%d", why, dropped.deleted
                )

    async def _apply_all(self, deletes: Sequence[Delete]) -> None:
        """Apply what is not applied yet. One that fails, such as on a disk that is out of use,
        keeps none behind it from being tried, unless it takes long. Raises Unavailable."""
        failed: Unavailable | None = None
        until = float("inf")
        for delete in deletes:
            if self._now() > until:
                break
            try:
                await self._apply_one(delete)
            except Unavailable as error:
                failed = failed or error
                until = min(until, self._now() + PATIENCE_S)
        if failed is not None:
            raise failed

    async def _apply_one(self, delete: Delete) -> None:
        namespace_id, keys, _ = delete
        if delete not in self._applied:
            self._deletes.forbid(namespace_id, keys)
            self._applied[delete] = self._deletes.burial(namespace_id, keys)
        burial = self._applied[delete]
        if burial is not None:
            await burial.run()
            self._applied[delete] = None
            self._metrics.fleet_deletes.labels("applied").inc()

    async def _renew(self, log: EtcdDeletes) -> None:
        """Note how far this daemon is, and let etcd say for how long that is enough."""
        token = secrets.token_hex(8)
        self._tokens = [*self._tokens[-TOKENS_MAX:], token]  # whichever of them etcd has then
        await self._write_note(self._tokens)
        await log.renew(self._node, token)
        self._tokens, self._renewed_at = [token], self._now()
        await self._write_note(self._tokens)

    async def _write_note(self, tokens: Sequence[str]) -> None:
        if self._note is not None:
            await asyncio.to_thread(self._note.write, self._revision, tokens)
