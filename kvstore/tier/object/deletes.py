"""Delete blocks for every daemon: a tombstone first, then the objects that hold them."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence

from kvstore.metrics import Metrics
from kvstore.model.block import BlockKey, NamespaceId
from kvstore.model.errors import KVStoreError
from kvstore.tier.object.catalog import Catalog
from kvstore.tier.object.failure import ObjectFailed
from kvstore.tier.object.names import Names, TombstoneName
from kvstore.tier.object.requests import Requests
from kvstore.tier.object.seal import SealedNames
from kvstore.tier.object.tombstones import KEYS_MAX, Tombstone, Tombstones, encode_tombstone
from kvstore.tier.object.writes import Writes

logger = logging.getLogger(__name__)


class Deletes:
    """Deletes of this daemon; the upkeep learns those of other daemons."""

    def __init__(
        self,
        requests: Requests,
        catalog: Catalog,
        tombstones: Tombstones,
        writes: Writes,
        names: Names,
        *,
        metrics: Metrics,
        now: Callable[[], float],
    ) -> None:
        self._requests = requests
        self._catalog = catalog
        self._tombstones = tombstones
        self._writes = writes
        self._names = names
        self._metrics = metrics
        self._now = now

    async def delete(
        self, namespace_id: NamespaceId, keys: Sequence[BlockKey] | None, deadline: float
    ) -> None:
        """Delete keys, or (None) a whole namespace, for every daemon and before this returns.

        Forget them elsewhere first, so that no upload of them begins any more; this waits for
        uploads in flight. Other daemons see the delete within `believed_s`. Objects that hold a
        deleted block are deleted as a whole: those known here at once, the others by the next
        collection.

        Raises Unavailable if the tombstone may not be stored: then they may be served again.
        """
        wanted = None if keys is None else set(keys)
        named = self._names.namespace(namespace_id)
        if under_way := self._writes.under_way(named, wanted):
            _, pending = await asyncio.wait(under_way, timeout=max(0.0, deadline - self._now()))
            if pending:
                raise ObjectFailed("a write of it did not end in time", reason="timeout")
        for start in range(0, 1 if keys is None else len(keys), KEYS_MAX):
            batch = None if keys is None else keys[start : start + KEYS_MAX]
            await self._bury(namespace_id, batch, deadline)
        names = [run.name for run in self._catalog.holding(named, keys)]
        try:
            await self._requests.delete(list(map(str, names)), deadline)
        except KVStoreError as error:
            logger.warning("object=not_deleted count=%d reason=%r", len(names), str(error))
            return
        for name in names:
            self._catalog.gone(name)
        self._metrics.object_collected.labels("deleted").inc(len(names))

    async def _bury(
        self, namespace_id: NamespaceId, keys: Sequence[BlockKey] | None, deadline: float
    ) -> None:
        names, nonce = self._names, int.from_bytes(os.urandom(8), "big")
        name = TombstoneName(names.namespace(namespace_id), nonce, names.prefix)
        key = names.keys.new_key() if isinstance(names, SealedNames) else None
        data = encode_tombstone(name, keys, namespace_id, key)
        await self._requests.put(str(name), [data], len(data), deadline)
        stored = await self._requests.head(str(name), deadline)
        killed = None if keys is None else frozenset(keys)
        self._tombstones.add(Tombstone(name, stored.modified, killed))
