"""One life of the daemon: the real store, planner, mover, arena and file tier on a simulated disk,
and around it what the RPC service does: ids of this life, and the model told of every step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import NamedTuple

from kvstore.block import PAGE_NBYTES, BlockKey, Committed, Grant, Slot, Span
from kvstore.codec import codec_by_name
from kvstore.config import LimitSettings
from kvstore.errors import KVStoreError
from kvstore.frame import FOOTER_RECORD_NBYTES_MAX
from kvstore.index import StoredPart
from kvstore.mover import Mover
from kvstore.obs import Metrics
from kvstore.planner import DAEMON_SESSION, Planner, SessionId
from kvstore.scrub import Scrub
from kvstore.store import Member, Store
from kvstore.tier.dram import Arena
from kvstore.tier.file import FileExtent, FileTier
from kvstore.transport.messages import Epoch
from tests.sim.disk import Platter, SimDisk
from tests.sim.loop import SimLoop
from tests.sim.model import KEYS, PARTS, SPEC, Item, Model, Version, Violation

ARENA_BYTES = 1 << 20
LEASE_S = 0.6
RECALL_S = 30.0
SCRUB_EVERY_S = 3.0
CHECK_KEYS = 8  # read back in one step: their slots must fit into half of the arena


@dataclass(frozen=True, slots=True)
class Settings:
    """What one seed is about. failing: the chance that the disk refuses a write or a sync.
    rots: a bit flips now and then while the power is off."""

    file_bytes: int
    codec: str
    failing: float
    rots: bool

    @classmethod
    def drawn(cls, draw: Random) -> Settings:
        return cls(
            file_bytes=draw.choice([16 << 20, 768 << 10]),
            codec=draw.choice(["raw", "raw", "lz4", "zstd"]),
            failing=draw.choice([0.0, 0.0, 0.0, 0.02]),
            rots=draw.random() < 0.2,
        )


class Framed(NamedTuple):
    """A durable record."""

    checksum: int
    extent: FileExtent


class Daemon:
    """Alive from `start` to `die` or `close`. Methods of engines raise KVStoreError."""

    def __init__(
        self, loop: SimLoop, platter: Platter, model: Model, draw: Random, settings: Settings
    ) -> None:
        self._platter = platter
        self._failing = settings.failing
        self.disk = SimDisk(platter, draw)
        self.model = model
        self.arena = Arena(ARENA_BYTES, ARENA_BYTES // 2)
        self.metrics = Metrics()
        self._epoch = Epoch(f"{draw.random()}", draw.getrandbits(62), draw.getrandbits(31))
        limits = LimitSettings(lease_s=LEASE_S, group_commit_bytes=1 << 17)
        file = FileTier(
            Path("/sim"),
            capacity_bytes=settings.file_bytes,
            segment_nbytes=1 << 17,
            disk=self.disk,
            executor=loop.threads,
        )
        self.file = file
        self.planner = Planner(
            self.arena, file, now=loop.time, run_nbytes_max=file.max_frame_nbytes - PAGE_NBYTES
        )
        mover = Mover(
            self.planner,
            self.arena,
            file,
            codec=codec_by_name(settings.codec),
            metrics=self.metrics,
            group_commit_bytes=limits.group_commit_bytes,
            executor=loop.threads,
            now=loop.time,
        )
        self.store = Store(
            arena=self.arena,
            mover=mover,
            planner=self.planner,
            limits=limits,
            metrics=self.metrics,
            now=loop.time,
            scrub=Scrub(
                self.planner,
                mover,
                nbytes_per_s=settings.file_bytes,
                every_s=SCRUB_EVERY_S,
                metrics=self.metrics,
                now=loop.time,
            ),
        )

    async def start(self, asked: Sequence[BlockKey] = ()) -> None:
        """Serve, and be asked for some keys, one by one, before everything is indexed."""
        await self.store.start()
        self.disk.failing = self._failing
        self.store.register(SPEC)
        for key in asked:
            self.store.match(SPEC.id, [key])
        await self.store.recalled(RECALL_S)

    # ---- what engines call -------------------------------------------------------------------

    def open(self, token: str) -> int:
        return self._epoch.id_out(self.store.open_session(token, "sim"))

    def join(self, session: int, token: str) -> Member:
        return self.store.join(self._in(session), token)

    async def reserve(
        self, session: int, keys: Sequence[BlockKey], begin: int, parent: BlockKey | None
    ) -> Grant:
        spans = tuple(Span(part, 0, len(keys)) for part in PARTS)
        return await self.store.reserve(
            self._in(session),
            SPEC.id,
            keys,
            first_block=begin,
            parent=parent,
            spans=spans,
            wait_s=0.2,
        )

    async def commit(
        self, session: int, lease: int, versions: Sequence[Version | None], *, durable: bool
    ) -> Committed:
        published = self.model.publish(v for v in versions if v is not None)
        sums = [version.checksum if version else 0 for version in versions]
        asked = self.store.commit(self._in(session), lease, sums, durable=durable, wait_s=2.0)
        try:
            done = await asked
        except KVStoreError:
            self.model.retract(published)
            raise
        if done.durable:
            self._owe(v.item for v in published)
        return done

    async def acquire(
        self, session: int, keys: Sequence[BlockKey], spans: tuple[Span, ...] | None, readers: int
    ) -> Grant:
        grant = await self.store.acquire(
            self._in(session), SPEC.id, keys, readers=readers, wait_s=0.5, spans=spans
        )
        self.check_grant(keys, grant)
        leased = self.store.stats()["dram"]
        if any(grant.slots) and leased["leased_bytes"] > ARENA_BYTES // 2:
            raise Violation("leaked", f"{leased['leased_bytes']} bytes are leased")
        return grant

    def release(self, session: int, lease: int) -> bool:
        return self.store.release(self._in(session), [lease])[0]

    async def delete(self, keys: Sequence[BlockKey]) -> None:
        event = self.model.forget(keys)
        await self.store.delete(SPEC.id, keys)
        self.model.bury(keys, event)

    async def clear(self) -> None:
        event = self.model.forget(KEYS)
        await self.store.clear(SPEC.id)
        self.model.bury(KEYS, event)

    async def flush(self) -> bool:
        before = dict(self.records())
        durable = await self.store.flush(3.0)
        if durable:
            now = dict(self.records())
            self._owe(item for item, record in before.items() if now.get(item) is record)
        return durable

    # ---- what is checked ---------------------------------------------------------------------

    def records(self) -> Iterator[tuple[Item, StoredPart]]:
        """Yield what the index holds."""
        for block in self.planner.index:
            for part, record in block.parts.items():
                yield Item(block.key, part), record

    def framed(self) -> dict[Item, Framed]:
        """Return what the store says is durable, and where."""
        return {
            item: Framed(record.checksum, record.frame.extent)
            for item, record in self.records()
            if record.frame is not None
        }

    def check(self) -> None:
        """Compare the index with the model. Raises Violation."""
        for item, record in self.records():
            self.model.check(item, record.checksum)
        framed = self.framed()
        lost = [item for item in self.model.owed if item not in framed]
        if lost and not self.planner.counts.evicted_file and not self.corrupt:
            raise Violation("lost", f"{len(lost)} durable records, and nothing was evicted")
        for item in lost:
            del self.model.owed[item]
        # Tombstones may exceed the cap, each by its page and its place in a footer.
        excess = self.file.physical_nbytes - self.file.freeing_nbytes - self.file.capacity_bytes
        if excess > self._platter.tombstones * (PAGE_NBYTES + FOOTER_RECORD_NBYTES_MAX):
            raise Violation("leaked", f"the file tier is {excess} bytes over its cap")

    @property
    def corrupt(self) -> int:
        """Records dropped because bytes did not match a checksum."""
        places = ("promote", "write_behind")
        return int(sum(self.metrics.corrupt_blocks.labels(p)._value.get() for p in places))

    def check_grant(self, keys: Sequence[BlockKey], grant: Grant) -> None:
        for slot, value, item in zip(grant.slots, grant.checksums, items(keys, grant), strict=True):
            if slot is not None:
                self.model.check(item, value)

    async def read_back(self, expected: dict[Item, int]) -> None:
        """Read everything; what is `expected` has to be there, with these checksums."""
        found: dict[Item, int] = {}
        for start in range(0, len(KEYS), CHECK_KEYS):
            keys = KEYS[start : start + CHECK_KEYS]
            spans = tuple(Span(part, 0, len(keys)) for part in PARTS)
            grant = await self.store.acquire(
                DAEMON_SESSION, SPEC.id, keys, spans=spans, wait_s=30.0
            )
            self.check_grant(keys, grant)
            for slot, value, item in zip(
                grant.slots, grant.checksums, items(keys, grant), strict=True
            ):
                if slot is not None:
                    found[item] = value
                    if self.read(slot) != self.model.check(item, value).data:
                        raise Violation("wrong", "a record does not have the bytes that were put")
            self.store.release(DAEMON_SESSION, [grant.lease_id])
        lost = [item for item, value in expected.items() if found.get(item) != value]
        if lost and not self.planner.counts.evicted_file:
            raise Violation("lost", f"{len(lost)} durable records after a restart")

    def read(self, slot: Slot) -> bytes:
        return bytes(self.arena.view(slot))

    def _owe(self, items: Iterator[Item]) -> None:
        """Note what was answered as durable."""
        framed = self.framed()
        for item in items:
            if item in framed:
                self.model.owed[item] = framed[item].checksum
            elif not self.planner.counts.evicted_file:
                raise Violation("lost", "answered as durable, and in no frame")

    def _in(self, session: int) -> SessionId:
        return SessionId(self._epoch.id_in(session))


def items(keys: Sequence[BlockKey], grant: Grant) -> list[Item]:
    """Return what the slots of a grant stand for, in their order."""
    return [Item(keys[i], span.part) for span in grant.spans for i in range(span.begin, span.end)]
