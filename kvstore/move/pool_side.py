"""What a node does with a pool: it is a source of prefixes, puts go there, and deletes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

from kvstore.decide.planner import Planner
from kvstore.metrics import Metrics
from kvstore.model.block import BlockKey, NamespaceId
from kvstore.model.errors import Unavailable
from kvstore.move.deletions import Deletions
from kvstore.move.pool_graves import PoolGraves
from kvstore.move.pool_sink import PoolSink
from kvstore.move.pool_source import PoolSource, base_parts
from kvstore.system.background import keep_running
from kvstore.tier.dram import Arena
from kvstore.tier.file import Devices
from kvstore.tier.pool import (
    EVERYTHING,
    PoolFailed,
    PoolTier,
    keys_pattern,
    namespace_pattern,
    record_name,
)
from kvstore.tier.pool.names import PATTERN_KEYS_MAX

logger = logging.getLogger(__name__)

DELETE_S = 15.0  # for all namespaces of one delete together
STATES = ("starting", "up", "down")
CONNECT_S = 3.0  # of that, for a pool that is just being connected to


class Pool:
    """The pool of one node, and what moves between it and the arena."""

    def __init__(
        self,
        tier: PoolTier,
        planner: Planner,
        arena: Arena,
        *,
        deletions: Deletions,
        metrics: Metrics,
        file: Devices | None,
        now: Callable[[], float],
    ) -> None:
        """file: the file tier, if there is one."""
        self._tier = tier
        self._planner = planner
        self._metrics = metrics
        self._now = now
        self._graves = PoolGraves(file)
        self.source = PoolSource(tier, self._graves, metrics, now)
        self._sink = PoolSink(
            tier,
            self._graves,
            planner,
            arena,
            deletions=deletions,
            metrics=metrics,
            has_file=file is not None,
            now=now,
        )
        self.used = self._sink.used
        self._putting: asyncio.Task[None] | None = None
        self._loading: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; a pool that does not answer delays nothing."""
        self._tier.start()
        self._loading = asyncio.create_task(self._graves.load())
        self._putting = asyncio.create_task(
            keep_running("pool_put", self._sink.run, self._metrics.task_failed)
        )

    async def close(self) -> None:
        """Stop. What waits to be put is not: it will be used again, or never."""
        for task in filter(None, (self._putting, self._loading)):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self._tier.close()

    async def delete(
        self,
        namespaces: Collection[NamespaceId],
        keys: Sequence[BlockKey] | None,
        *,
        everything: bool = False,
    ) -> None:
        """Delete keys, or (None) whole namespaces, for every node that shares the pool. everything:
        namespaces that this node does not know as well.

        Forget them elsewhere first, so that no put of them begins any more; this waits for the one
        under way. From here on this node does not believe older values of them. Raises Unavailable
        if the pool does not confirm: its copies may come back to others then; DiskFailed.
        """
        deadline = self._now() + DELETE_S
        await self._graves.bury(namespaces, keys, everything=everything)
        try:
            await self._connected(self._now() + CONNECT_S)
            if not await self._sink.settled(deadline):
                raise PoolFailed("a put does not end", reason="slow")
            self._sink.forget(keys)
            if everything:
                await self._purge(EVERYTHING, "", deadline)
                return
            for namespace_id in namespaces:
                if keys is None:
                    prefix = namespace_pattern(namespace_id)
                    await self._purge(prefix, prefix.removeprefix("^"), deadline)
                else:
                    await self._delete_keys(namespace_id, keys, deadline)
        except PoolFailed as error:
            raise Unavailable(
                f"deleted here, and the pool did not confirm it ({error}): delete again once it "
                "answers, or other hosts may serve its copies; without pool.url none does",
                reason="pool",
            ) from error

    async def _connected(self, deadline: float) -> None:
        while self._tier.connecting and self._now() < deadline:  # noqa: ASYNC110 - of a process
            await asyncio.sleep(0.05)

    async def _purge(self, pattern: str, prefix: str, deadline: float) -> None:
        """Remove what a pattern matches. It does not match what is still being put, which our own
        killed process may have left; that is removed by its names."""
        await self._tier.purge(pattern, deadline)
        if doubtful := self._sink.doubtful(prefix):
            await self._tier.remove(doubtful, deadline)

    async def _delete_keys(
        self, namespace_id: NamespaceId, keys: Sequence[BlockKey], deadline: float
    ) -> None:
        spec = self._planner.index.namespaces.spec(namespace_id)
        if spec is not None:
            parts = base_parts(spec)
            names = [record_name(namespace_id, key, part) for key in keys for part in parts]
            await self._tier.remove(names, deadline)
            return
        for first in range(0, len(keys), PATTERN_KEYS_MAX):  # its parts are not known here yet
            some = keys[first : first + PATTERN_KEYS_MAX]
            await self._tier.purge(keys_pattern(namespace_id, some), deadline)

    def stats(self) -> dict[str, Any]:
        stats = self._tier.stats()
        for state in STATES:
            self._metrics.pool_state.labels(state).set(state == stats["state"])
        return {
            **stats,
            "puts_waiting": self._sink.waiting,
            "put_records": self._sink.put_records,
        }
