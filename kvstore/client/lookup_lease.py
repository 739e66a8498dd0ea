"""Records that are leased when an engine looks them up, for the load that follows.

An engine that is told that its pages are stored asks for them at once. Leased in between, they
cannot leave before it does, and it waits for one answer of the daemon instead of two. What nobody
loads is given back.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from kvstore.model.block import BlockKey, Grant, NamespaceId, Part
from kvstore.model.errors import KVStoreError

if TYPE_CHECKING:
    from kvstore.client.async_client import AsyncClient

KEEP_S = 1.0
"""How long a load may take to follow its lookup."""
LEASES_MAX = 16
"""Of one engine that no load has followed yet."""


@dataclass(frozen=True, slots=True)
class LookupLease:
    """A lease of the first records of a prefix, each with a slot, or a place in a file.

    instance: of the daemon. until: a time.monotonic(); not to be used after it. nbytes: how many it
    counts for among those of a client.
    """

    namespace_id: NamespaceId
    part: Part
    keys: Sequence[BlockKey]
    grant: Grant
    instance: str
    until: float
    nbytes: int

    def is_good(self, instance: str) -> bool:
        """Say whether its slots are what they were, for a client of this daemon."""
        return self.instance == instance and time.monotonic() < self.until

    def covers(self, namespace_id: NamespaceId, part: Part, keys: Sequence[BlockKey]) -> int:
        """Return how many of these keys it has leased, from the first on."""
        count = min(len(self.keys), len(keys))
        same = (namespace_id, part) == (self.namespace_id, self.part)
        return count if same and list(keys[:count]) == list(self.keys[:count]) else 0

    @property
    def record_nbytes(self) -> int:
        """Bytes of its largest record."""
        return max(each.nbytes for each in (*self.grant.slots, *self.grant.places) if each)

    def first(self, count: int) -> LookupLease:
        """Return what it says of its first records; it is the same lease."""
        grant = replace(
            self.grant,
            slots=self.grant.slots[:count],
            checksums=self.grant.checksums[:count],
            places=self.grant.places[:count],
        )
        return replace(self, keys=self.keys[:count], grant=grant)


class Lookup(NamedTuple):
    """present: of each block, whether it is stored. lease: of those that are here now, from the
    first on; None: that one is not, nothing is mapped, or lookups have leased enough already."""

    present: list[bool]
    lease: LookupLease | None


def leading(there: Sequence[bool]) -> int:
    """Return how many are there, from the first on."""
    return next((at for at, is_there in enumerate(there) if not is_there), len(there))


class LookupLeases:
    """Those of one engine that no load has followed yet. Lives on its client's loop."""

    def __init__(self) -> None:
        self._kept: dict[tuple[NamespaceId, BlockKey], tuple[AsyncClient, LookupLease]] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def keep(self, remote: AsyncClient, lease: LookupLease) -> None:
        """Keep the lease of a lookup for a moment; one more lookup of the same replaces it."""
        where = (lease.namespace_id, lease.keys[0])
        self._end(where)
        while len(self._kept) >= LEASES_MAX:
            self._end(next(iter(self._kept)))
        self._kept[where] = remote, lease
        asyncio.get_running_loop().call_later(KEEP_S, self._end, where, lease)

    def take(self, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> LookupLease | None:
        """Return the lease for a load of these, which is the caller's from now on."""
        _, lease = self._kept.pop((namespace_id, keys[0]), (None, None))
        return lease

    def _end(self, where: tuple[NamespaceId, BlockKey], only: LookupLease | None = None) -> None:
        """Give a lease back. only: if it is this one."""
        remote, lease = self._kept.get(where, (None, None))
        if remote is None or lease is None or only not in (None, lease):
            return
        del self._kept[where]
        ending = asyncio.create_task(_give_back(remote, lease))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)


async def _give_back(remote: AsyncClient, lease: LookupLease) -> None:
    with contextlib.suppress(KVStoreError):  # the session sends it later
        await remote.give_back(lease)
