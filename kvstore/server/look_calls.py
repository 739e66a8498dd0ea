"""Calls of those who watch a node: its history, what it stores, what is slow, what is asked."""
# ruff: noqa: N802  the methods carry the names the .proto gives them

from __future__ import annotations

import math
from collections.abc import AsyncIterator

from kvstore.decide.slow_log import KINDS, Slow
from kvstore.model.block import KEY_NBYTES
from kvstore.model.errors import InvalidRequest
from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.server.boundary import Context
from kvstore.server.config_calls import ConfigCalls
from kvstore.server.monitor import Filter, Monitors, Watched, ranges
from kvstore.server.requests import namespace_id_of, session_id_of
from kvstore.server.tenant_admin import TenantAdmin
from kvstore.store.live_settings import LiveSettings
from kvstore.store.samples import COLUMNS, STEPS_S
from kvstore.store.store import Store
from kvstore.store.tree import Found
from kvstore.transport.explain_messages import outcome_to_message
from kvstore.transport.messages import parent_of

CONVERSATIONS, CONVERSATIONS_MAX = 100, 1000
RUNS, RUNS_MAX, DEPTH_MAX = 200, 1000, 8


class LookCalls(ConfigCalls):
    """They change nothing, and cost engines next to nothing."""

    def __init__(
        self, store: Store, config: LiveSettings, admin: TenantAdmin, monitors: Monitors
    ) -> None:
        super().__init__(config, admin)
        self._store = store
        self._monitors = monitors

    async def History(self, request: pb.HistoryRequest, context: Context) -> pb.HistoryReply:
        if request.step_s not in STEPS_S:
            steps = ", ".join(map(str, STEPS_S))
            raise InvalidRequest(f"samples cover {steps} seconds: set step_s to one of these")
        if not math.isfinite(request.since):
            raise InvalidRequest(f"since={request.since} is not a time")
        await self._store.history.loaded()
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

    async def Slow(self, request: pb.SlowRequest, context: Context) -> pb.SlowReply:
        if request.kind not in ("", *KINDS):
            raise InvalidRequest(f"kind is one of {', '.join(KINDS)}")
        if not (math.isfinite(request.over_s) and request.over_s >= 0):
            raise InvalidRequest(f"over_s={request.over_s} is not a time")
        slow, now = self._store.slow, self._store.now()
        found = slow.find(request.kind, request.over_s)[: request.limit or None]
        reply = pb.SlowReply(items=[_slow_item(each, now) for each in found], kept_s=slow.kept_s)
        if request.reset:
            slow.reset()
        return reply

    async def Monitor(
        self, request: pb.MonitorRequest, context: Context
    ) -> AsyncIterator[pb.MonitorReply]:
        wanted = Filter(
            namespace_id_of(request.namespace_id) if request.namespace_id else None,
            request.request_id,
            request.tier,
            request.misses_only,
            request.kind,
        )
        with self._monitors.watch(wanted) as monitor:
            yield pb.MonitorReply()  # from now on
            async for batch in monitor.batches():
                yield pb.MonitorReply(answered=map(_answered, batch), dropped=monitor.dropped)


def _slow_item(slow: Slow, now: float) -> pb.SlowItem:
    return pb.SlowItem(
        kind=slow.kind,
        took_s=slow.took_s,
        age_s=now - slow.at,
        waits=slow.waits,
        request_id=slow.request_id,
        client=slow.client,
        session_id=slow.session_id,
        namespace_id=slow.namespace_id or b"",
        blocks=slow.blocks,
        nbytes=slow.nbytes,
        result=slow.result,
    )


def _answered(watched: Watched) -> pb.Answered:
    answer = watched.answer
    saved = answer.saved
    told = pb.Answered(
        at=watched.at,
        kind="acquire" if saved is None else "save",
        outcome=outcome_to_message(answer.outcome),
        block_tokens=answer.block_tokens,
        first_block=answer.first_block,
        nbytes=answer.nbytes,
    )
    if saved is not None:
        told.stored_records, told.existing_records = saved.committed, saved.existing
        told.refused_records = saved.refused
        return told
    for begin, end, tier in ranges(answer.outcome):
        told.ranges.add(begin=begin, end=end, tier=tier)
    return told


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
