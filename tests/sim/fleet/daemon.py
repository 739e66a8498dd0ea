"""One life of a daemon among others: calls for the whole fleet, and what they may take."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar

from kvstore.decide.heads import Heads
from kvstore.decide.planner import DAEMON_SESSION, SessionId
from kvstore.format.codec import codec_by_name
from kvstore.format.frame import FrameHeader
from kvstore.membership.etcd import LIST_S
from kvstore.membership.etcd_deletes import CALL_S
from kvstore.model.block import BlockKey, Grant, NamespaceId, Span
from kvstore.model.errors import KVStoreError
from kvstore.model.member import Origin
from kvstore.move.deletions import Deletions
from kvstore.move.object_side import DELETE_S as BUCKET_DELETE_S
from kvstore.move.object_side import Objects
from kvstore.move.promote import Promotion
from kvstore.move.tenant_peers import DELETE_S
from kvstore.peer.base import NAMED_KEYS_MAX
from kvstore.settings import ObjectSettings
from kvstore.store.deletes import Burial
from kvstore.tier.object import ObjectTier
from tests.sim.daemon import Daemon
from tests.sim.fleet.bucket import SimBucket, SimObjects
from tests.sim.fleet.etcd import SimEtcd
from tests.sim.fleet.network import Network
from tests.sim.fleet.truth import BUCKET, HostModel, Order, Truth
from tests.sim.loop import SimLoop
from tests.sim.model import Item, Violation

ORDER: ContextVar[Order] = ContextVar("order")
T = TypeVar("T")
Frames = Sequence[tuple[FrameHeader, Sequence[memoryview]]]
ACQUIRE_S = 0.5
KEEP_S = 3 * CALL_S + LIST_S  # until etcd keeps a delete, and has said who is there
SLACK_S = 1.5  # for disks and messages that are late, beyond what a call may take
OBJECTS = ObjectSettings(url="file:///sim", grace_s=120.0, believed_s=8.0, collect_every_s=20.0)


@dataclass(slots=True)
class World:
    """What all hosts share. kept_s: for how long etcd keeps deletes."""

    loop: SimLoop
    draw: Random
    network: Network
    etcd: SimEtcd
    objects: SimObjects
    truth: Truth
    note: Callable[[BaseException], None]
    kept_s: float


class FleetDaemon(Daemon):
    """A daemon with other hosts around it: calls for the whole fleet, and what they may take."""

    scrub_every_s = 6.0

    def __init__(
        self, world: World, bucket: SimBucket | None, loop: SimLoop, *args: Any, **more: Any
    ) -> None:
        """bucket: its object tier is there."""
        self.truth = world.truth
        self.note = world.note
        self.fleet_deletes = self.fleet_refused = self.copies = 0
        self._bucket = bucket
        self._clock = loop.time
        super().__init__(loop, *args, **more)
        self._attach()

    def object_side(
        self, now: Callable[[], float]
    ) -> Callable[[Promotion, Deletions], Objects] | None:
        if self._bucket is None:
            return None
        tier = ObjectTier(OBJECTS, self.metrics, bucket=self._bucket, now=now)
        write = tier.writes.write

        async def told_write(frames: Frames, deadline: float) -> Any:
            blocks = [block for header, _ in frames for block in header.blocks]
            self.truth.arrives(BUCKET, [block.raw_checksum for block in blocks])
            return await write(frames, deadline)

        tier.writes.write = told_write  # type: ignore[method-assign]
        return lambda promotion, deletions: Objects(
            tier,
            self.planner,
            promotion,
            self.arena,
            codec=codec_by_name("raw"),
            metrics=self.metrics,
            deletions=deletions,
            fine=True,
            now=now,
        )

    def _attach(self) -> None:
        """Tell the model of every delete and every copy, whoever asks for them."""
        self.planner.index.heads = Heads()
        deletes, puts = self.store.deletes, self.store.puts
        burial, of_files, commit = deletes.burial, deletes.burial_of_files, puts.commit

        def told_burial(
            namespace_id: NamespaceId | None, keys: Sequence[BlockKey] | None
        ) -> Burial:
            return self._told(burial(namespace_id, keys), keys)

        def told_of_files() -> Burial:
            return self._told(of_files(), None)

        async def told_commit(
            session: SessionId, lease_id: int, checksums: Sequence[int], **more: Any
        ) -> Any:
            if session == DAEMON_SESSION:
                self._arrives(lease_id, checksums)
            return await commit(session, lease_id, checksums, **more)

        deletes.burial = told_burial  # type: ignore[method-assign]
        deletes.burial_of_files = told_of_files  # type: ignore[method-assign]
        puts.commit = told_commit  # type: ignore[method-assign]

    def _told(self, burial: Burial, keys: Sequence[BlockKey] | None) -> Burial:
        """Have a delete on this host tell the model, in the step in which it forgets. It is run
        until it is done, and forgets once: what is put meanwhile stays."""
        gone = self.space.keys if keys is None else keys
        run, forget, begun = burial.run, burial._forget_in_steps, list[int]()

        async def told_forget(came: list[BlockKey]) -> None:
            if not begun:
                begun.append(self._forget(gone))
            await forget(came)

        async def told_run() -> int:
            deleted = await run()
            self.model.bury(gone, begun[0])
            return deleted

        burial._forget_in_steps = told_forget  # type: ignore[method-assign]
        burial.run = told_run  # type: ignore[method-assign]
        return burial

    def _forget(self, keys: Collection[BlockKey]) -> int:
        """Note that a delete is carried out. What a disk has that is out of use may be gone, too,
        even if the same bytes come again from a host that no delete has reached."""
        gone = set(keys)
        self.out = {item: framed for item, framed in self.out.items() if item.key not in gone}
        return self.model.forget(keys)

    def _arrives(self, lease_id: int, checksums: Sequence[int]) -> None:
        """Look at a copy before it is published: are its bytes what was put under its key?"""
        lease = self.store._leases.reservation(DAEMON_SESSION, lease_id)
        if lease is None or lease.write is None:
            return
        model = self.model
        assert isinstance(model, HostModel)
        keys, spans = lease.write.keys, lease.write.spans
        named = [Item(keys[at], part) for part, begin, end in spans for at in range(begin, end)]
        came = []
        for item, held, value in zip(named, lease.held, checksums, strict=True):
            if held is None:
                continue
            version = self.truth.versions.get(value)
            if version is None or version.item != item or self.read(held.slot) != version.data:
                self.note(Violation("wrong", "a copy has other bytes than were put"))
            else:
                came.append(value)
        self.copies += len(came)
        model.arrives(came)

    async def timed(self, what: str, limit_s: float, work: Awaitable[T]) -> T:
        """Carry a call out; one that takes longer than it may is hung."""
        began = self._clock()
        try:
            return await work
        finally:
            took_s = self._clock() - began
            if took_s > limit_s + SLACK_S:
                self.note(Violation("hung", f"{what} took {took_s:.1f} s of {limit_s:.1f}"))

    async def acquire(
        self,
        session: int,
        keys: Sequence[BlockKey],
        spans: tuple[Span, ...] | None,
        readers: int,
        *,
        in_files: bool = False,
        refined: bool = False,
        origin: Origin | None = None,
        recompute_s: float = 0.0,
    ) -> Grant:
        asked = self.store.gets.acquire(
            SessionId(session),
            self.space.spec.id,
            keys,
            readers=readers,
            wait_s=ACQUIRE_S,
            spans=spans,
            in_files=in_files,
            refined=refined,
            origin=origin,
            recompute_s_per_block=recompute_s,
        )
        grant = await self.timed("acquire", ACQUIRE_S, asked)
        self.check_grant(keys, grant, refined=refined and spans is None)
        return grant

    def is_spared(self, key: BlockKey) -> bool:
        return key in self.planner._ledger.copies

    async def delete(self, keys: Sequence[BlockKey]) -> None:
        await self.store.deletes.delete(self.space.spec.id, keys)

    async def clear(self) -> None:
        await self.store.deletes.clear(self.space.spec.id)

    async def delete_everywhere(self, keys: Sequence[BlockKey]) -> None:
        work = self.store.deletes.delete_everywhere(self.space.spec.id, keys)
        await self._everywhere(keys, work)

    async def clear_everywhere(self, *, all_namespaces: bool) -> None:
        namespace_id = None if all_namespaces else self.space.spec.id
        await self._everywhere(self.space.keys, self.store.deletes.clear_everywhere(namespace_id))

    async def _everywhere(self, keys: Sequence[BlockKey], work: Awaitable[int]) -> None:
        order = self.truth.begin(keys)
        ORDER.set(order)  # for the tasks that carry it out
        limit_s = KEEP_S + DELETE_S * math.ceil(len(keys) / NAMED_KEYS_MAX)
        limit_s = max(limit_s, BUCKET_DELETE_S if self._bucket is not None else 0.0)
        try:
            await self.timed("a fleet's delete", limit_s, work)
        except KVStoreError:
            self.fleet_refused += 1
            raise
        else:
            self.fleet_deletes += 1
            self.truth.finish(order)
        finally:
            self.truth.failed(order)
