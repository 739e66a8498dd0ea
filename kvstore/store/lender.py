"""What this node lends to other hosts: what lies in its arena, and in its files as it was put.

Strangers displace nothing for that: what is in a file is read from there. Only what was compressed
or encrypted on its way to the disk is brought up first.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Sequence

import numpy as np

from kvstore.decide.heads import Heads
from kvstore.decide.planner import DAEMON_SESSION, is_readable
from kvstore.model.block import BlockKey, Namespace, NamespaceId, Span, check_keys
from kvstore.model.errors import Unavailable, UnknownNamespace
from kvstore.model.member import NodeId
from kvstore.move.file_leases import FileLeases
from kvstore.move.promote import Promotion
from kvstore.peer.base import (
    CHANGES_MAX,
    HEADS_WAIT_S_MAX,
    HeadsAsk,
    HeadsReply,
    LentRecord,
    Loan,
    PeerBusy,
    PeerMatch,
)
from kvstore.store.acquire import Acquisition
from kvstore.store.deletes import Deletes
from kvstore.store.gets import within
from kvstore.store.head_snapshots import HeadSnapshots
from kvstore.store.node import Node
from kvstore.store.sessions import Namespaces
from kvstore.system.bandwidth import Lane

BRING_UP_S = 1.0
BUSY_S = 0.05  # an engine that copies takes its next lease, or gives one back, within that
SOON_S = 0.04  # less than a peer waits for an answer
TURN_S = 1.0  # for the bandwidth of a tenant


class StoreLoan:
    """One lease of the daemon's own, on what another host reads."""

    def __init__(
        self,
        node: Node,
        lease_id: int,
        records: Sequence[LentRecord | None],
        released: Callable[[], None],
    ) -> None:
        self.records = records
        self._released = released
        self._node = node
        self._lease_id = lease_id
        self._held: bool | None = None

    def held(self) -> bool:
        if self._held is None:
            self._held = self._node.leases.release(DAEMON_SESSION, self._lease_id)
        return self._held

    def release(self) -> None:
        if self.held():
            self._node.room.set()
        self._released()


class StoreLender:
    """One store, as other hosts see it."""

    def __init__(
        self,
        node: Node,
        *,
        namespaces: Namespaces,
        promotion: Promotion,
        acquisition: Acquisition,
        file_leases: FileLeases,
        deletes: Deletes,
        instance: str,
    ) -> None:
        """instance: of this start of the daemon."""
        self._instance = instance
        heads = node.planner.index.heads
        self._heads = heads if heads is not None else Heads()
        self._snapshots = HeadSnapshots(self._heads, node.now)
        self._changed = asyncio.Event()
        self._heads.on_change = self._changed.set
        self._node = node
        self._planner = node.planner
        self._namespaces = namespaces
        self._promotion = promotion
        self._acquisition = acquisition
        self._file_leases = file_leases
        self._deletes = deletes
        self._loans = 0
        self._none_lent = asyncio.Event()
        self.lane: Lane | None = None  # of a tenant among several
        self.may_lend: Callable[[], bool] = lambda: True
        self._lent_until = math.inf  # as far as those who asked have seen
        self.on_delete: Callable[[], None] = lambda: None

    async def _lends_soon(self) -> bool:
        """Say whether this daemon lends. One that was registered anew needs a few milliseconds to
        apply what was deleted meanwhile: that is waited for, else it costs whoever asks a miss. If
        it takes longer, nobody waits any more."""
        if self.may_lend():
            self._lent_until = math.inf
            return True
        self._lent_until = min(self._lent_until, self._node.now())
        until = self._lent_until + SOON_S
        while not (lends := self.may_lend()) and self._node.now() < until:  # noqa: ASYNC110
            await asyncio.sleep(SOON_S / 8)
        return lends

    def engines_busy(self) -> bool:
        return self._node.now() - self._node.leases.engines_at < BUSY_S

    def register(self, namespace: Namespace) -> None:
        self._namespaces.register(namespace)

    async def match(
        self, namespace_id: NamespaceId, keys: Sequence[BlockKey], skip_blocks: int, refined: bool
    ) -> PeerMatch:
        check_keys(keys)
        if not await self._lends_soon():
            return PeerMatch(0, 0, busy=True)
        with self._node.in_use(namespace_id):
            await self._node.recall(keys)
            match = self._planner.match(namespace_id, keys, skip_blocks, refined=refined)
            return PeerMatch(match.hit_blocks, match.resident_blocks)

    async def arrival(
        self, namespace_id: NamespaceId, keys: Sequence[BlockKey], spans: Sequence[Span]
    ) -> None:
        self._node.check_spans(namespace_id, keys, spans)

        def missing() -> list[BlockKey]:
            found = iter(self._planner.find(namespace_id, keys, spans))
            return [
                key for _, begin, end in spans for key in keys[begin:end] if next(found) is None
            ]

        with self._node.in_use(namespace_id):
            await self._node.recall(keys)
            try:
                await self._node.arrivals.wait(keys, missing)
            except Unavailable as error:
                raise PeerBusy(str(error)) from error

    async def lend(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        spans: Sequence[Span],
        refined: bool,
        borrower: NodeId,
    ) -> Loan:
        check_keys(keys)
        if not await self._lends_soon():
            raise PeerBusy("it has not applied the deletes of the fleet yet", reason="deletes")
        self._node.check_spans(namespace_id, keys, spans)
        with self._node.in_use(namespace_id):
            await self._node.recall(keys)
            records = self._planner.find(namespace_id, keys, spans)
            if self.lane is not None:
                await self._turn(sum(record.nbytes for record in records if record is not None))
                records = self._planner.find(namespace_id, keys, spans)
            if any(r is not None and r.resident is None and not is_readable(r) for r in records):
                await self._promotion.promote(
                    namespace_id, keys, spans, self._node.now() + BRING_UP_S, in_files=True
                )
                records = self._planner.find(namespace_id, keys, spans)
            room = self._acquisition.room_bytes
            held = within(room, [r.resident if r is not None else None for r in records])
            lent = self._file_leases.places(records, held)
            try:
                lease = self._node.leases.grant(
                    DAEMON_SESSION, held, frames=lent.frames, borrower=borrower
                )
            except Unavailable as error:  # it reads too slowly: others are not refused for that
                raise PeerBusy(str(error)) from error
        lent_records: list[LentRecord | None] = []
        for record, slot, place in zip(records, held, lent.places, strict=True):
            if record is None or (slot is None and place is None):
                lent_records.append(None)
                continue
            view = self._node.arena.view(slot.slot).toreadonly() if slot is not None else None
            lent_records.append(LentRecord(record.checksum, record.nbytes, view, place))
        self._loans += 1
        return StoreLoan(self._node, lease.id, lent_records, self._given_back)

    async def _turn(self, nbytes: int) -> None:
        """Wait until the tenant may move so much. Raises PeerBusy."""
        assert self.lane is not None
        try:
            await self.lane.take(nbytes, TURN_S)
        except Unavailable as error:
            raise PeerBusy(str(error)) from error

    def _given_back(self) -> None:
        self._loans -= 1
        if not self._loans:
            self._none_lent.set()

    async def given_back(self) -> None:
        """Return when nothing is lent any more. No read takes longer than `peer.lending` lets it,
        half a minute."""
        while self._loans:
            self._none_lent.clear()
            await self._none_lent.wait()

    async def heads(self, ask: HeadsAsk) -> HeadsReply:
        if ask.instance == self._instance and ask.since >= 0:
            changes = await self._changes(ask)
            if changes is not None:
                return changes
        begin = ask.cursor if ask.instance == self._instance and ask.since < 0 else 0
        snapshot = await self._snapshots.at(ask.level, goes_on=bool(begin))
        heads, cursor = snapshot.chunk(begin)
        return HeadsReply(self._instance, ask.level, snapshot.number, True, cursor, heads)

    async def _changes(self, ask: HeadsAsk) -> HeadsReply | None:
        """Answer what has changed since, waiting for the first; None: that is not kept any more."""
        if ask.since == self._heads.number:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(ask.wait_s, HEADS_WAIT_S_MAX)):
                    await self._changed.wait()
        changes = self._heads.since(ask.since, CHANGES_MAX)
        if changes is None:
            return None
        told = [each for each in changes if each.level >= ask.level]
        return HeadsReply(
            self._instance,
            ask.level,
            ask.since + len(changes),
            snapshot=False,
            heads=np.array([each.head for each in told], dtype="<u8").tobytes(),
            came=bytes(each.came for each in told),
        )

    async def corrupt(self, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> None:
        await self._deletes.drop_wrong(namespace_id, keys)

    async def delete(
        self, namespace_id: NamespaceId | None, keys: Sequence[BlockKey] | None
    ) -> None:
        self._deletes.forbid(namespace_id, keys)
        self.on_delete()
        if keys is None:
            await self._deletes.clear(namespace_id)
        elif namespace_id is not None:
            try:
                await self._deletes.delete(namespace_id, keys)
            except UnknownNamespace:  # a directory that is out of use may have blocks of it
                await self._deletes.burial(namespace_id, keys).run()
