"""Calls of operators: look at a node, read and change its settings, record its traffic."""
# ruff: noqa: N802  the methods carry the names the .proto gives them

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from kvstore.decide.namespaces import NamespaceUse
from kvstore.metrics import Metrics
from kvstore.model.tenant import Role
from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.server.boundary import Context
from kvstore.server.identity import CALLER
from kvstore.server.look_calls import LookCalls
from kvstore.server.recorder import Lookup, Recorder
from kvstore.server.requests import Requests, namespace_id_of
from kvstore.server.tenant_admin import TenantAdmin
from kvstore.store.live_settings import LiveSettings
from kvstore.store.store import Store
from kvstore.transport.explain_messages import explanation_to_message, outcome_to_message
from kvstore.transport.messages import (
    parent_of,
)

SCAN_ITEMS_MAX = 10_000
SCAN_WAIT_S = 2.0  # for what a restart found to be indexed
OUTCOMES_MAX = 1000
NAMESPACES_NBYTES_MAX = 1 << 20  # in one answer, or one more


async def no_tenants() -> dict[str, Any]:
    """Return what is told of tenants where there are none."""
    return {}


class AdminCalls(LookCalls):
    """The part of the service that engines do not need. addresses: where the daemon is reached,
    and by whom, for `Stats`."""

    def __init__(
        self,
        store: Store,
        metrics: Metrics,
        *,
        version: str,
        instance: str,
        recorder: Recorder,
        config: LiveSettings,
        admin: TenantAdmin,
        addresses: Callable[[], dict[str, Any]],
        tenants: Callable[[], Awaitable[dict[str, Any]]] = no_tenants,
    ) -> None:
        """tenants: what an admin is told of all tenants."""
        super().__init__(store, config, admin, recorder.monitors)
        self._requests = Requests(store)
        self._metrics = metrics
        self._version = version
        self._instance = instance
        self._recorder = recorder
        self._addresses = addresses
        self._tenants = tenants

    async def Stats(self, request: pb.StatsRequest, context: Context) -> pb.StatsReply:
        return pb.StatsReply(json=json.dumps(await self.look() | self.counted()))

    async def look(self) -> dict[str, Any]:
        """Return what Stats says of now."""
        about = {"version": self._version, "instance": self._instance, "pid": os.getpid()}
        others = await self._tenants() if CALLER.get().role is Role.ADMIN else {}
        found = about | self._store.report.stats()
        return found | {"addresses": self._addresses()} | others

    def counted(self) -> dict[str, Any]:
        """Return what it has counted since the start. Any thread may call it."""
        return {"totals": self._metrics.totals()}

    async def Scan(self, request: pb.ScanRequest, context: Context) -> pb.ScanReply:
        limit = min(request.limit or SCAN_ITEMS_MAX, SCAN_ITEMS_MAX)
        only = namespace_id_of(request.namespace_id) if request.namespace_id else None
        await self._store.report.recalled(SCAN_WAIT_S)
        items = await self._store.report.scan(only, parent_of(request.after), limit)
        return pb.ScanReply(
            items=[
                pb.ScanItem(
                    key=item.key,
                    namespace_id=item.namespace_id,
                    block=item.block_index,
                    nbytes=item.nbytes,
                    resident=item.resident,
                    durable=item.durable,
                )
                for item in items
            ],
            next=items[-1].key if len(items) == limit else b"",
        )

    async def ListNamespaces(
        self, request: pb.ListNamespacesRequest, context: Context
    ) -> pb.ListNamespacesReply:
        after = request.after
        left = [use for use in self._store.namespaces.all() if use.namespace_id > after]
        items: list[pb.NamespaceItem] = []
        nbytes = 0
        while left and nbytes < NAMESPACES_NBYTES_MAX:
            items.append(_namespace_item(left[len(items)]))
            nbytes += items[-1].ByteSize()
            if len(items) == len(left):
                return pb.ListNamespacesReply(items=items)
        return pb.ListNamespacesReply(items=items, next=items[-1].namespace_id if items else b"")

    async def Outcomes(self, request: pb.OutcomesRequest, context: Context) -> pb.OutcomesReply:
        limit = min(request.limit or OUTCOMES_MAX, OUTCOMES_MAX)
        outcomes = self._store.report.outcomes(request.request_id, limit)
        return pb.OutcomesReply(outcomes=map(outcome_to_message, outcomes))

    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.ExplainReply:
        explanation = self._store.report.explain(
            self._requests.known(request.namespace_id), self._requests.keys(request.keys)
        )
        return explanation_to_message(explanation)

    async def Record(
        self, request: pb.RecordRequest, context: Context
    ) -> AsyncIterator[pb.RecordReply]:
        only = namespace_id_of(request.namespace_id) if request.namespace_id else None
        with self._recorder.listen(
            share=request.share, block=request.block, namespace_id=only
        ) as recording:
            yield pb.RecordReply()  # from now on
            async for batch in recording.batches():
                yield pb.RecordReply(lookups=map(_lookup, batch), dropped=recording.dropped)


def _lookup(lookup: Lookup) -> pb.Lookup:
    return pb.Lookup(
        at=lookup.at,
        session=lookup.engine,
        namespace_id=lookup.namespace_id,
        keys=lookup.keys,
        hit_blocks=lookup.hit_blocks,
        request_id=lookup.request_id,
        session_id=lookup.session_id,
        block_tokens=lookup.namespace.block_tokens,
        block_nbytes=lookup.block_nbytes,
    )


def _namespace_item(use: NamespaceUse) -> pb.NamespaceItem:
    return pb.NamespaceItem(
        namespace_id=use.namespace_id,
        spec_json=use.namespace.to_json() if use.namespace is not None else "",
        blocks=use.blocks,
        model=use.model,
        dram_bytes=use.dram_bytes,
        file_bytes=use.file_bytes,
        asked_blocks=use.asked_blocks,
        hit_blocks=use.hit_blocks,
        tier_hit_blocks=use.tier_hit_blocks,
    )
