"""The RPC methods: check what came in, ask the store, answer. No decisions here."""
# ruff: noqa: N802  the methods carry the names the .proto gives them

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from kvstore.decide.planner import SessionId
from kvstore.decide.planner.leases import DAEMON_SESSION
from kvstore.metrics import Metrics
from kvstore.model.block import (
    KEY_NBYTES,
    BlockKey,
    Grant,
    Namespace,
    NamespaceId,
)
from kvstore.model.errors import InvalidRequest, Unavailable
from kvstore.model.hint import EXPECT_S_MAX, Hint, HintKind
from kvstore.model.outcome import REQUEST_ID_CHARS_MAX
from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.server.admin_calls import AdminCalls, no_tenants
from kvstore.server.boundary import Context
from kvstore.server.recorder import Recorder
from kvstore.server.requests import (
    engines_of,
    namespace_id_of,
    origin_of,
    pace_of,
    seconds_of,
    session_id_of,
    tokens_of,
)
from kvstore.server.stream_bounds import check_deadline
from kvstore.server.streams import Streams
from kvstore.server.tenant_admin import TenantAdmin
from kvstore.store.live_settings import LiveSettings
from kvstore.store.store import Store
from kvstore.transport.arena_host import check_version
from kvstore.transport.hint_messages import report_to_message
from kvstore.transport.messages import (
    Epoch,
    committed_to_message,
    grant_to_message,
    holders_to_messages,
    parent_of,
    present_to_message,
    spans_of,
)

TOKEN_CHARS = range(16, 129)
CLIENT_CHARS_MAX = 256
HOLDERS_MAX = 16
READERS_MAX = 1 << 16
ANSWER_S_MIN = 0.02
LARGE_GRANT_SLOTS = 64
_HINT_KINDS = {
    "end_session": HintKind.END,
    "expect": HintKind.EXPECT,
    "prefetch": HintKind.PREFETCH,
    "pin": HintKind.PIN,
    "demote": HintKind.DEMOTE,
}


class Service(AdminCalls):
    """kvstore.rpc.v1.KVStore over one store: the calls of engines; `AdminCalls` has the others."""

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
        admin: TenantAdmin,
        addresses: Callable[[], dict[str, Any]],
        tenants: Callable[[], Awaitable[dict[str, Any]]] = no_tenants,
    ) -> None:
        super().__init__(
            store,
            metrics,
            version=version,
            instance=epoch.name,
            recorder=recorder,
            config=config,
            admin=admin,
            addresses=addresses,
            tenants=tenants,
        )
        self._epoch = epoch
        self._arena_socket = arena_socket
        self._call_socket = call_socket
        self.streams = Streams(store, metrics)

    async def OpenSession(
        self, request: pb.OpenSessionRequest, context: Context
    ) -> pb.OpenSessionReply:
        check_version(request.rpc_version)
        session = 0
        if request.token:
            if len(request.token) not in TOKEN_CHARS or len(request.client) > CLIENT_CHARS_MAX:
                raise InvalidRequest("a token has 16 to 128 characters, a client name up to 256")
            engines = engines_of(request.engines)
            session = self._store.sessions.open(request.token, request.client, engines)
        return pb.OpenSessionReply(
            session=session,
            instance=self._epoch.name,
            arena_socket=self._arena_socket,
            call_socket=self._call_socket,
            batch_keys_max=self._store.limits.batch_keys_max,
            server_version=self._version,
            node=self._store.node_id,
            announces=self._store.announcer is not None,
        )

    async def RegisterNamespace(
        self, request: pb.RegisterNamespaceRequest, context: Context
    ) -> pb.RegisterNamespaceReply:
        namespace = Namespace.from_json(request.spec_json, request.name)
        namespace_id = self._store.namespaces.register(namespace)
        return pb.RegisterNamespaceReply(namespace_id=namespace_id)

    async def Match(self, request: pb.MatchRequest, context: Context) -> pb.MatchReply:
        namespace_id = self._requests.known(request.namespace_id)
        keys = self._requests.keys(request.keys)
        match = self._store.gets.match(
            namespace_id,
            keys,
            request.skip_blocks,
            pace_of(request.recompute_s_per_block),
            refined=request.refined,
        )
        return pb.MatchReply(
            hit_blocks=match.hit_blocks,
            resident_blocks=match.resident_blocks,
            worth_blocks=match.worth_blocks,
            load_s=match.load_s,
            holders=holders_to_messages(self._store.holders(namespace_id, keys, HOLDERS_MAX))
            if request.fleet
            else (),
            present=present_to_message(
                self._store.gets.present(
                    namespace_id, keys, spans_of(request.spans), refined=request.refined
                )
            )
            if request.each
            else b"",
        )

    async def Acquire(
        self, request: pb.AcquireRequest, context: Context, *, is_guest: bool = False
    ) -> pb.GrantReply:
        """is_guest: it is of another tenant, of which only what it finds here may be recorded."""
        if request.readers > READERS_MAX:
            raise InvalidRequest(f"{request.readers} readers; the limit is {READERS_MAX}")
        if len(request.request_id) > REQUEST_ID_CHARS_MAX:
            raise InvalidRequest(f"a request id has at most {REQUEST_ID_CHARS_MAX} characters")
        if request.each and not request.spans:
            raise InvalidRequest("`each` is said of the records of spans, and there are none")
        session, keys = SessionId(request.session), self._requests.keys(request.keys)
        self._check_tokens(request, keys)
        grant = await self._store.gets.acquire(
            session,
            self._requests.known(request.namespace_id),
            keys,
            skip_blocks=request.skip_blocks,
            readers=request.readers or 1,
            wait_s=self._requests.wait_s(request.wait_s),
            spans=spans_of(request.spans) or None,
            request_id=request.request_id,
            recompute_s_per_block=pace_of(request.recompute_s_per_block),
            session_id=session_id_of(request.session_id),
            in_files=request.file_places,
            refined=request.refined,
            origin=origin_of(request),
            early=request.early,
            each=request.each,
            is_guest=is_guest,
        )
        if request.tokens:
            self._announce(session, request, request.keys[: grant.hit_blocks * KEY_NBYTES])
        if self._recorder.listening:
            self._note(request, grant, grant.hit_blocks if is_guest else None)
        return await self._granted(grant, session, context)

    async def Await(self, request: pb.AwaitRequest, context: Context) -> pb.AwaitReply:
        ready = await self._store.gets.ready(
            SessionId(request.session), request.lease, request.blocks
        )
        return pb.AwaitReply(ready_blocks=ready.blocks, over=ready.over, given_up=ready.given_up)

    async def Reserve(self, request: pb.ReserveRequest, context: Context) -> pb.GrantReply:
        session, keys = SessionId(request.session), self._requests.keys(request.keys)
        self._check_tokens(request, keys)
        grant = await self._store.puts.reserve(
            session,
            self._requests.known(request.namespace_id),
            keys,
            first_block=request.first_block,
            parent=parent_of(request.parent),
            spans=spans_of(request.spans),
            wait_s=self._requests.wait_s(request.wait_s),
            session_id=session_id_of(request.session_id),
            sizes=request.nbytes,
            refined=request.refined,
        )
        if request.tokens:
            parent = parent_of(request.parent)
            self._announce(
                session,
                request,
                request.keys,
                parent=parent,
                grant=grant,
            )
        return await self._granted(grant, session, context)

    def _check_tokens(
        self,
        request: pb.AcquireRequest | pb.ReserveRequest | pb.PutHeader,
        keys: Sequence[BlockKey],
    ) -> None:
        """Raise InvalidRequest for tokens that are not those of whole blocks."""
        if request.tokens:
            block_tokens = self._requests.namespace(request.namespace_id).block_tokens
            tokens_of(request, keys, block_tokens)

    def _announce(
        self,
        session: SessionId,
        request: pb.AcquireRequest | pb.ReserveRequest | pb.PutHeader,
        keys: bytes,
        *,
        parent: BlockKey | None = None,
        grant: Grant | None = None,
    ) -> None:
        """Tell whoever announces blocks which tokens these are of. grant: of new ones, which are
        not stored yet."""
        announcer = self._store.announcer
        if announcer is None or not keys:
            return
        announcer.tokens(
            session,
            NamespaceId(request.namespace_id),
            keys,
            parent=parent,
            tokens=request.tokens,
            lora_name=request.lora_name,
            stored=grant is None
            or not all(grant.slots)
            or len(grant.slots) * KEY_NBYTES < len(keys),
        )

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
        async with self.streams.putting(request_iterator) as messages:
            first = await anext(messages, None)
            if first is None or first.WhichOneof("message") != "header":
                raise InvalidRequest("a Put starts with its header")
            header = first.header
            namespace_id = self._requests.known(header.namespace_id)
            keys = self._requests.keys(header.keys)
            self._check_tokens(header, keys)
            with self._store.in_use(namespace_id):
                done = await self.streams.put(
                    header,
                    messages,
                    namespace=self._store.namespaces.get(namespace_id),
                    keys=keys,
                    wait_s=self._requests.wait_s(header.wait_s),
                )
            if header.tokens:
                parent = parent_of(header.parent)
                self._announce(
                    DAEMON_SESSION,
                    header,
                    header.keys,
                    parent=parent,
                )
            return committed_to_message(done)

    async def Get(
        self, request: pb.GetRequest, context: Context, *, streams: Streams | None = None
    ) -> AsyncIterator[pb.GetReply]:
        """streams: those of another tenant that reads here; None: it is this one's own."""
        check_deadline(context.time_remaining())
        namespace_id = self._requests.known(request.namespace_id)
        with self._store.in_use(namespace_id):
            async for reply in (streams or self.streams).get(
                request,
                namespace=self._store.namespaces.get(namespace_id),
                keys=self._requests.keys(request.keys),
                wait_s=self._requests.wait_s(request.wait_s),
            ):
                yield reply

    async def Delete(self, request: pb.DeleteRequest, context: Context) -> pb.DeleteReply:
        namespace_id, keys = (
            namespace_id_of(request.namespace_id),
            self._requests.keys(request.keys),
        )
        deletes = self._store.deletes
        delete = deletes.delete if request.this_daemon_only else deletes.delete_everywhere
        if request.corrupt:
            delete = deletes.drop_wrong
        return pb.DeleteReply(deleted=await delete(namespace_id, keys))

    async def Clear(self, request: pb.ClearRequest, context: Context) -> pb.DeleteReply:
        only = namespace_id_of(request.namespace_id) if request.namespace_id else None
        deletes = self._store.deletes
        clear = deletes.clear if request.this_daemon_only else deletes.clear_everywhere
        return pb.DeleteReply(deleted=await clear(only))

    async def Flush(self, request: pb.FlushRequest, context: Context) -> pb.FlushReply:
        return pb.FlushReply(
            durable=await self._store.puts.flush(self._requests.wait_s(request.wait_s))
        )

    def _note(self, request: pb.AcquireRequest, grant: Grant, blocks: int | None) -> None:
        """Tell who records of the first blocks of a prefix that was asked for, None for all. Parts
        of it are nobody's request."""
        if request.keys and not request.spans:
            self._recorder.note(
                engine=self._store.sessions.number(SessionId(request.session)),
                namespace_id=request.namespace_id,
                namespace=self._store.namespaces.get(namespace_id_of(request.namespace_id)),
                keys=request.keys[: blocks * KEY_NBYTES] if blocks is not None else request.keys,
                hit_blocks=grant.hit_blocks,
                request_id=request.request_id,
                session_id=request.session_id,
            )

    async def Hint(self, request: pb.HintRequest, context: Context) -> pb.HintReply:
        kind = request.WhichOneof("hint")
        if kind is None:
            raise InvalidRequest("a hint of a kind that this daemon does not know, or of none")
        session_id = session_id_of(request.session_id)
        namespace_id = self._requests.known(request.namespace_id) if request.namespace_id else None
        keys = self._requests.keys(request.keys)
        if not session_id and not (namespace_id and keys):
            raise InvalidRequest("a hint names a session_id, or a namespace and keys")
        if keys and namespace_id is None:
            raise InvalidRequest("keys of a hint need their namespace")
        hint = Hint(
            kind=_HINT_KINDS[kind],
            session_id=session_id,
            namespace_id=namespace_id,
            keys=keys,
            seconds=seconds_of("in_s", request.expect.in_s, EXPECT_S_MAX)
            or seconds_of("ttl_s", request.pin.ttl_s),
            bytes_max=request.pin.bytes_max,
            wait_s=self._requests.wait_s(request.wait_s),
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
