"""Calls of those who watch a node: its history, what it stores, what is slow, what is asked."""
# ruff: noqa: N802  the methods carry the names the .proto gives them

from __future__ import annotations

import math

from kvstore.model.errors import InvalidRequest
from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.server.boundary import Context
from kvstore.server.config_calls import ConfigCalls
from kvstore.server.tenant_admin import TenantAdmin
from kvstore.store.live_settings import LiveSettings
from kvstore.store.samples import COLUMNS, STEPS_S
from kvstore.store.store import Store


class LookCalls(ConfigCalls):
    """They change nothing, and cost engines next to nothing."""

    def __init__(self, store: Store, config: LiveSettings, admin: TenantAdmin) -> None:
        super().__init__(config, admin)
        self._store = store

    async def History(self, request: pb.HistoryRequest, context: Context) -> pb.HistoryReply:
        if request.step_s not in STEPS_S:
            steps = ", ".join(map(str, STEPS_S))
            raise InvalidRequest(f"samples cover {steps} seconds: set step_s to one of these")
        if not math.isfinite(request.since):
            raise InvalidRequest(f"since={request.since} is not a time")
        found = self._store.history.samples.since(request.step_s, request.since)
        return pb.HistoryReply(
            columns=COLUMNS,
            samples=[pb.Sample(at=s.at, seconds=s.seconds, values=s.values) for s in found],
        )
