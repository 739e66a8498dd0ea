"""Reads of a tenant, which find what the shared tenant has as well: the longer prefix of the two.

The shared tenant's arena is sealed, so its readers can map it without being able to change it. A
reader has a session of its own there, which names nobody, and which ends with its own one. Nothing
but keys is told to the shared tenant: no request, no conversation; and who records there is told
the keys that were found. Each tenant's readers may have a part of its sessions and leases.
"""
# ruff: noqa: N802  the methods carry the names the .proto gives them

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from kvstore.decide.planner import SessionId
from kvstore.model.block import NamespaceId
from kvstore.model.errors import UnknownNamespace
from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.server.boundary import Context
from kvstore.server.requests import pace_of
from kvstore.server.service import Service
from kvstore.store.sessions import Process
from kvstore.store.store import Store

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
        self._store.sessions.on_left.append(self._left)

    async def Match(self, request: pb.MatchRequest, context: Context) -> pb.MatchReply:
        own = await super().Match(request, context)
        public = await self._match(request, context)
        return public if public.hit_blocks > own.hit_blocks else own

    async def Acquire(
        self, request: pb.AcquireRequest, context: Context, *, is_guest: bool = False
    ) -> pb.GrantReply:
        session = request.session
        if not (self._store.sessions.processes(SessionId(session)) and self._has_part(session)):
            return await super().Acquire(request, context)
        if not await self._is_longer(request, context):
            own = await super().Acquire(request, context)
            if not await self._is_longer_elsewhere(request, own.hit_blocks):
                return own
            public = await self._acquire_public(request, context)
            shorter, longer = sorted((public, own), key=lambda reply: reply.hit_blocks)
            if shorter.lease:
                ended = pb.ReleaseRequest(session=session, leases=[shorter.lease])
                await self.Release(ended, context)
            return longer
        return await self._acquire_public(request, context)

    async def _acquire_public(self, request: pb.AcquireRequest, context: Context) -> pb.GrantReply:
        session = request.session
        guest = self._guest(session)
        asked = pb.AcquireRequest()
        asked.CopyFrom(request)
        asked.session, asked.request_id, asked.session_id = guest.process.session, "", ""
        asked.file_places = False  # its files are not the reader's to open
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

    async def Get(self, request: pb.GetRequest, context: Context) -> AsyncIterator[pb.GetReply]:
        longer = await self._is_longer(request, context)
        replies = self._public.Get(request, context) if longer else super().Get(request, context)
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

    async def _is_longer(self, request: Any, context: Context) -> bool:
        """Say whether the shared tenant has a longer prefix of these keys."""
        if not request.keys:
            return False
        asked = pb.MatchRequest(namespace_id=request.namespace_id, keys=request.keys)
        asked.refined = getattr(request, "refined", False)
        public = await self._match(asked, context)
        if not public.hit_blocks:
            return False
        return public.hit_blocks > (await super().Match(asked, context)).hit_blocks

    async def _is_longer_elsewhere(self, request: pb.AcquireRequest, hit_blocks: int) -> bool:
        """Say whether the shared tenant of another host has a longer prefix of these keys; then
        the shared tenant of this one can fetch it. A host that has nothing is told nothing."""
        keys = self._requests.keys(request.keys)
        if hit_blocks >= len(keys) or request.spans or not request.wait_s:
            return False
        namespace = self._store.namespaces.get(NamespaceId(request.namespace_id))
        reach = await self._public_store.elsewhere(
            namespace,
            keys,
            request.skip_blocks,
            recompute_s_per_block=pace_of(request.recompute_s_per_block),
            refined=request.refined,
        )
        if reach <= max(hit_blocks, request.skip_blocks):
            return False
        self._public_store.namespaces.learn(namespace)
        return True

    async def _match(self, request: pb.MatchRequest, context: Context) -> pb.MatchReply:
        try:
            return await self._public.Match(request, context)
        except UnknownNamespace:
            return pb.MatchReply()

    def _has_part(self, session: int) -> bool:
        """Say whether this tenant's readers may hold more of the shared tenant's, with one more
        session if need be. What one lease holds beyond that is let pass."""
        store, tenants = self._public_store, self._tenants_now()
        guests = [guest.process.session for guest in self._guests.values()]
        if session not in self._guests and (len(guests) + 1) * tenants > store.limits.sessions_max:
            return False
        leasable = store.arena.capacity_bytes * store.limits.leased_fraction
        return sum(map(store.sessions.leased_bytes, guests)) * tenants < leasable

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
