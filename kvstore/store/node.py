"""What the parts of one store share: the tiers, who decides, who holds what, and its clock."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from kvstore.decide.index import HeldSlot
from kvstore.decide.planner import Leases, Planner
from kvstore.decide.uses import Uses
from kvstore.metrics import Metrics
from kvstore.model.block import BlockKey, NamespaceId, Span
from kvstore.model.errors import InvalidRequest
from kvstore.move.deletions import Deletions
from kvstore.move.fetch import Fetch
from kvstore.move.write_behind import WriteBehind
from kvstore.settings import LimitSettings
from kvstore.store.answers import Answers
from kvstore.store.arrivals import Arrivals
from kvstore.store.room import Room
from kvstore.store.staging import Staging
from kvstore.tier.dram import Arena

if TYPE_CHECKING:  # a daemon without a bucket starts without what it takes to use one
    from kvstore.move.object_side import Objects
    from kvstore.move.pool_side import Pool

RECALL_STEP_KEYS = 64
SPANS_MAX = 4096
RECORDS_MAX = 1 << 18  # in one call: the answer has a slot for each


class Node:
    """One node. staging: where clients write, if the arena is sealed. room: told when there may be
    room for puts that wait. Times are seconds of `now`.
    """

    def __init__(
        self,
        *,
        arena: Arena,
        write_behind: WriteBehind,
        planner: Planner,
        leases: Leases,
        objects: Objects | None,
        deletions: Deletions,
        fetch: Fetch,
        limits: LimitSettings,
        metrics: Metrics,
        now: Callable[[], float],
        staging: Staging | None = None,
        pool: Pool | None = None,
    ) -> None:
        self.arena = arena
        self.write_behind = write_behind
        self.planner = planner
        self.leases = leases
        self.objects = objects
        self.pool = pool
        self.deletions = deletions
        self.fetch = fetch
        self.limits = limits
        self.metrics = metrics
        self.now = now
        self.staging = staging
        self.room = Room()
        self.uses = Uses(now)
        self.answers = Answers()
        self.slow = write_behind.reads.slow
        write_behind.on_progress = self.room.set
        self.arrivals = Arrivals()
        arena.extents.on_extent(lambda _: self.room.set())
        self.ask_room: Callable[[int], Awaitable[None]] | None = None  # of what others have lent

    def in_use(self, namespace_id: NamespaceId) -> AbstractContextManager[None]:
        """Let a namespace not be forgotten during a call in it. Raises UnknownNamespace."""
        return self.planner.index.namespaces.in_use(namespace_id)

    async def recall(self, keys: Sequence[BlockKey]) -> None:
        """Index what was found on disk of these blocks, letting others run between its steps."""
        for start in range(0, len(keys), RECALL_STEP_KEYS):
            if not self.write_behind.recall.unrecalled_runs:
                return
            self.write_behind.recall.index(keys[start : start + RECALL_STEP_KEYS])
            await asyncio.sleep(0)

    def check_spans(
        self, namespace_id: NamespaceId, keys: Sequence[BlockKey], spans: Sequence[Span]
    ) -> None:
        namespace = self.planner.namespace(namespace_id)
        if len(spans) > SPANS_MAX or len({span.part for span in spans}) != len(spans):
            raise InvalidRequest("spans name a part twice, or there are too many of them")
        for part, begin, end in spans:
            namespace.record_nbytes(part)
            if not 0 <= begin <= end <= len(keys):
                raise InvalidRequest(f"span {begin}:{end} of {len(keys)} keys")
        records = sum(end - begin for _, begin, end in spans)
        if records > RECORDS_MAX:
            raise InvalidRequest(f"{records} records in one call; the limit is {RECORDS_MAX}")

    def free(self, held: Sequence[HeldSlot | None]) -> None:
        for slot in held:
            if slot is not None:
                self.planner.unpin(slot)
