"""A client's session with the daemon: namespaces, and leases of the arena."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Any

from kvstore.client.caller import DURABLE_WAIT_S, Caller
from kvstore.model.block import (
    BlockKey,
    Committed,
    Grant,
    Match,
    Namespace,
    NamespaceId,
    Slot,
    Span,
    check_keys,
)
from kvstore.model.errors import Incompatible, InvalidRequest, SessionEnded, Unavailable
from kvstore.model.member import Origin
from kvstore.model.outcome import REQUEST_ID_CHARS_MAX, Ready
from kvstore.model.tokens import BlockTokens, check_tokens
from kvstore.rpc.status import is_without_effect
from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.transport.messages import (
    committed_of,
    grant_of,
    holders_of,
    origin_to_message,
    present_of,
    spans_to_messages,
)

if TYPE_CHECKING:
    from kvstore.rpc.v1.kvstore_pb2_grpc import KVStoreAsyncStub


class Session:
    """The calls that say where records are, and lease their slots; they copy no bytes."""

    def __init__(self, caller: Caller) -> None:
        self.target = caller.target
        self._caller = caller

    # ---- link --------------------------------------------------------------------------------

    @property
    def available(self) -> bool:
        """False while calls raise Unavailable without being tried."""
        return self._caller.available

    @property
    def breaker_trips(self) -> int:
        """How often the client stopped asking the daemon until it answered again."""
        return self._caller.breaker_trips

    @property
    def local(self) -> bool:
        """Whether the arena is mapped."""
        return self._caller.arena is not None

    @property
    def node(self) -> str:
        """The id of the daemon in its fleet, "" without one."""
        return self._caller.daemon.node

    @property
    def announces(self) -> bool:
        """Whether the daemon wants the tokens of blocks, to tell routers of them."""
        return self._caller.daemon.announces

    @property
    def instance(self) -> str:
        """Identity of the running daemon: it changes at a restart, "" when not connected."""
        return self._caller.daemon.instance

    async def connect(self) -> None:
        """Connect now; calls connect on demand. Raises Unavailable, Unauthorized, Incompatible."""
        await self._caller.connected()

    async def doubt(self) -> None:
        """Report that an answer is overdue by the caller's own deadline, before the call's.

        The client refuses calls until the daemon has answered a ping.
        """
        self._caller.doubt()

    # ---- namespaces --------------------------------------------------------------------------

    async def register(self, namespace: Namespace, *, now: bool = True) -> NamespaceId:
        """Register a namespace with the daemon.

        The client remembers it. When a call names it to a daemon that does not know it, the client
        registers it and repeats the call. now: False: not before that. A daemon that has blocks of
        it knows it, after a restart as well.
        """
        namespace_id = namespace.id
        if not now:
            if self._caller.namespaces.get(namespace_id) is None:
                self._caller.namespaces.add(namespace_id, namespace)
            return namespace_id
        request = pb.RegisterNamespaceRequest(spec_json=namespace.to_json(), name=namespace.name)
        await self._caller.call(lambda stub, _, t: stub.RegisterNamespace(request, timeout=t))
        self._caller.namespaces.add(namespace_id, namespace)
        return namespace_id

    def namespace(self, namespace_id: NamespaceId) -> Namespace:
        """Return a namespace that this client remembers. Raises InvalidRequest."""
        namespace = self._caller.namespaces.get(namespace_id)
        if namespace is None:
            raise InvalidRequest(
                f"unknown namespace {bytes(namespace_id)[:4].hex()}: register it first"
            )
        return namespace

    # ---- blocks ------------------------------------------------------------------------------

    async def match(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        *,
        skip_blocks: int = 0,
        recompute_s_per_block: float = 0.0,
        refined: bool = False,
        fleet: bool = False,
        each: bool = False,
        spans: Sequence[Span] = (),
        timeout_s: float | None = None,
    ) -> Match:
        """Return how long the prefix would hit now, and how much is worth loading.

        Leases nothing. refined: as for `acquire`. fleet: say which other hosts seem to have some.
        each: say of each block whether it is stored, whatever is missing before it; with `spans`,
        say it of each record of these instead. With `refined` as well, a base that lacks its fine
        part is not stored.
        """
        request = pb.MatchRequest(
            namespace_id=namespace_id,
            keys=self._caller.joined(keys),
            skip_blocks=skip_blocks,
            recompute_s_per_block=recompute_s_per_block,
            refined=refined,
            fleet=fleet,
            each=each,
            spans=spans_to_messages(spans),
        )
        reply = await self._caller.call(
            lambda stub, _, t: stub.Match(request, timeout=t),
            timeout_s=timeout_s,
            namespace_id=namespace_id,
        )
        worth = reply.worth_blocks if reply.HasField("worth_blocks") else None
        hits, holders = (reply.hit_blocks, reply.resident_blocks), holders_of(reply.holders)
        count = sum(end - begin for _, begin, end in spans) if spans else len(keys)
        present = present_of(reply.present, count) if each else ()
        return Match(*hits, worth, reply.load_s, holders, present)

    async def acquire(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        *,
        skip_blocks: int = 0,
        readers: int = 1,
        wait_s: float = 0.0,
        spans: Sequence[Span] | None = None,
        request_id: str = "",
        recompute_s_per_block: float = 0.0,
        session_id: str = "",
        file_places: bool = False,
        refined: bool = False,
        origin: Origin | None = None,
        early: bool = False,
        each: bool = False,
        tokens: BlockTokens | None = None,
    ) -> Grant:
        """Lease the longest stored prefix, or exactly the parts that `spans` names.

        Read through `view`, verify with `checksum`, then `release`. What was read is valid only if
        the release answers True. `readers` releases end the lease. recompute_s_per_block: time to
        compute a block; no longer load is waited for. 0: what others told lately. request_id: see
        `kvstore explain` for its outcome. session_id: its conversation; hints may name it later.
        file_places: the caller reads the daemon's files itself. A record that only the file tier
        has, stored as it was put, then has a place instead of a slot (`Grant.places`), valid until
        the lease ends; a daemon that leases no more places promotes it. refined: a block of a lossy
        namespace without its fine part is a miss. Else fine parts come along as far as they are
        there in time. origin: the daemon of the fleet that has it, or is about to: it is asked
        first. early: the last slots may still be read into (`Grant.ready_blocks`): wait for them by
        `ready`. each: say of each record of `spans` whether it is stored (`Grant.present`).
        """
        self._caller.check_may_lease()
        namespace, joined = self.namespace(namespace_id), self._caller.joined(keys)
        messages, told = spans_to_messages(spans or ()), self._told(tokens, namespace, len(keys))

        def call(stub: KVStoreAsyncStub, session: int, t: float) -> Awaitable[pb.GrantReply]:
            request = pb.AcquireRequest(
                session=session,
                namespace_id=namespace_id,
                keys=joined,
                skip_blocks=skip_blocks,
                readers=readers,
                wait_s=wait_s,
                spans=messages,
                request_id=request_id[:REQUEST_ID_CHARS_MAX],
                recompute_s_per_block=recompute_s_per_block,
                session_id=session_id,
                file_places=file_places,
                refined=refined,
                origin=origin_to_message(origin),
                early=early,
                each=each,
                **told,
            )
            return stub.Acquire(request, timeout=t)

        reply = await self._caller.call(call, wait_s=wait_s, repeat=True, namespace_id=namespace_id)
        return grant_of(reply, namespace, reading=True)

    async def ready(self, lease_id: int, blocks: int, *, wait_s: float = 0.0) -> Ready:
        """Wait until the slots of the first `blocks` blocks of a lease are filled, or will not be.

        Answers after 5 s + `wait_s` at most, else raises Unavailable.
        """

        def call(
            stub: KVStoreAsyncStub, session: int, timeout_s: float
        ) -> Awaitable[pb.AwaitReply]:
            request = pb.AwaitRequest(session=session, lease=lease_id, blocks=blocks)
            return stub.Await(request, timeout=timeout_s)

        reply = await self._caller.call(call, wait_s=wait_s)
        return Ready(reply.ready_blocks, reply.over, reply.given_up)

    async def release(self, *lease_ids: int) -> list[bool]:
        """End leases, or abandon reservations. True: the lease was valid until now.

        If it raises Unavailable, do not repeat it: one that was not sent is sent as soon as the
        daemon answers again.
        """

        def call(
            stub: KVStoreAsyncStub, session: int, timeout_s: float
        ) -> Awaitable[pb.ReleaseReply]:
            request = pb.ReleaseRequest(session=session, leases=lease_ids)
            return stub.Release(request, timeout=timeout_s)

        self._caller.releasing(lease_ids)
        try:
            held = list((await self._caller.call(call)).held)
        except SessionEnded:
            return [False] * len(lease_ids)
        except Unavailable as error:
            if is_without_effect(error):
                self._caller.release_later(lease_ids)
            raise
        if len(held) != len(lease_ids):
            raise Incompatible(f"the daemon answered {len(held)} of {len(lease_ids)} releases")
        return held

    async def reserve(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        *,
        first_block: int,
        parent: BlockKey | None,
        spans: Sequence[Span],
        wait_s: float = 0.0,
        session_id: str = "",
        sizes: Sequence[int] = (),
        refined: bool = False,
        tokens: BlockTokens | None = None,
    ) -> Grant:
        """Lease slots for the records of `spans` that are not stored yet; then `commit`.

        session_id: the conversation they belong to; hints may name it later. sizes: bytes of each
        record, over the spans in order, where the namespace's records vary. A fine part has a slot
        only where its base has one: planes of two encodings never mix. refined: a base that lacks
        its fine part is not stored, and both are replaced together. tokens: of the keys, from the
        first on; sent to a daemon that announces blocks to routers, and to no other.
        """
        self._caller.check_may_lease()
        namespace, joined = self.namespace(namespace_id), self._caller.joined(keys)
        check_keys([parent] if parent else [])
        if sizes:
            namespace.check_sizes(spans, sizes)
        messages = spans_to_messages(spans)
        told = self._told(tokens, namespace, len(keys))

        def call(
            stub: KVStoreAsyncStub, session: int, timeout_s: float
        ) -> Awaitable[pb.GrantReply]:
            request = pb.ReserveRequest(
                session=session,
                namespace_id=namespace_id,
                keys=joined,
                first_block=first_block,
                parent=parent or b"",
                spans=messages,
                wait_s=wait_s,
                session_id=session_id,
                nbytes=sizes,
                refined=refined,
                **told,
            )
            return stub.Reserve(request, timeout=timeout_s)

        reply = await self._caller.call(call, wait_s=wait_s, repeat=True, namespace_id=namespace_id)
        self._caller.retired.reserved(reply.lease)
        return grant_of(reply, namespace, reading=False)

    def _told(
        self, tokens: BlockTokens | None, namespace: Namespace, blocks: int
    ) -> dict[str, Any]:
        """Return the tokens that go with a call, as its fields. Raises InvalidRequest."""
        if tokens is None or not self.announces:
            return {}
        told = tokens.first(blocks, namespace.block_tokens)
        check_tokens(told, blocks, namespace.block_tokens)
        return {"tokens": told.packed, "lora_name": told.lora_name}

    async def commit(
        self, lease_id: int, checksums: Sequence[int], *, durable: bool = False
    ) -> Committed:
        """Publish the records of a reservation. It ends, whatever is raised.

        checksums: one per slot; where the slot is None, any number. durable: answer when the
        records are synced to disk.
        """

        def call(
            stub: KVStoreAsyncStub, session: int, timeout_s: float
        ) -> Awaitable[pb.CommitReply]:
            request = pb.CommitRequest(
                session=session, lease=lease_id, checksums=checksums, durable=durable
            )
            return stub.Commit(request, timeout=timeout_s)

        self._caller.retired.settled(lease_id)
        wait_s = DURABLE_WAIT_S if durable else 0.0
        try:
            return committed_of(await self._caller.call(call, wait_s=wait_s))
        except (Exception, asyncio.CancelledError):
            self._caller.release_later([lease_id])
            raise

    def view(self, slot: Slot) -> memoryview:
        """Return a slot's bytes, writable, without a copy. Raises Unavailable without an arena."""
        arena = self._caller.arena  # read once: any thread may ask while the daemon is lost
        if arena is None:
            raise Unavailable("the arena is not mapped")
        return arena.view(slot)

    @property
    def staging_nbytes(self) -> int:
        """Bytes of memory to write into beside a sealed arena; 0 if the arena is written to."""
        arena = self._caller.arena
        return arena.staging_nbytes if arena else 0

    @property
    def arena_nbytes(self) -> int:
        """Bytes of the tenant's own arena that are mapped now."""
        arena = self._caller.arena
        return arena.arena_nbytes if arena else 0

    def extents(self) -> dict[int, memoryview]:
        """Return the arena extents that are mapped now, by id: a GPU client registers them."""
        arena = self._caller.arena
        return arena.extents() if arena else {}
