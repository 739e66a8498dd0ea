"""The RPC methods: check what came in, ask the store, answer. No decisions here."""
# ruff: noqa: N802  the methods carry the names the .proto gives them

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from kvstore.decide.namespaces import NamespaceUse
from kvstore.decide.planner import SessionId
from kvstore.metrics import Metrics
from kvstore.model.block import (
    KEY_NBYTES,
    BlockKey,
    Grant,
    Namespace,
    NamespaceId,
    split_keys,
)
from kvstore.model.errors import InvalidRequest, Unauthorized, Unavailable
from kvstore.model.hint import EXPECT_S_MAX, SESSION_ID_CHARS_MAX, Hint, HintKind
from kvstore.model.outcome import REQUEST_ID_CHARS_MAX
from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.rpc.v1 import kvstore_pb2_grpc as rpc
from kvstore.server.boundary import Context
from kvstore.server.recorder import Lookup, Recorder
from kvstore.server.stream_bounds import check_deadline
from kvstore.server.streams import Streams
from kvstore.store.live_settings import LiveSettings
from kvstore.store.store import Store
from kvstore.system.logs import LAST_LINES, LINES_MAX
from kvstore.transport.arena_host import check_version
from kvstore.transport.explain_messages import explanation_to_message, outcome_to_message
from kvstore.transport.hint_messages import report_to_message
from kvstore.transport.messages import (
    Epoch,
    committed_to_message,
    grant_to_message,
    parent_of,
    spans_of,
)

TOKEN_CHARS = range(16, 129)
CLIENT_CHARS_MAX = 256
SCAN_ITEMS_MAX = 10_000
SCAN_WAIT_S = 2.0  # for what a restart found to be indexed
OUTCOMES_MAX = 1000
NAMESPACES_NBYTES_MAX = 1 << 20  # in one answer, or one more
READERS_MAX = 1 << 16
ASSIGNMENTS_MAX = 256
ANSWER_S_MIN = 0.02
LARGE_GRANT_SLOTS = 64
_HINT_KINDS = {
    "end_session": HintKind.END,
    "expect": HintKind.EXPECT,
    "prefetch": HintKind.PREFETCH,
    "pin": HintKind.PIN,
    "demote": HintKind.DEMOTE,
}


class Service(rpc.KVStoreServicer):
    """kvstore.rpc.v1.KVStore over one store."""

    def __init__(
        self,
        store: Store,
        epoch: Epoch,
        metrics: Metrics,
        *,
        arena_socket: str,
        call_socket: str,
        version: str,
        recorder: Recorder,
        config: LiveSettings,
        addresses: Callable[[], dict[str, Any]],
    ) -> None:
        """addresses: tells where the daemon is reached, and by whom, for `Stats`."""
        self._store = store
        self._epoch = epoch
        self._metrics = metrics
        self._arena_socket = arena_socket
        self._call_socket = call_socket
        self._version = version
        self._streams = Streams(store, metrics)
        self._recorder = recorder
        self._config = config
        self._addresses = addresses

    async def OpenSession(
        self, request: pb.OpenSessionRequest, context: Context
    ) -> pb.OpenSessionReply:
        check_version(request.rpc_version)
        session = 0
        if request.token:
            if len(request.token) not in TOKEN_CHARS or len(request.client) > CLIENT_CHARS_MAX:
                raise InvalidRequest("a token has 16 to 128 characters, a client name up to 256")
            session = self._store.sessions.open(request.token, request.client)
        return pb.OpenSessionReply(
            session=session,
            instance=self._epoch.name,
            arena_socket=self._arena_socket,
            call_socket=self._call_socket,
            batch_keys_max=self._store.limits.batch_keys_max,
            server_version=self._version,
        )

    async def RegisterNamespace(
        self, request: pb.RegisterNamespaceRequest, context: Context
    ) -> pb.RegisterNamespaceReply:
        namespace = Namespace.from_json(request.spec_json, request.name)
        namespace_id = self._store.namespaces.register(namespace)
        return pb.RegisterNamespaceReply(namespace_id=namespace_id)

    async def Match(self, request: pb.MatchRequest, context: Context) -> pb.MatchReply:
        match = self._store.gets.match(
            self._known(request.namespace_id),
            self._keys(request.keys),
            request.skip_blocks,
            _pace(request.recompute_s_per_block),
        )
        return pb.MatchReply(
            hit_blocks=match.hit_blocks,
            resident_blocks=match.resident_blocks,
            worth_blocks=match.worth_blocks,
            load_s=match.load_s,
        )

    async def Acquire(self, request: pb.AcquireRequest, context: Context) -> pb.GrantReply:
        if request.readers > READERS_MAX:
            raise InvalidRequest(f"{request.readers} readers; the limit is {READERS_MAX}")
        if len(request.request_id) > REQUEST_ID_CHARS_MAX:
            raise InvalidRequest(f"a request id has at most {REQUEST_ID_CHARS_MAX} characters")
        session = SessionId(request.session)
        grant = await self._store.gets.acquire(
            session,
            self._known(request.namespace_id),
            self._keys(request.keys),
            skip_blocks=request.skip_blocks,
            readers=request.readers or 1,
            wait_s=self._wait(request.wait_s),
            spans=spans_of(request.spans) or None,
            request_id=request.request_id,
            recompute_s_per_block=_pace(request.recompute_s_per_block),
            session_id=_session_id(request.session_id),
            in_files=request.file_places,
        )
        if self._recorder.listening:
            self._note(request, grant)
        return await self._granted(grant, session, context)

    async def Reserve(self, request: pb.ReserveRequest, context: Context) -> pb.GrantReply:
        session = SessionId(request.session)
        grant = await self._store.puts.reserve(
            session,
            self._known(request.namespace_id),
            self._keys(request.keys),
            first_block=request.first_block,
            parent=parent_of(request.parent),
            spans=spans_of(request.spans),
            wait_s=self._wait(request.wait_s),
            session_id=_session_id(request.session_id),
        )
        return await self._granted(grant, session, context)

    async def Commit(self, request: pb.CommitRequest, context: Context) -> pb.CommitReply:
        done = await self._store.puts.commit(
            SessionId(request.session),
            request.lease,
            list(request.checksums),
            durable=request.durable,
        )
        return committed_to_message(done)

    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseReply:
        if len(request.leases) > self._store.limits.batch_keys_max:
            raise InvalidRequest(f"{len(request.leases)} leases in one call: split it")
        held = self._store.release(
            SessionId(request.session),
            list(request.leases),
        )
        return pb.ReleaseReply(held=held)

    async def Put(
        self, request_iterator: AsyncIterator[pb.PutRequest], context: Context
    ) -> pb.CommitReply:
        async with self._streams.putting(request_iterator) as messages:
            first = await anext(messages, None)
            if first is None or first.WhichOneof("message") != "header":
                raise InvalidRequest("a Put starts with its header")
            header = first.header
            namespace_id = self._known(header.namespace_id)
            with self._store.in_use(namespace_id):
                done = await self._streams.put(
                    header,
                    messages,
                    namespace=self._store.namespaces.get(namespace_id),
                    keys=self._keys(header.keys),
                    wait_s=self._wait(header.wait_s),
                )
            return committed_to_message(done)

    async def Get(self, request: pb.GetRequest, context: Context) -> AsyncIterator[pb.GetReply]:
        check_deadline(context.time_remaining())
        namespace_id = self._known(request.namespace_id)
        with self._store.in_use(namespace_id):
            async for reply in self._streams.get(
                request,
                namespace=self._store.namespaces.get(namespace_id),
                keys=self._keys(request.keys),
                wait_s=self._wait(request.wait_s),
            ):
                yield reply

    async def Delete(self, request: pb.DeleteRequest, context: Context) -> pb.DeleteReply:
        namespace_id, keys = _namespace_id(request.namespace_id), self._keys(request.keys)
        delete = self._store.deletes.drop_wrong if request.corrupt else self._store.deletes.delete
        return pb.DeleteReply(deleted=await delete(namespace_id, keys))

    async def Clear(self, request: pb.ClearRequest, context: Context) -> pb.DeleteReply:
        only = _namespace_id(request.namespace_id) if request.namespace_id else None
        return pb.DeleteReply(deleted=await self._store.deletes.clear(only))

    async def Flush(self, request: pb.FlushRequest, context: Context) -> pb.FlushReply:
        return pb.FlushReply(durable=await self._store.puts.flush(self._wait(request.wait_s)))

    async def Stats(self, request: pb.StatsRequest, context: Context) -> pb.StatsReply:
        about = {"version": self._version, "instance": self._epoch.name, "pid": os.getpid()}
        more = {"totals": self._metrics.totals(), "addresses": self._addresses()}
        return pb.StatsReply(json=json.dumps(about | self._store.report.stats() | more))

    async def Scan(self, request: pb.ScanRequest, context: Context) -> pb.ScanReply:
        limit = min(request.limit or SCAN_ITEMS_MAX, SCAN_ITEMS_MAX)
        only = _namespace_id(request.namespace_id) if request.namespace_id else None
        await self._store.report.recalled(SCAN_WAIT_S)
        items = self._store.report.scan(only, parent_of(request.after), limit)
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
            self._known(request.namespace_id), self._keys(request.keys)
        )
        return explanation_to_message(explanation)

    async def GetConfig(self, request: pb.GetConfigRequest, context: Context) -> pb.GetConfigReply:
        _check_local(context)
        return pb.GetConfigReply(
            settings=[pb.Setting(**entry._asdict()) for entry in self._config.entries()],
            path=str(self._config.path or ""),
        )

    async def SetConfig(self, request: pb.SetConfigRequest, context: Context) -> pb.SetConfigReply:
        _check_local(context)
        if len(request.assignments) > ASSIGNMENTS_MAX:
            raise InvalidRequest(f"{len(request.assignments)} settings in one call")
        wait_s = _seconds("wait_s", request.wait_s)
        done = await self._config.change(list(request.assignments), wait_s)
        return pb.SetConfigReply(
            changed=[pb.ChangedSetting(**each._asdict()) for each in done.changed],
            pending=done.pending,
        )

    async def LogLines(self, request: pb.LogLinesRequest, context: Context) -> pb.LogLinesReply:
        _check_local(context)
        return pb.LogLinesReply(lines=LAST_LINES.lines(request.limit or LINES_MAX))

    async def Record(
        self, request: pb.RecordRequest, context: Context
    ) -> AsyncIterator[pb.RecordReply]:
        only = _namespace_id(request.namespace_id) if request.namespace_id else None
        with self._recorder.listen(
            share=request.share, block=request.block, namespace_id=only
        ) as recording:
            yield pb.RecordReply()  # from now on
            async for batch in recording.batches():
                yield pb.RecordReply(lookups=map(self._lookup, batch), dropped=recording.dropped)

    def _lookup(self, lookup: Lookup) -> pb.Lookup:
        return pb.Lookup(
            at=lookup.at,
            session=lookup.engine,
            namespace_id=lookup.namespace_id,
            keys=lookup.keys,
            hit_blocks=lookup.hit_blocks,
            request_id=lookup.request_id,
            session_id=lookup.session_id,
            block_tokens=lookup.namespace.block_tokens,
            block_nbytes=sum(each.record_nbytes * each.shards for each in lookup.namespace.groups),
        )

    def _note(self, request: pb.AcquireRequest, grant: Grant) -> None:
        """Tell who records of a prefix that was asked for. Parts of it are nobody's request."""
        if request.keys and not request.spans:
            self._recorder.note(
                engine=self._store.sessions.number(SessionId(request.session)),
                namespace_id=request.namespace_id,
                namespace=self._store.namespaces.get(_namespace_id(request.namespace_id)),
                keys=request.keys,
                hit_blocks=grant.hit_blocks,
                request_id=request.request_id,
                session_id=request.session_id,
            )

    async def Hint(self, request: pb.HintRequest, context: Context) -> pb.HintReply:
        kind = request.WhichOneof("hint")
        if kind is None:
            raise InvalidRequest("a hint of a kind that this daemon does not know, or of none")
        session_id = _session_id(request.session_id)
        namespace_id = self._known(request.namespace_id) if request.namespace_id else None
        keys = self._keys(request.keys)
        if not session_id and not (namespace_id and keys):
            raise InvalidRequest("a hint names a session_id, or a namespace and keys")
        if keys and namespace_id is None:
            raise InvalidRequest("keys of a hint need their namespace")
        hint = Hint(
            kind=_HINT_KINDS[kind],
            session_id=session_id,
            namespace_id=namespace_id,
            keys=keys,
            seconds=_seconds("in_s", request.expect.in_s, EXPECT_S_MAX)
            or _seconds("ttl_s", request.pin.ttl_s),
            bytes_max=request.pin.bytes_max,
            wait_s=self._wait(request.wait_s),
        )
        return report_to_message(await self._store.hints.carry_out(hint))

    async def _granted(self, grant: Grant, session: SessionId, context: Context) -> pb.GrantReply:
        """Answer with a grant, unless its client will not get it: it could never release it."""

        def take_back(done: Context | None = None) -> None:
            if done is None or not done.done():
                self._store.release(session, [grant.lease_id])

        left_s = context.time_remaining()
        if left_s is not None and left_s < ANSWER_S_MIN:
            take_back()
            raise Unavailable("the call's deadline came before its answer", reason="late")
        # The stubs declare the callback's type as a class, which no function can be.
        context.add_done_callback(take_back)  # type: ignore[arg-type]
        if len(grant.slots) >= LARGE_GRANT_SLOTS:  # it takes a while to tell: others' turn first
            await asyncio.sleep(0)
        return grant_to_message(grant, self._epoch)

    def _known(self, namespace_id: bytes) -> NamespaceId:
        known = _namespace_id(namespace_id)
        self._store.namespaces.get(known)
        return known

    def _keys(self, keys: bytes) -> Sequence[BlockKey]:
        return split_keys(keys, keys_max=self._store.limits.batch_keys_max)

    def _wait(self, wait_s: float) -> float:
        if not (math.isfinite(wait_s) and wait_s >= 0):
            raise InvalidRequest(f"wait_s={wait_s} is not a time to wait")
        return min(wait_s, self._store.limits.wait_max_s)


def _check_local(context: Context) -> None:
    """Raise Unauthorized unless the call came over the unix socket, which has one user."""
    if not context.peer().startswith("unix:"):
        raise Unauthorized("this is answered over the daemon's unix socket only")


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
    )


def _pace(seconds: float) -> float:
    return _seconds("recompute_s_per_block", seconds)


def _seconds(name: str, seconds: float, most: float = math.inf) -> float:
    if not (math.isfinite(seconds) and 0 <= seconds <= most):
        raise InvalidRequest(f"{name}={seconds} is not a time, or too long")
    return seconds


def _session_id(session_id: str) -> str:
    if len(session_id) > SESSION_ID_CHARS_MAX:
        raise InvalidRequest(f"a session id has at most {SESSION_ID_CHARS_MAX} characters")
    return session_id


def _namespace_id(value: bytes) -> NamespaceId:
    if len(value) != KEY_NBYTES:
        raise InvalidRequest(f"a namespace id has {KEY_NBYTES} bytes, not {len(value)}")
    return NamespaceId(value)
