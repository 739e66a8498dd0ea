"""What a node says of itself: its blocks, its numbers, its answers, its troubles."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.decide.index import StoredBlock
from kvstore.decide.paging import page
from kvstore.model.block import BlockKey, NamespaceId, check_keys
from kvstore.model.errors import Unavailable
from kvstore.model.outcome import Explanation, Outcome
from kvstore.store.node import Node
from kvstore.store.puts import Puts
from kvstore.store.request_log import RequestLog
from kvstore.store.stats import snapshot
from kvstore.system.steps import in_steps

RECALL_S_MAX = 300.0  # a million blocks take some seconds
REFUSES_S = 5.0  # for which every put is refused, before the node says that it takes none
FULL_FRACTION = 0.95  # of the arena, held by clients: what is left is gaps
SCAN_STEP_BLOCKS = 256


@dataclass(frozen=True, slots=True)
class ScanItem:
    """A stored block as `scan` shows it. nbytes: of all its parts, uncompressed. resident,
    durable: the tier has all its base parts."""

    key: BlockKey
    namespace_id: NamespaceId
    block_index: int
    nbytes: int
    resident: bool
    durable: bool


class Report:
    """Looks at a node, and changes nothing."""

    def __init__(self, node: Node, puts: Puts, request_log: RequestLog) -> None:
        self._node = node
        self._planner = node.planner
        self._write_behind = node.write_behind
        self._leases = node.leases
        self._objects = node.objects
        self._pool = node.pool
        self._now = node.now
        self._puts = puts
        self._request_log = request_log
        self._started = node.now()
        self.events: Callable[[], dict[str, Any]] | None = None  # of what is told to routers
        self.fleet: Callable[[], dict[str, Any]] | None = None  # what there is to say of it

    def outcomes(self, request_id: str, limit: int) -> list[Outcome]:
        """Return how the last requests were answered whose id starts so, newest first."""
        return self._request_log.outcomes(request_id, limit)

    def explain(self, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> Explanation:
        """Return where each block of a prefix is now, and what would end its hit."""
        check_keys(keys)
        self._write_behind.recall.index(keys)
        return self._request_log.explain(namespace_id, keys)

    async def recalled(self, wait_s: float) -> None:
        """Wait until all that was found on disk is indexed. Raises Unavailable after `wait_s`."""
        if not await self._write_behind.recall.recalled(
            self._now() + min(wait_s, self._node.limits.wait_max_s)
        ):
            raise Unavailable(
                f"{self._write_behind.recall.unrecalled_runs} runs found on disk are not indexed "
                "yet: try again in a while"
            )

    @property
    def recalling(self) -> bool:
        """Whether something that was found on disk is not indexed yet."""
        return bool(self._write_behind.recall.unrecalled_runs)

    async def scan(
        self, namespace_id: NamespaceId | None, after: BlockKey | None, limit: int
    ) -> list[ScanItem]:
        """Return up to `limit` blocks, those behind `after`, in the order of the last bytes of
        their keys: see `page`. It lets others run meanwhile: a block that comes or goes may be left
        out. What was found on disk and is not indexed yet is left out: see `recalled`."""
        index, items = self._planner.index, list[ScanItem]()
        while len(items) < limit:
            wanted = limit - len(items)
            keys = await in_steps(page(index, namespace_id, after, wanted))
            for at in range(0, len(keys), SCAN_STEP_BLOCKS):
                found = map(index.by_key, keys[at : at + SCAN_STEP_BLOCKS])
                blocks = (block for block in found if block is not None)
                items += [_item(each) for each in blocks if not all(r.fine for r in each.records)]
                await asyncio.sleep(0)
            if len(keys) < wanted:
                break
            after = keys[-1]
        return items

    def trouble(self) -> str:
        """Return why a router should ask another node, "" if it should not."""
        recalling_s = self._write_behind.recall.recalling_s
        if recalling_s > RECALL_S_MAX:
            return (
                f"recovering: {self._write_behind.recall.unrecalled_runs} runs found on disk are "
                f"not indexed after {recalling_s:.0f} s"
            )
        since = self._puts.refuses_since
        if since is None or self._now() - since < REFUSES_S:
            return ""
        why = self._takes_no_writes()
        return f"no tier takes writes: {why}" if why else ""

    def _takes_no_writes(self) -> str:
        """Return what keeps puts from being stored, "" if nothing does now."""
        dirty, dirty_max = self._planner.dirty.nbytes, self._node.limits.write_behind_bytes_max
        if dirty > dirty_max:
            return f"{dirty} bytes wait for the file tier, limits.write_behind_max is {dirty_max}"
        held = self._leases.leased_bytes + self._planner.pins.nbytes
        capacity = self._node.arena.capacity_bytes
        if held > FULL_FRACTION * capacity:
            return f"leases and pins hold {held} of the {capacity} bytes of the arena"
        return ""

    def stats(self) -> dict[str, Any]:
        """Return what the node holds and owes, as plain numbers. Bytes, seconds, counts."""
        now = snapshot(
            planner=self._planner,
            leases=self._leases,
            arena=self._node.arena,
            write_behind=self._write_behind,
            limits=self._node.limits,
        )
        queues = {
            "promote": self._write_behind.reads.under_way,
            "write_behind": self._planner.dirty.count,
            "room": self._puts.waiting_for_room,
            "recall": self._write_behind.recall.unrecalled_runs,
        }
        fleet = {"fleet": self.fleet()} if self.fleet is not None else {}
        events = {"events": self.events()} if self.events is not None else {}
        objects = {"object": self._objects.stats()} if self._objects is not None else {}
        pool = {"pool": self._pool.stats()} if self._pool is not None else {}
        return {
            "uptime_s": self._now() - self._started,
            "queues": queues,
            **now,
            **objects,
            **pool,
            **fleet,
            **events,
        }


def _item(block: StoredBlock) -> ScanItem:
    base = [record for record in block.records if not record.fine]
    return ScanItem(
        key=block.key,
        namespace_id=block.namespace_id,
        block_index=block.block_index,
        nbytes=block.nbytes,
        resident=all(record.resident is not None for record in base),
        durable=all(record.frame is not None for record in base),
    )
