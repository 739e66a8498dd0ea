"""Puts: reservations of empty slots, and publishing what clients have written into them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from kvstore.decide.index import HeldSlot, StoredPart
from kvstore.decide.planner import Reservation, SessionId
from kvstore.decide.planner.leases import DAEMON_SESSION, Lease
from kvstore.decide.slow_log import Waits
from kvstore.model.block import (
    BlockKey,
    Committed,
    Grant,
    Namespace,
    NamespaceId,
    Slot,
    Span,
    check_keys,
    padded,
)
from kvstore.model.errors import InvalidRequest
from kvstore.store.acquire import span_nbytes, write_ahead
from kvstore.store.hints import Hints
from kvstore.store.node import Node
from kvstore.store.room import Waiting
from kvstore.store.staging import Staging
from kvstore.system.steps import in_steps

ROOM_POLL_S = 0.5
BLOCK_INDEX_MAX = (1 << 32) - 1


class _Whose(NamedTuple):
    """Of a call that is over."""

    client: str
    took_s: float
    nbytes: int


class Puts:
    """Reserves and commits. refuses_since: since when every put is refused; None: they are not."""

    def __init__(self, node: Node, hints: Hints) -> None:
        self._node = node
        self._planner = node.planner
        self._write_behind = node.write_behind
        self._leases = node.leases
        self._metrics = node.metrics
        self._now = node.now
        self._hints = hints
        self.waiting_for_room = 0
        self.refuses_since: float | None = None

    async def reserve(
        self,
        session: SessionId,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        *,
        first_block: int,
        parent: BlockKey | None,
        spans: tuple[Span, ...],
        wait_s: float = 0.0,
        session_id: str = "",
        sizes: Sequence[int] = (),
        refined: bool = False,
        copy: bool = False,
        bases: Sequence[int] = (),
    ) -> Grant:
        """Lease empty slots for the records of `spans` that are not stored yet.

        keys are consecutive blocks of one prefix, the first of them block `first_block`, after
        `parent`. Without room it waits up to `wait_s`; what then has no slot is `refused`.
        session_id: of the conversation they belong to, for hints. sizes: of each record, over the
        spans; none: what the namespace says. A fine part has a slot only where its base has one.
        refined: a base that lacks its fine part is not stored, and both are replaced together.
        copy: another host has them as well: they are written to files at their second use only.
        bases: as of `Reservation`.
        """
        client, began, waits = self._leases.check(session).client, self._now(), Waits(self._now)
        self._node.check_spans(namespace_id, keys, spans)
        check_keys(keys)
        namespace = self._planner.namespace(namespace_id)
        if sizes:
            namespace.check_sizes(spans, sizes)
        _check_place(first_block, parent, keys)
        self._check_staged(session, namespace, keys, spans, sizes)
        deadline = self._now() + min(wait_s, self._node.limits.wait_max_s)
        with self._node.in_use(namespace_id):
            with waits.on("recall"):
                await self._node.recall(keys)
            with waits.on("room"):
                held, refused = await self._find_room(
                    session,
                    namespace_id,
                    keys,
                    spans,
                    parent=parent,
                    deadline=deadline,
                    sizes=sizes,
                    refined=refined,
                    bases=bases,
                )
                held, slots, refused = await self._staged(session, held, refused, deadline)
            what = (namespace_id, tuple(keys), first_block, parent, spans, refused)
            write = Reservation(*what, session_id, refined, copy, bases)
            lease = await self._granted(session, held, slots, write)
        whose = _Whose(client, self._now() - began, lease.nbytes)
        self._note_slow(write, whose, waits, "reserved")
        lease_s, varies = self._node.limits.lease_s, namespace.varies
        return Grant(lease.id, lease_s, spans, tuple(slots), refused=refused, varies=varies)

    async def _find_room(
        self,
        session: SessionId,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        spans: tuple[Span, ...],
        *,
        parent: BlockKey | None,
        deadline: float,
        sizes: Sequence[int],
        refined: bool,
        bases: Sequence[int],
    ) -> tuple[Sequence[HeldSlot | None], int]:
        """Return slots, and how many records are refused when the time is over."""
        wanted = sum(map(padded, sizes)) or self._nbytes_of(namespace_id, spans)
        if self._node.ask_room is not None:
            await self._node.ask_room(wanted)
        waiting: Waiting | None = None
        try:
            while True:
                behind = self._planner.dirty.nbytes > self._node.limits.write_behind_bytes_max
                await write_ahead(self._planner, wanted, deadline, self._now)
                placing = self._planner.puts.place(
                    namespace_id, keys, spans, parent, sizes=sizes, refined=refined, bases=bases
                )
                placement = await in_steps(placing)
                if self._planner.dirty.count:  # what has to be written before it may leave
                    self._write_behind.wake()
                short = placement.refused > 0 or behind
                if not short or self._now() >= deadline:
                    break
                self._node.free(placement.held)
                waiting = waiting or self._node.room.enter(wanted)
                await self._wait_for(waiting.look_again, deadline)
                self._leases.check(session)
        finally:
            if waiting is not None:
                waiting.leave()
        held, refused = placement.held, placement.refused
        if behind:
            self._node.free(held)
            is_base = _is_base(self._planner.namespace(namespace_id), spans)
            refused += sum(
                slot is not None and base for slot, base in zip(held, is_base, strict=True)
            )
            held = tuple(None for _ in held)
        if any(held):
            self.refuses_since = None
        elif refused and self.refuses_since is None:
            self.refuses_since = self._now()
        if refused:
            self._metrics.refusals.labels("write_behind" if behind else "no_room").inc(refused)
        return held, refused

    async def _granted(
        self,
        session: SessionId,
        held: Sequence[HeldSlot | None],
        slots: list[Slot | None],
        write: Reservation,
    ) -> Lease:
        """Lease slots that were found for a reservation; they are free again if that fails."""
        try:
            await asyncio.sleep(0)
            lease = self._leases.grant(session, held, write=write)
            self._hints.reserved(write)
        except BaseException:  # the session ended between two steps, or nobody waits any more
            self._node.free(held)
            if self._is_staged(session):
                self._staging.forget(session, slots)
            raise
        if self._is_staged(session):
            self._staging.note(lease.id, session, slots)
        return lease

    def _is_staged(self, session: SessionId) -> bool:
        """Say whether a session writes beside the arena. The daemon itself never does."""
        return self._node.staging is not None and session != DAEMON_SESSION

    @property
    def _staging(self) -> Staging:
        assert self._node.staging is not None
        return self._node.staging

    async def _staged(
        self,
        session: SessionId,
        held: Sequence[HeldSlot | None],
        refused: int,
        deadline: float,
    ) -> tuple[Sequence[HeldSlot | None], list[Slot | None], int]:
        """Return which slots of the arena are to be written, where the session writes what goes
        there, and how many are refused when the time is over."""
        if not self._is_staged(session):
            return held, [each.slot if each is not None else None for each in held], refused
        try:
            while True:
                slots = self._staging.place(session, held)
                short = sum(map(bool, held)) - sum(map(bool, slots))
                if not short or self._now() >= deadline or not self._may_fit(session, held, slots):
                    break
                self._staging.forget(session, slots)
                await self._wait_for(self._change, deadline)
        except BaseException:
            self._node.free(held)
            raise
        if short:
            self._node.free([each for each, slot in zip(held, slots, strict=True) if not slot])
            held = [each if slot else None for each, slot in zip(held, slots, strict=True)]
            self._metrics.refusals.labels("staging").inc(short)
        return held, slots, refused + short

    def _may_fit(
        self, session: SessionId, held: Sequence[HeldSlot | None], slots: Sequence[Slot | None]
    ) -> bool:
        """Say whether one that has no slot in the session's memory may have one later."""
        return any(
            slot is None and each is not None and self._staging.can_take(session, each.nbytes)
            for each, slot in zip(held, slots, strict=True)
        )

    def _check_staged(
        self,
        session: SessionId,
        namespace: Namespace,
        keys: Sequence[BlockKey],
        spans: Sequence[Span],
        sizes: Sequence[int],
    ) -> None:
        """Raise Unavailable if something is to be written and none of it fits into the session's
        memory, ever: nothing may leave the arena for it."""
        if not self._is_staged(session):
            return
        least = min(sizes or [namespace.record_nbytes(span.part) for span in spans], default=0)
        if self._staging.can_take(session, least):
            return
        if None in self._planner.find(namespace.id, keys, spans):
            raise self._staging.too_little(session)

    def _nbytes_of(self, namespace_id: NamespaceId, spans: Sequence[Span]) -> int:
        return span_nbytes(self._planner.namespace(namespace_id), spans)

    async def commit(
        self,
        session: SessionId,
        lease_id: int,
        checksums: Sequence[int],
        *,
        durable: bool = False,
        wait_s: float = 30.0,
    ) -> Committed:
        """Publish what was written into a reservation; `durable` waits for an fdatasync."""
        began, waits = self._now(), Waits(self._now)
        lease = self._leases.reservation(session, lease_id)
        if lease is None or lease.write is None:
            raise InvalidRequest(
                f"no reservation {lease_id} to commit: never reserved, committed before, or expired"
            )
        if len(checksums) != len(lease.held):
            raise InvalidRequest(f"{len(checksums)} checksums for {len(lease.held)} slots")
        write, client = lease.write, self._leases.check(session).client
        # The session may end between two steps; what is published must not be freed by that.
        try:
            with (
                self._node.in_use(write.namespace_id),
                self._planner.pinned([slot for slot in lease.held if slot is not None]),
            ):
                if self._is_staged(session):
                    with waits.on("copy"):
                        await self._staging.copy(lease_id, lease.held, checksums)
                    self._node.room.set()
                new, existing = await in_steps(
                    self._planner.puts.commit(write, lease.held, checksums, durable=durable)
                )
                self._hints.committed(write)
            self._node.arrivals.committed(write.keys)
            self._write_behind.wake()
            await asyncio.sleep(0)
        finally:
            self._leases.release(session, lease_id)
        self._metrics.bytes.labels("dram", "write").inc(lease.nbytes)
        self._node.uses.stored(write.keys, write.parent)
        namespace = self._planner.namespace(write.namespace_id)
        is_base = _is_base(namespace, write.spans)
        unwritten = (
            sum(slot is None and base for slot, base in zip(lease.held, is_base, strict=True))
            - write.refused
        )
        safe = False
        if durable:
            with waits.on("disk"):
                safe = await self._is_safe(write, namespace, wait_s)
        saved = Committed(new, existing + unwritten, write.refused, safe)
        whose = _Whose(client, self._now() - began, lease.nbytes)
        result = "committed" if not durable else "durable" if safe else "not durable"
        self._note_slow(write, whose, waits, result)
        self._node.answers.saved(
            write, saved, block_tokens=namespace.block_tokens, **whose._asdict()
        )
        return saved

    def _note_slow(
        self,
        write: Reservation,
        whose: _Whose,
        waits: Waits,
        result: str,
    ) -> None:
        client, took_s, nbytes = whose
        self._node.slow.note(
            "save",
            took_s,
            waits.seconds,
            blocks=len(write.keys),
            nbytes=nbytes,
            namespace_id=write.namespace_id,
            client=client,
            session_id=write.conversation,
            result=f"{result}, {write.refused} refused" if write.refused else result,
        )

    async def _is_safe(self, write: Reservation, namespace: Namespace, wait_s: float) -> bool:
        """Wait until what was to be written is durable; say whether all of it is."""
        base_spans = [span for span in write.spans if span.part.group not in namespace.fine]
        records = self._planner.find(write.namespace_id, write.keys, base_spans)
        # What was stored already may have left since `reserve` passed it over.
        gone = records.count(None) > write.refused
        return not gone and await self._durable([r for r in records if r is not None], wait_s)

    async def flush(self, wait_s: float) -> bool:
        """Wait until everything committed so far is durable. False: the time ran out, writes
        failed or are beyond their budget, records were lost, or there is no file tier."""
        return await self._write_behind.flush(
            self._now() + min(wait_s, self._node.limits.wait_max_s)
        )

    async def _durable(self, records: Sequence[StoredPart], wait_s: float) -> bool:
        deadline = self._now() + min(wait_s, self._node.limits.wait_max_s)
        last = max((record.dirty for record in records), default=0)
        await self._write_behind.settle(last, deadline)
        return all(record.frame is not None for record in records)

    async def _wait_for(self, room: Callable[[float], Awaitable[None]], deadline: float) -> None:
        """Wait until there may be room, but look again now and then in any case."""
        self.waiting_for_room += 1
        try:
            await room(max(0.0, min(deadline - self._now(), ROOM_POLL_S)))
        finally:
            self.waiting_for_room -= 1

    async def _change(self, wait_s: float) -> None:
        """Wait until there may be room in the memory that a session writes into."""
        changed = self._node.room.changed
        changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await changed.wait()


def _is_base(namespace: Namespace, spans: Sequence[Span]) -> list[bool]:
    """Say of each slot over the spans whether it is of a base part."""
    return [s.part.group not in namespace.fine for s in spans for _ in range(s.begin, s.end)]


def _check_place(first_block: int, parent: BlockKey | None, keys: Sequence[BlockKey]) -> None:
    blocks = len(keys)
    if first_block + blocks - 1 > BLOCK_INDEX_MAX:
        raise InvalidRequest(f"block {first_block} and {blocks} more: beyond 2**32 blocks")
    if parent is not None and parent in keys:
        raise InvalidRequest(
            f"parent {parent.hex()[:8]} is one of the keys: name the block before the first of them"
        )
