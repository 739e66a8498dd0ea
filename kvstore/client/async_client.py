"""The asyncio client: every method of the daemon, reconnecting in the background.

Local clients (unix socket, same user) map the arena and touch bytes in place; all others stream
them. While the daemon is away every call raises Unavailable at once: see `breaker.py`.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import TYPE_CHECKING, Any

from kvstore.client.bulk import Bulk
from kvstore.client.caller import Call, Caller
from kvstore.client.recording import record
from kvstore.client.target import default_target
from kvstore.decide.namespaces import NamespaceUse
from kvstore.model.block import (
    BlockKey,
    Buffer,
    Committed,
    Grant,
    Match,
    Namespace,
    NamespaceId,
    Part,
    Slot,
    Span,
    check_keys,
)
from kvstore.model.errors import Incompatible, InvalidRequest, SessionEnded, Unavailable
from kvstore.model.hint import HintKind, HintReport, Prefix
from kvstore.model.outcome import REQUEST_ID_CHARS_MAX, Explanation, Outcome
from kvstore.rpc import RPC_VERSION
from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.settings import Entry
from kvstore.transport.explain_messages import explanation_of, outcome_of
from kvstore.transport.hint_messages import report_of
from kvstore.transport.messages import committed_of, grant_of, spans_to_messages
from kvstore.transport.unix_sockets import target_of

if TYPE_CHECKING:
    from kvstore.rpc.v1.kvstore_pb2_grpc import KVStoreAsyncStub

DURABLE_WAIT_S = 30.0
SCAN_PAGE_ITEMS = 1000


class AsyncClient:
    """One engine process's client. Lives on one event loop.

    target: "unix:/run/kvstore/kvstore.sock", a path such as "./kvstore.sock", or "127.0.0.1:7700"
    where `server.listen` is set. None: what the environment variable KVSTORE_TARGET says, or else
    the first of the default sockets that this user may use, looked for now.
    token: shared by all processes of one engine, 16 to 128 characters; one is made up if None.
    name: for the daemon's log. timeout_s: deadline of a call, beyond the time it was told to wait.
    arena: map the daemon's memory; default: whenever the target is a unix socket.
    daemon_uid: the user that runs the daemon. Without it, only one of this user, or of root, is
    believed: whoever answers feeds the engine.
    """

    def __init__(
        self,
        target: str | None = None,
        *,
        token: str | None = None,
        name: str = "",
        timeout_s: float = 5.0,
        connect_timeout_s: float = 2.0,
        arena: bool | None = None,
        daemon_uid: int | None = None,
    ) -> None:
        self.target = default_target(daemon_uid) if target is None else target_of(target)
        wants_arena = self.target.startswith("unix:") if arena is None else arena
        self._caller = Caller(
            self.target,
            token=(token or secrets.token_hex(16)) if wants_arena else "",
            name=name,
            timeout_s=timeout_s,
            connect_timeout_s=connect_timeout_s,
            daemon_uid=daemon_uid,
        )
        self._bulk = Bulk(self, self._caller)

    # ---- connection --------------------------------------------------------------------------

    @property
    def available(self) -> bool:
        """False while calls raise Unavailable without being tried."""
        return self._caller.available

    @property
    def breaker_trips(self) -> int:
        """How often the daemon was given up, until it answered again."""
        return self._caller.breaker_trips

    @property
    def local(self) -> bool:
        """Whether the arena is mapped."""
        return self._caller.arena is not None

    @property
    def instance(self) -> str:
        """Name of the daemon's present life: another one after a restart, "" when not connected."""
        return self._caller.instance

    @property
    def corrupt_blocks(self) -> int:
        """Blocks that `get` dropped because their bytes did not match their checksum."""
        return self._bulk.corrupt_blocks

    async def connect(self) -> None:
        """Connect now. Calls do it on demand. Raises Unavailable, Unauthorized or Incompatible."""
        await self._caller.connected()

    async def ping(self) -> str:
        """Make the smallest call there is; return the daemon's release."""
        request = pb.OpenSessionRequest(rpc_version=RPC_VERSION)
        reply = await self._caller.call(lambda stub, _, t: stub.OpenSession(request, timeout=t))
        return reply.server_version

    async def doubt(self) -> None:
        """Say that an answer is overdue by the caller's own deadline, before that of the call.

        Calls are refused at once until the daemon has answered a ping, which shows that it was only
        slow.
        """
        self._caller.doubt()

    async def close(self) -> None:
        """End the session and give everything back. Views already taken stay valid."""
        await self._caller.close()
        self._bulk.close()

    # ---- control -----------------------------------------------------------------------------

    async def register(self, namespace: Namespace) -> NamespaceId:
        """Tell the daemon a namespace. It is remembered, and told again to a daemon that does not
        know it (any more)."""
        request = pb.RegisterNamespaceRequest(spec_json=namespace.to_json(), name=namespace.name)
        await self._caller.call(lambda stub, _, t: stub.RegisterNamespace(request, timeout=t))
        namespace_id = namespace.id
        self._caller.remember(namespace_id, namespace)
        return namespace_id

    def namespace(self, namespace_id: NamespaceId) -> Namespace:
        """Return a namespace registered by this client. Raises InvalidRequest."""
        namespace = self._caller.namespace(namespace_id)
        if namespace is None:
            raise InvalidRequest(
                f"unknown namespace {bytes(namespace_id)[:4].hex()}: register it first"
            )
        return namespace

    async def match(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        *,
        skip_blocks: int = 0,
        recompute_s_per_block: float = 0.0,
        timeout_s: float | None = None,
    ) -> Match:
        """Return how long the prefix would hit now, and how much is worth loading. Pins nothing."""
        request = pb.MatchRequest(
            namespace_id=namespace_id,
            keys=self._caller.joined(keys),
            skip_blocks=skip_blocks,
            recompute_s_per_block=recompute_s_per_block,
        )
        reply = await self._caller.call(
            lambda stub, _, t: stub.Match(request, timeout=t),
            timeout_s=timeout_s,
            namespace_id=namespace_id,
        )
        worth = reply.worth_blocks if reply.HasField("worth_blocks") else None
        return Match(reply.hit_blocks, reply.resident_blocks, worth, reply.load_s)

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
    ) -> Grant:
        """Lease the longest stored prefix, or exactly the parts `spans` names.

        recompute_s_per_block: what computing a block takes instead; nothing is waited for that
        would be computed sooner. 0: wait for `wait_s`.
        session_id: the conversation the request belongs to: hints may name it later.
        file_places: the caller reads the daemon's files itself, with its own rights. A record that
        lies in one as it was put, and not in the arena, does not come up: it has no slot, but a
        place (`Grant.places`), which stays what it is until the lease ends. Past its deadline, or
        when its disk goes out of use, the place becomes a hole, or its file vanishes, at any time.
        A daemon that does not lend places, or no more now, brings records up as usual.

        Read through `view`, verify with `checksum`, then `release`; bytes that were read count only
        if it answers True. `readers` releases end the lease. `kvstore explain REQUEST_ID` tells
        later why the hit was not longer; of a long id, the first 256 characters count.
        """
        self._caller.check_may_lease()
        namespace, joined = self.namespace(namespace_id), self._caller.joined(keys)
        messages = spans_to_messages(spans or ())

        def call(
            stub: KVStoreAsyncStub, session: int, timeout_s: float
        ) -> Awaitable[pb.GrantReply]:
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
            )
            return stub.Acquire(request, timeout=timeout_s)

        reply = await self._caller.call(call, wait_s=wait_s, repeat=True, namespace_id=namespace_id)
        return grant_of(reply, namespace, reading=True)

    async def release(self, *lease_ids: int) -> list[bool]:
        """End leases, or abandon reservations. True: the slots were the caller's until now."""

        def call(
            stub: KVStoreAsyncStub, session: int, timeout_s: float
        ) -> Awaitable[pb.ReleaseReply]:
            request = pb.ReleaseRequest(session=session, leases=lease_ids)
            return stub.Release(request, timeout=timeout_s)

        self._caller.settled(*lease_ids)
        try:
            held = list((await self._caller.call(call)).held)
        except SessionEnded:
            return [False] * len(lease_ids)
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
    ) -> Grant:
        """Lease slots for the records of `spans` that are not stored yet; then `commit`.

        session_id: the conversation they belong to: hints may name it later.
        """
        self._caller.check_may_lease()
        namespace, joined = self.namespace(namespace_id), self._caller.joined(keys)
        check_keys([parent] if parent else [])
        messages = spans_to_messages(spans)

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
            )
            return stub.Reserve(request, timeout=timeout_s)

        reply = await self._caller.call(call, wait_s=wait_s, repeat=True, namespace_id=namespace_id)
        self._caller.reserved(reply.lease)
        return grant_of(reply, namespace, reading=False)

    async def commit(
        self, lease_id: int, checksums: Sequence[int], *, durable: bool = False
    ) -> Committed:
        """Publish a reservation. checksums: one per slot, any number where the slot was None."""

        def call(
            stub: KVStoreAsyncStub, session: int, timeout_s: float
        ) -> Awaitable[pb.CommitReply]:
            request = pb.CommitRequest(
                session=session, lease=lease_id, checksums=checksums, durable=durable
            )
            return stub.Commit(request, timeout=timeout_s)

        self._caller.settled(lease_id)
        return committed_of(
            await self._caller.call(call, wait_s=DURABLE_WAIT_S if durable else 0.0)
        )

    def view(self, slot: Slot) -> memoryview:
        """Return a slot's bytes, writable, without a copy. Raises Unavailable if not mapped."""
        if self._caller.arena is None:
            raise Unavailable("the arena is not mapped")
        return self._caller.arena.view(slot)

    def extents(self) -> dict[int, memoryview]:
        """Return the arena extents mapped now, by id: what a GPU client registers."""
        return self._caller.arena.extents() if self._caller.arena else {}

    # ---- bulk --------------------------------------------------------------------------------

    async def put(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        records: Sequence[Buffer],
        *,
        group: int = 0,
        shard: int = 0,
        first_block: int = 0,
        parent: BlockKey | None = None,
        durable: bool = False,
        wait_s: float = 2.0,
    ) -> Committed:
        """Store one part of consecutive blocks: copy, checksum, publish; durable if asked.

        A full store is not an error: see `refused` of the answer.
        """
        return await self._bulk.put(
            namespace_id,
            keys,
            records,
            part=Part(group, shard),
            first_block=first_block,
            parent=parent,
            durable=durable,
            wait_s=wait_s,
        )

    async def get(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        *,
        group: int = 0,
        shard: int = 0,
        wait_s: float = 2.0,
    ) -> list[bytes | None]:
        """Return one part of each block, None for a miss. Every byte returned was verified.

        The node alone is asked: a bucket finds blocks by the prefix they are in, as `acquire` does.
        """
        return await self._bulk.get(namespace_id, keys, part=Part(group, shard), wait_s=wait_s)

    async def get_into(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        targets: Sequence[Buffer],
        *,
        group: int = 0,
        shard: int = 0,
        wait_s: float = 2.0,
        verify: bool = True,
        from_files: bool = False,
    ) -> list[bool]:
        """Read one part of each block into memory of the caller's; say which targets were filled.

        targets: writable, one record each. Where the answer is False the target's bytes are
        undefined. Faster than `get`, because memory used again needs no page faults.
        verify: check the copies; without it, bytes that rotted in memory go unnoticed.
        from_files: for a caller that keeps what it gets. What only the daemon's file tier has, as
        it was put, goes from the disk straight into the targets, and does not come up into the
        arena: as fast as the disk is, and as slow again the next time. Of clients that map the
        arena, with targets of whole pages (of 4096 bytes); else, and where files cannot be read, it
        changes nothing. Raises Unavailable if a disk
        does not come back from a read: from then on, until it does, it may write to that target.
        """
        return await self._bulk.get_into(
            namespace_id,
            keys,
            targets,
            part=Part(group, shard),
            wait_s=wait_s,
            verify=verify,
            from_files=from_files,
        )

    # ---- watching ----------------------------------------------------------------------------

    def record(
        self,
        *,
        share: float = 1.0,
        block: int = 0,
        namespace_id: NamespaceId | None = None,
    ) -> AsyncIterator[pb.RecordReply]:
        """Yield what is asked of the daemon from now on; the first batch is empty.

        share: of all prefixes, by the hash in their key number `block`; those that end before it
        are left out. Whoever does not keep up misses some: see `dropped` of the replies.
        """
        return record(
            self._caller, self.target, share=share, block=block, namespace_id=namespace_id
        )

    # ---- hints: a wrong one costs hits, nothing else -----------------------------------------
    #
    # target: the session id that requests were sent with, or a `Prefix`. Each returns what has been
    # done, and how long that took. Raises InvalidRequest for times that are none.

    async def end_session(self, target: str | Prefix) -> HintReport:
        """Say that a conversation is over: what it alone has used is the first to leave."""
        return await self._hint(HintKind.END, target, end_session=pb.EndSession())

    async def expect(self, target: str | Prefix, in_s: float) -> HintReport:
        """Say that a conversation asks again in so many seconds: its blocks stay, and come up to
        be in the arena by then. A request that comes sooner, or another hint, takes its place."""
        return await self._hint(HintKind.EXPECT, target, expect=pb.Expect(in_s=in_s))

    async def prefetch(self, target: str | Prefix, *, deadline_s: float = 5.0) -> HintReport:
        """Bring blocks up into the arena; answers when they are there, or `deadline_s` is over."""
        return await self._hint(
            HintKind.PREFETCH, target, wait_s=deadline_s, prefetch=pb.Prefetch()
        )

    async def pin(
        self, target: str | Prefix, ttl_s: float, *, bytes_max: int = 0, deadline_s: float = 5.0
    ) -> HintReport:
        """Bring blocks up within `deadline_s` and keep them in the arena for `ttl_s`, from the
        first on, as far as `bytes_max` (0: any) and the daemon's own bounds go. The target's next
        pin takes the place of this one; 0 s ends it."""
        pin = pb.Pin(ttl_s=ttl_s, bytes_max=bytes_max)
        return await self._hint(HintKind.PIN, target, wait_s=deadline_s, pin=pin)

    async def demote(self, target: str | Prefix, *, deadline_s: float = 5.0) -> HintReport:
        """Let what a conversation alone has used leave the arena for the file tier, where it is
        written, or will be within `deadline_s`."""
        return await self._hint(HintKind.DEMOTE, target, wait_s=deadline_s, demote=pb.Demote())

    async def _hint(
        self, kind: HintKind, target: str | Prefix, *, wait_s: float = 0.0, **hint: Any
    ) -> HintReport:
        prefix = Prefix(NamespaceId(b""), ()) if isinstance(target, str) else target
        request = pb.HintRequest(
            session_id=target if isinstance(target, str) else target.session_id,
            namespace_id=prefix.namespace_id,
            keys=self._caller.joined(prefix.keys),
            wait_s=wait_s,
            **hint,
        )
        reply = await self._caller.call(
            lambda stub, _, t: stub.Hint(request, timeout=t),
            wait_s=max(0.0, wait_s),
            namespace_id=prefix.namespace_id,
        )
        return report_of(kind, reply)

    # ---- administration ----------------------------------------------------------------------

    async def delete(
        self, namespace_id: NamespaceId, keys: Sequence[BlockKey], *, corrupt: bool = False
    ) -> int:
        """Delete blocks for good; return how many there were.

        corrupt: the caller read wrong bytes. The daemon verifies its copies and drops wrong ones;
        returns of how many blocks there was one.
        """
        request = pb.DeleteRequest(
            namespace_id=namespace_id, keys=self._caller.joined(keys), corrupt=corrupt
        )
        reply = await self._caller.call(
            lambda stub, _, t: stub.Delete(request, timeout=t), namespace_id=namespace_id
        )
        return reply.deleted

    async def clear(self, namespace_id: NamespaceId | None = None) -> int:
        """Delete every block of a namespace, or of all; return how many there were."""
        request = pb.ClearRequest(namespace_id=namespace_id or b"")
        return (await self._caller.call(lambda stub, _, t: stub.Clear(request, timeout=t))).deleted

    async def flush(self, wait_s: float = 30.0) -> bool:
        """Wait until everything committed is durable. False if `wait_s` was not enough, or if
        something was lost before it could be written, which is told once."""
        request = pb.FlushRequest(wait_s=wait_s)
        reply = await self._caller.call(
            lambda stub, _, t: stub.Flush(request, timeout=t), wait_s=wait_s
        )
        return reply.durable

    async def stats(self) -> dict[str, Any]:
        """Return what the daemon holds and owes."""
        reply = await self._caller.call(lambda stub, _, t: stub.Stats(pb.StatsRequest(), timeout=t))
        stats: dict[str, Any] = json.loads(reply.json)
        return stats

    async def settings(self) -> list[Entry]:
        """Return the daemon's settings. Answered over its unix socket only."""
        reply = await self._caller.call(
            lambda stub, _, t: stub.GetConfig(pb.GetConfigRequest(), timeout=t)
        )
        return [Entry(each.key, each.value, each.live) for each in reply.settings]

    async def configure(
        self, assignments: Sequence[str], wait_s: float = 0.0
    ) -> tuple[list[tuple[str, str, str]], str]:
        """Change live settings by texts such as "dram.capacity=8GiB": all of them, or none.

        Waits up to `wait_s` until lowered caps are kept. Returns (key, before, after) of each that
        changed, and what a lowered cap still waits for. Raises ConfigError. Answered over the
        daemon's unix socket only.
        """
        request = pb.SetConfigRequest(assignments=assignments, wait_s=wait_s)
        reply = await self._caller.call(
            lambda stub, _, t: stub.SetConfig(request, timeout=t), wait_s=wait_s
        )
        return [(each.key, each.before, each.after) for each in reply.changed], reply.pending

    async def log_lines(self, limit: int = 0) -> list[str]:
        """Return the daemon's last log lines, oldest first; 0: all it keeps. Answered over its
        unix socket only."""
        request = pb.LogLinesRequest(limit=limit)
        reply = await self._caller.call(lambda stub, _, t: stub.LogLines(request, timeout=t))
        return list(reply.lines)

    async def namespaces(self) -> list[NamespaceUse]:
        """Return what the daemon has of each namespace, by id.

        None in the place of a namespace: it has blocks, but what it stands for is not known (any
        more): it is when an engine that uses it comes.
        """
        found: list[NamespaceUse] = []
        after = b""
        while True:
            request = pb.ListNamespacesRequest(after=after)
            reply = await self._caller.call(_list_call(request))
            found += map(_use_of, reply.items)
            if not reply.next or reply.next <= after:
                return found
            after = reply.next

    async def outcomes(self, request_id: str = "", *, limit: int = 100) -> list[Outcome]:
        """Return how the last requests whose id starts so were answered, newest first."""
        request = pb.OutcomesRequest(request_id=request_id, limit=limit)
        reply = await self._caller.call(lambda stub, _, t: stub.Outcomes(request, timeout=t))
        return [outcome_of(message) for message in reply.outcomes]

    async def explain(self, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> Explanation:
        """Return where each block of a prefix is now, and what would end its hit."""
        request = pb.ExplainRequest(namespace_id=namespace_id, keys=self._caller.joined(keys))
        reply = await self._caller.call(
            lambda stub, _, t: stub.Explain(request, timeout=t), namespace_id=namespace_id
        )
        return explanation_of(reply)

    async def scan(
        self, namespace_id: NamespaceId | None = None, *, limit: int | None = None
    ) -> AsyncIterator[pb.ScanItem]:
        """Iterate over the stored blocks in key order, page by page, not as one snapshot."""
        after, left = b"", limit
        while left is None or left > 0:
            request = pb.ScanRequest(
                namespace_id=namespace_id or b"",
                after=after,
                limit=SCAN_PAGE_ITEMS if left is None else min(left, SCAN_PAGE_ITEMS),
            )
            reply = await self._caller.call(_scan_call(request))
            for item in reply.items:
                yield item
            after = reply.next
            left = None if left is None else left - len(reply.items)
            if not after:
                return


def _list_call(request: pb.ListNamespacesRequest) -> Call[pb.ListNamespacesReply]:
    return lambda stub, _, timeout_s: stub.ListNamespaces(request, timeout=timeout_s)


def _use_of(item: pb.NamespaceItem) -> NamespaceUse:
    return NamespaceUse(
        NamespaceId(item.namespace_id),
        Namespace.from_json(item.spec_json) if item.spec_json else None,
        item.blocks,
        item.model,
        item.dram_bytes,
        item.file_bytes,
        item.asked_blocks,
        item.hit_blocks,
    )


def _scan_call(request: pb.ScanRequest) -> Call[pb.ScanReply]:
    return lambda stub, _, timeout_s: stub.Scan(request, timeout=timeout_s)
