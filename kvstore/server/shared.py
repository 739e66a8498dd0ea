"""Reads of a tenant, which find what the shared tenant has as well: the longer prefix of the two.

The shared tenant's arena is sealed, so its readers can map it without being able to change it. A
reader has a session of its own there, which names nobody, and which ends with its own one. Nothing
but keys is told to the shared tenant: no request, no conversation; and who looks there is told of
the keys that were found. Each tenant's readers may have a part of its sessions and leases; their
streams take places and bandwidth of their own tenant.
"""
# ruff: noqa: N802  the methods carry the names the .proto gives them

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kvstore.decide.planner import SessionId, needed_spans
from kvstore.model.block import Namespace, NamespaceId, Part, Span, padded
from kvstore.model.errors import UnknownNamespace
from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.server.boundary import Context
from kvstore.server.requests import pace_of
from kvstore.server.service import Service
from kvstore.server.stream_bounds import COPIED_NBYTES_MAX
from kvstore.server.streams import Streams
from kvstore.store.acquire import span_nbytes
from kvstore.store.sessions import Process
from kvstore.store.store import Store
from kvstore.transport.messages import spans_of

GUEST = "guest"  # what the shared tenant's operator sees of a reader


@dataclass(slots=True)
class _Guest:
    """The session of one reader at the shared tenant. leases: those that it holds there."""

    process: Process
    leases: set[int] = field(default_factory=set)


class SharingService(Service):
    """The service of a tenant beside a shared one. `share` with it before the first call."""

    def share(self, store: Store, service: Service, tenants: Callable[[], int]) -> None:
        """store, service: the shared tenant's. tenants: how many there are, that one included."""
        self._tenants_now = tenants
        self._public_store = store
        self._public = service
        self._guests: dict[int, _Guest] = {}
        self._granting_nbytes = 0  # of leases that are not granted yet
        self._guest_streams = self.streams.at(store)
        self._store.sessions.on_left.append(self._left)

    async def Match(self, request: pb.MatchRequest, context: Context) -> pb.MatchReply:
        own = await super().Match(request, context)
        public = await self._match(request, context)
        return public if public.hit_blocks > own.hit_blocks else own

    async def Acquire(
        self, request: pb.AcquireRequest, context: Context, *, is_guest: bool = False
    ) -> pb.GrantReply:
        session = request.session
        if not self._may_read(session):
            return await super().Acquire(request, context)
        if blocks := await self._longer_blocks(request, context):
            return await self._acquire_public(request, context, blocks)
        began = time.monotonic()
        own = await super().Acquire(request, context)
        left_s = request.wait_s - (time.monotonic() - began)
        blocks = await self._longer_blocks_elsewhere(request, own.hit_blocks, left_s)
        # It may have been taken, and the session may have ended meanwhile.
        if not (blocks and self._may_read(session)):
            return own
        public = await self._acquire_public(request, context, blocks)
        shorter, longer = sorted((public, own), key=lambda reply: reply.hit_blocks)
        if shorter.lease:
            ended = pb.ReleaseRequest(session=session, leases=[shorter.lease])
            await self.Release(ended, context)
        return longer

    async def _acquire_public(
        self, request: pb.AcquireRequest, context: Context, blocks: int
    ) -> pb.GrantReply:
        """blocks: how long a prefix it is likely to be. The caller knows that there is a part for
        it."""
        session = request.session
        guest = self._guest(session)
        asked = pb.AcquireRequest()
        asked.CopyFrom(request)
        asked.session, asked.request_id, asked.session_id = guest.process.session, "", ""
        asked.file_places = False  # its files are not the reader's to open
        with self._granting(request, blocks):
            reply = await self._public.Acquire(asked, context, is_guest=True)
        if reply.lease:
            guest.leases.add(reply.lease)
        return reply

    async def Await(self, request: pb.AwaitRequest, context: Context) -> pb.AwaitReply:
        guest = self._guests.get(request.session)
        if guest is None or request.lease not in guest.leases:
            return await super().Await(request, context)
        asked = pb.AwaitRequest(
            session=guest.process.session, lease=request.lease, blocks=request.blocks
        )
        return await self._public.Await(asked, context)

    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseReply:
        guest = self._guests.get(request.session)
        there = [lease for lease in request.leases if guest and lease in guest.leases]
        if guest is None or not there:
            return await super().Release(request, context)
        here = [lease for lease in request.leases if lease not in guest.leases]
        own = await super().Release(
            pb.ReleaseRequest(session=request.session, leases=here), context
        )
        released = pb.ReleaseRequest(session=guest.process.session, leases=there)
        public = await self._public.Release(released, context)
        held = dict(zip([*here, *there], [*own.held, *public.held], strict=True))
        guest.leases.difference_update(there)
        return pb.ReleaseReply(held=[held[lease] for lease in request.leases])

    async def Get(
        self, request: pb.GetRequest, context: Context, *, streams: Streams | None = None
    ) -> AsyncIterator[pb.GetReply]:
        left_nbytes = self._left_nbytes()
        if left_nbytes > 0 and await self._longer_blocks(request, context):
            streams = self._guest_streams
            streams.copied.bound(min(COPIED_NBYTES_MAX, left_nbytes))
            replies = self._public.Get(request, context, streams=streams)
        else:
            replies = super().Get(request, context, streams=streams)
        async for reply in replies:
            yield reply

    async def Delete(self, request: pb.DeleteRequest, context: Context) -> pb.DeleteReply:
        own = await super().Delete(request, context)
        if request.corrupt and not own.deleted:
            try:  # the shared tenant believes no report: it looks for itself
                return await self._public.Delete(request, context)
            except UnknownNamespace:
                pass  # then it was not there that this was read
        return own

    async def _longer_blocks(self, request: Any, context: Context) -> int:
        """Return how long a prefix of these keys the shared tenant has, 0 if no longer one."""
        if not request.keys:
            return 0
        asked = pb.MatchRequest(namespace_id=request.namespace_id, keys=request.keys)
        asked.refined = getattr(request, "refined", False)
        public = await self._match(asked, context)
        if not public.hit_blocks:
            return 0
        own = await super().Match(asked, context)
        return public.hit_blocks if public.hit_blocks > own.hit_blocks else 0

    async def _longer_blocks_elsewhere(
        self, request: pb.AcquireRequest, hit_blocks: int, wait_s: float
    ) -> int:
        """Return how long a prefix of these keys the shared tenant of another host has, 0 if no
        longer one; then the shared tenant of this one can fetch it. A host that has nothing is told
        nothing."""
        keys = self._requests.keys(request.keys)
        if hit_blocks >= len(keys) or request.spans or wait_s <= 0:
            return 0
        namespace = self._store.namespaces.get(NamespaceId(request.namespace_id))
        reach = await self._public_store.elsewhere(
            namespace,
            keys,
            request.skip_blocks,
            recompute_s_per_block=pace_of(request.recompute_s_per_block),
            refined=request.refined,
            wait_s=min(wait_s, self._public_store.limits.wait_max_s),
        )
        if reach <= max(hit_blocks, request.skip_blocks):
            return 0
        self._public_store.namespaces.learn(namespace)
        return reach

    async def _match(self, request: pb.MatchRequest, context: Context) -> pb.MatchReply:
        try:
            return await self._public.Match(request, context)
        except UnknownNamespace:
            return pb.MatchReply()

    def _may_read(self, session: int) -> bool:
        """Say whether a session is alive, and there is a part for it. One that has ended would hold
        its part for good: nothing ends it again."""
        alive = self._store.sessions.processes(SessionId(session))
        return bool(alive) and self._has_part(session)

    def _has_part(self, session: int) -> bool:
        """Say whether this tenant's readers may hold more of the shared tenant's, with one more
        session if need be. What one lease holds beyond that is let pass."""
        most = self._public_store.limits.sessions_max
        if session not in self._guests and (len(self._guests) + 1) * self._tenants_now() > most:
            return False
        return self._left_nbytes() > self._guest_streams.copied.taken_nbytes

    def _left_nbytes(self) -> int:
        """Return how many more bytes this tenant's readers may lease of the shared tenant's."""
        store = self._public_store
        part = store.arena.capacity_bytes * store.limits.leased_fraction / self._tenants_now()
        sessions = (guest.process.session for guest in self._guests.values())
        leased = sum(map(store.sessions.leased_bytes, sessions))
        return int(part) - leased - self._granting_nbytes

    @contextmanager
    def _granting(self, request: pb.AcquireRequest, blocks: int) -> Iterator[None]:
        """Hold a part for the time of the context for what will be leased."""
        namespace = self._public_store.namespaces.get(NamespaceId(request.namespace_id))
        if spans := spans_of(request.spans):
            nbytes = _nbytes_at_most(namespace, spans, blocks)
        else:
            nbytes = span_nbytes(namespace, needed_spans(namespace, blocks, request.skip_blocks))
        self._granting_nbytes += nbytes
        try:
            yield
        finally:
            self._granting_nbytes -= nbytes

    def _guest(self, session: int) -> _Guest:
        if session not in self._guests:
            sessions, token = self._public_store.sessions, secrets.token_hex(16)
            process = sessions.join(sessions.open(token, GUEST), token)
            self._guests[session] = _Guest(process)
        return self._guests[session]

    def _left(self, session: SessionId) -> None:
        """End what a reader holds, when its own session has ended."""
        if (guest := self._guests.pop(session, None)) is not None:
            self._public_store.sessions.leave(guest.process)


def _nbytes_at_most(namespace: Namespace, spans: Iterable[Span], blocks: int) -> int:
    """Return what the first `blocks` blocks have of some parts. Nobody has checked the spans yet:
    parts that there are not have nothing."""
    known = {Part(g, s) for g, group in enumerate(namespace.groups) for s in range(group.shards)}
    return sum(
        max(0, min(span.end, blocks) - span.begin) * padded(namespace.record_nbytes(span.part))
        for span in spans
        if span.part in known
    )
