"""Calls of those who watch a node: its history, what it stores, what is slow, what is asked."""
# ruff: noqa: N802  the methods carry the names the .proto gives them

from __future__ import annotations

import math

from kvstore.model.block import KEY_NBYTES
from kvstore.model.errors import InvalidRequest
from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.server.boundary import Context
from kvstore.server.config_calls import ConfigCalls
from kvstore.server.requests import namespace_id_of, session_id_of
from kvstore.server.tenant_admin import TenantAdmin
from kvstore.store.live_settings import LiveSettings
from kvstore.store.samples import COLUMNS, STEPS_S
from kvstore.store.store import Store
from kvstore.store.tree import Found
from kvstore.transport.messages import parent_of

CONVERSATIONS, CONVERSATIONS_MAX = 100, 1000
RUNS, RUNS_MAX, DEPTH_MAX = 200, 1000, 8


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

    async def Tree(self, request: pb.TreeRequest, context: Context) -> pb.TreeReply:
        if request.depth > DEPTH_MAX or request.limit > RUNS_MAX:
            raise InvalidRequest(f"an answer has at most {DEPTH_MAX} levels and {RUNS_MAX} runs")
        if request.prefix and request.through:
            raise InvalidRequest("set prefix or through, not both")
        only = namespace_id_of(request.namespace_id) if request.namespace_id else None
        found = await self._store.tree.look(
            namespace_id=only,
            prefix=parent_of(request.prefix),
            through=parent_of(request.through),
            depth=request.depth or 1,
            limit=request.limit or RUNS,
            after=request.cursor,
        )
        return tree_to_message(found, self._store.now())

    async def Conversations(
        self, request: pb.ConversationsRequest, context: Context
    ) -> pb.ConversationsReply:
        only = namespace_id_of(request.namespace_id) if request.namespace_id else None
        most = min(request.limit or CONVERSATIONS, CONVERSATIONS_MAX)
        start = session_id_of(request.session_id)
        found, known = self._store.hints.conversations(start, only, most)
        now = self._store.now()
        items = [
            pb.ConversationItem(
                session_id=name if not name.startswith("\0") else "",
                namespace_id=each.namespace_id,
                blocks=each.blocks,
                last_key=each.joined[-KEY_NBYTES:],
                age_s=now - each.seen_at,
                ended=each.ended,
                expected_in_s=max(0.0, each.expected_at - now),
                pinned_s=max(0.0, each.pinned_until - now),
                pin_bytes_max=each.pin_bytes if each.pinned_until > now else 0,
            )
            for name, each in found
        ]
        return pb.ConversationsReply(items=items, known=known)


def tree_to_message(found: Found, now: float) -> pb.TreeReply:
    """now: on the clock of the tree."""
    used: dict[int, int] = {}
    runs = [
        pb.PrefixRun(
            parent=0 if parent is None else parent + 1,
            first_key=run.first_key,
            last_key=run.last_key,
            namespace=used.setdefault(run.namespace, len(used)),
            begin=run.begin,
            end=run.end,
            children=run.children,
            dram_bytes=run.dram,
            file_bytes=run.file,
            blocks=run.blocks,
            all_dram_bytes=run.all_dram,
            all_file_bytes=run.all_file,
            hits=run.hits,
            used_age_s=max(0.0, now - run.at) if run.at >= 0 else None,
        )
        for run, parent in zip(found.runs, found.parents, strict=True)
    ]
    return pb.TreeReply(
        runs=runs,
        namespaces=[found.namespaces[each] for each in used],
        next=found.more,
        age_s=found.age_s,
        blocks=found.blocks,
        left_out_blocks=found.left_out,
    )
