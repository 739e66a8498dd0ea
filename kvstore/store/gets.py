"""Gets: how long a prefix hits, and leases on what is resident of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from kvstore.decide.ask import Ask
from kvstore.decide.index import HeldSlot, StoredPart
from kvstore.decide.planner import SessionId, base_blocks, needed_spans
from kvstore.decide.slow_log import Waits
from kvstore.model.block import (
    BlockKey,
    Grant,
    Match,
    NamespaceId,
    Span,
    check_keys,
    padded,
)
from kvstore.model.errors import InvalidRequest
from kvstore.model.member import Origin
from kvstore.model.outcome import Ready, Reason
from kvstore.move.file_leases import NO_FILE_LEASE, FileLeases
from kvstore.move.filling import Filling
from kvstore.move.promote import Promotion
from kvstore.store.acquire import Acquisition
from kvstore.store.handoff import Handoff
from kvstore.store.hints import Hints
from kvstore.store.node import Node
from kvstore.store.request_log import RequestLog

AT_STAKE_MIN_S = 0.5  # computing what is asked for, by what others told of it
SETTLED_MAX = 1024  # blocks that rest again after an answer: others wait meanwhile


class Gets:
    """Answers what is stored, and leases it to whoever reads it."""

    def __init__(
        self,
        node: Node,
        *,
        promotion: Promotion,
        acquisition: Acquisition,
        file_leases: FileLeases,
        hints: Hints,
        request_log: RequestLog,
        handoff: Handoff,
    ) -> None:
        self._node = node
        self._planner = node.planner
        self._write_behind = node.write_behind
        self._leases = node.leases
        self._metrics = node.metrics
        self._now = node.now
        self._promotion = promotion
        self._acquisition = acquisition
        self._file_leases = file_leases
        self._hints = hints
        self._request_log = request_log
        self._handoff = handoff
        self._fillings: dict[int, tuple[SessionId, Filling]] = {}  # by lease
        self._leases.on_over.append(lambda lease_id: self._fillings.pop(lease_id, None))

    def match(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        skip_blocks: int = 0,
        recompute_s_per_block: float = 0.0,
        *,
        refined: bool = False,
    ) -> Match:
        """Return how long the prefix would hit now, and how much is worth loading. Pins nothing.

        refined: as for `acquire`.
        """
        _check_skip(keys, skip_blocks)
        self._write_behind.recall.index(keys)
        match = self._planner.match(namespace_id, keys, skip_blocks, refined=refined)
        if match.resident_blocks == match.hit_blocks:
            return match
        namespace = self._planner.namespace(namespace_id)
        spans = needed_spans(namespace, match.hit_blocks, skip_blocks, fine=refined)
        found = self._planner.find(namespace_id, keys, spans)
        nbytes = sum(r.nbytes for r in found if r is not None and r.resident is None)
        pace = self._promotion.pace
        saved = match.hit_blocks - max(skip_blocks, match.resident_blocks)
        saved_s = saved * recompute_s_per_block
        if recompute_s_per_block and pace.loses(nbytes, saved_s, whole=namespace.has_windows):
            return replace(match, worth_blocks=match.resident_blocks)
        return replace(match, load_s=pace.predict(nbytes) or 0.0)

    def present(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        spans: tuple[Span, ...] = (),
        *,
        refined: bool = False,
    ) -> list[bool]:
        """Say of each block whether it is stored, whatever is missing before it. Pins nothing.

        spans: say it of each record of these instead, in their order. refined: of these, a base
        that lacks its fine part is not stored.
        """
        check_keys(keys)
        self._node.check_spans(namespace_id, keys, spans)
        self._write_behind.recall.index(keys)
        if spans:
            return self._planner.puts.stored(namespace_id, keys, spans, refined=refined)
        return self._planner.present(namespace_id, keys)

    async def acquire(
        self,
        session: SessionId,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        *,
        skip_blocks: int = 0,
        readers: int = 1,
        wait_s: float = 0.0,
        spans: tuple[Span, ...] | None = None,
        request_id: str = "",
        recompute_s_per_block: float = 0.0,
        session_id: str = "",
        in_files: bool = False,
        refined: bool = False,
        origin: Origin | None = None,
        early: bool = False,
        each: bool = False,
        is_guest: bool = False,
    ) -> Grant:
        """Promote the longest stored prefix and lease it; with `spans`, exactly those parts.

        Bytes in slower tiers have `wait_s` to be promoted, or as long as that is faster than
        computing them, if told what that takes; past it the answer is a shorter prefix. Over the
        bound on leased bytes the answer is an estimate without slots (`leased` is false); with
        `spans`, parts beyond it have no slot. request_id: its outcome is remembered. session_id: of
        the conversation. in_files: what lies in files as it was put, not in the arena, stays, and
        its place is leased, as far as leases may hold the file tier; else it is promoted. refined:
        a block of a lossy namespace without its fine part is a miss; else fine parts come as far as
        they are there in time. origin: the daemon that has the prefix. early: `ready` waits for the
        last slots. each: say of each part if it is stored. is_guest: of another tenant.
        """
        client = self._leases.check(session).client
        _check_skip(keys, skip_blocks)
        with self._node.in_use(namespace_id):
            waits, began = await self._recalled(keys), self._now()
            deadline = began + min(wait_s, self._node.limits.wait_max_s)
            ask = Ask(
                session,
                client,
                request_id,
                namespace_id,
                keys,
                skip_blocks,
                began,
                recompute_s_per_block or self._told_before(namespace_id, len(keys) - skip_blocks),
                session_id,
                in_files,
                refined,
                origin,
                early,
                waits,
                recompute_s_per_block > 0.0,
                is_guest,
            )
            if spans is None:
                ask = await self._handoff.arrived(ask, deadline)
                return await self._lease_prefix(ask, readers, deadline)
            lease = self._lease_present if each else self._lease_parts
            return await lease(ask, spans, readers, deadline)

    async def _recalled(self, keys: Sequence[BlockKey]) -> Waits:
        """Index what was found on disk of some keys; return how long that took."""
        waits = Waits(self._now)
        with waits.on("recall"):
            await self._node.recall(keys)
        return waits

    def _told_before(self, namespace_id: NamespaceId, blocks: int) -> float:
        """Return what computing a block takes, for an engine that does not know its pace yet; 0
        where so little is at stake that a guess may not cost a hit."""
        s_per_block = self._planner.costs.s_per_block(self._planner.namespace(namespace_id))
        return s_per_block if blocks * s_per_block >= AT_STAKE_MIN_S else 0.0

    async def _lease_present(
        self, ask: Ask, spans: tuple[Span, ...], readers: int, deadline: float
    ) -> Grant:
        """Lease parts as far as they are stored, and say which are. If none is, nothing is leased,
        as most lookups of new prompts end."""
        present = tuple(self.present(ask.namespace_id, ask.keys, spans))
        if not any(present):
            none, zero = (None,) * len(present), (0,) * len(present)
            return Grant(0, 0.0, spans, none, zero, leased=False, present=present)
        grant = await self._lease_parts(ask, spans, readers, deadline)
        return replace(grant, present=present)

    async def _lease_parts(
        self, ask: Ask, spans: tuple[Span, ...], readers: int, deadline: float
    ) -> Grant:
        self._node.check_spans(ask.namespace_id, ask.keys, spans)
        absent = 0
        if not self._is_resident(ask, spans):
            if not self._lends(ask, spans):
                ask = replace(ask, in_files=False)
            with ask.waits.on("file"):
                promoted = await self._promotion.promote(
                    ask.namespace_id, ask.keys, spans, deadline, in_files=ask.in_files
                )
            absent = promoted.absent
        grant = self._grant(ask, spans, readers, hit_blocks=0)
        lent = sum(place is not None for place in grant.places)
        found = lent + sum(slot is not None for slot in grant.slots)
        file = min(absent + lent, found)
        self._request_log.count(ask, asked=len(grant.slots), dram=found - file, file=file)
        if found == len(grant.slots):
            self._node.uses.served(ask.keys)
        self._request_log.note_parts(ask, found)
        return grant

    async def _lease_prefix(self, ask: Ask, readers: int, deadline: float) -> Grant:
        namespace = self._planner.namespace(ask.namespace_id)
        skip = ask.skip_blocks
        acquired = await self._acquisition.promote(ask, deadline)
        hit, affordable = acquired.hit, acquired.affordable
        spans = needed_spans(namespace, hit, skip, fine=ask.refined)
        if ask.in_files and not self._lends(ask, spans):
            return await self._lease_prefix(replace(ask, in_files=False), readers, deadline)
        # Others may have been granted theirs while this one waited for its bytes.
        if hit > skip and self._acquisition.slots_nbytes(ask, spans) > self._acquisition.room_bytes:
            affordable = False
        if not affordable:
            self._request_log.note(ask, hit, Reason.LEASED_BYTES)
            return Grant(0, 0.0, (), (), hit_blocks=hit, leased=False)
        fetched = acquired.objects + acquired.peers + acquired.pool
        file = max(0, hit - max(skip, acquired.resident)) - fetched
        self._request_log.count(
            ask,
            asked=len(ask.keys) - skip,
            dram=hit - skip - file - fetched,
            file=file,
            objects=acquired.objects,
            peers=acquired.peers,
            pool=acquired.pool,
        )
        if namespace.fine and not ask.in_files:
            spans = needed_spans(namespace, hit, skip, fine=True)
        grant = self._grant(ask, spans, readers, hit_blocks=hit, filling=acquired.filling)
        self._request_log.note(
            ask,
            hit,
            acquired.why,
            grant.lease_id,
            file=file,
            objects=acquired.objects,
            peers=acquired.peers,
            peer=acquired.peer,
            pool=acquired.pool,
            base=base_blocks(namespace, grant),
        )
        self._node.uses.served(ask.keys[:hit] if hit > skip else ())
        if self._node.pool is not None:
            self._node.pool.used(ask.namespace_id, ask.keys[skip:hit])
        return grant

    async def ready(self, session: SessionId, lease_id: int, blocks: int) -> Ready:
        """Wait until the slots of the first `blocks` blocks of a lease are filled, or will not be:
        no longer than the acquire might have waited."""
        known = self._fillings.get(lease_id)
        if known is None or known[0] != session:
            return Ready(0, over=True)
        return await known[1].reach(blocks)

    def _grant(
        self,
        ask: Ask,
        spans: tuple[Span, ...],
        readers: int,
        *,
        hit_blocks: int,
        filling: Filling | None = None,
    ) -> Grant:
        records = self._planner.find(ask.namespace_id, ask.keys, spans)
        slots = [_slot_of(record, coming=filling is not None) for record in records]
        held = within(self._acquisition.room_bytes, slots)
        lent = self._file_leases.places(records, held) if ask.in_files else NO_FILE_LEASE
        lease = self._leases.grant(ask.session, held, readers=max(1, readers), frames=lent.frames)
        if filling is not None:
            self._fillings[lease.id] = (ask.session, filling)
        self._metrics.bytes.labels("dram", "read").inc(lease.nbytes)
        self._metrics.bytes.labels("file", "lent").inc(lent.nbytes)
        if ask.tells_pace:
            namespace = self._planner.namespace(ask.namespace_id)
            self._planner.costs.told(namespace, ask.recompute_s_per_block, len(ask.keys))
        # Once the answer is on its way: for a long prefix, the policies take milliseconds. A large
        # answer lets others go first by one turn of the loop, so this waits for two.
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, self._answered, ask)
        self._hints.asked(ask.session_id, ask.namespace_id, ask.keys)
        return Grant(
            lease_id=lease.id,
            deadline_s=self._node.limits.lease_s,
            spans=spans,
            slots=tuple(slot.slot if slot else None for slot in held),
            checksums=tuple(record.checksum if record else 0 for record in records),
            hit_blocks=hit_blocks,
            places=lent.places,
            varies=self._planner.namespace(ask.namespace_id).varies,
            ready_blocks=filling.ready_blocks if filling is not None else None,
        )

    def _answered(self, ask: Ask) -> None:
        self._planner.touch(ask.keys, ask.namespace_id)
        self._planner.index.settle(min(len(ask.keys), SETTLED_MAX))

    def _is_resident(self, ask: Ask, spans: Sequence[Span]) -> bool:
        """Say whether all that is stored of some parts is in the arena."""
        found = self._planner.find(ask.namespace_id, ask.keys, spans)
        return all(record is None or record.resident is not None for record in found)

    def _lends(self, ask: Ask, spans: Sequence[Span]) -> bool:
        """Say whether what the asker would read in files may be leased now, all of it."""
        records = self._planner.find(ask.namespace_id, ask.keys, spans)
        return ask.in_files and self._file_leases.has_room(records)


def _slot_of(record: StoredPart | None, *, coming: bool) -> HeldSlot | None:
    """Return the slot of a record. coming: even if it is still read into."""
    if record is None:
        return None
    return record.resident or (record.loading if coming else None)


def within(nbytes: int, slots: Sequence[HeldSlot | None]) -> list[HeldSlot | None]:
    """Return the slots, from the first on, that fit into `nbytes`; None in place of the others."""
    fitting: list[HeldSlot | None] = []
    for held in slots:
        if held is not None:
            nbytes -= padded(held.nbytes)
        fitting.append(held if nbytes >= 0 else None)
    return fitting


def _check_skip(keys: Sequence[BlockKey], skip_blocks: int) -> None:
    check_keys(keys)
    if not 0 <= skip_blocks <= len(keys):
        raise InvalidRequest(f"skip_blocks={skip_blocks} of {len(keys)} keys")
