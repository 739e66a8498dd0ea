"""One life of the daemon: the real store, planner, moves, arena and file tier on a simulated disk,
and around it what the RPC service does, with the model told of every step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from kvstore.decide.index import StoredPart
from kvstore.decide.planner import DAEMON_SESSION, Planner, SessionId, Write
from kvstore.decide.planner.eviction import Eviction
from kvstore.decide.planner.writes import Writes
from kvstore.format.codec import codec_by_name
from kvstore.format.frame import FOOTER_RECORD_NBYTES_MAX
from kvstore.metrics import Metrics
from kvstore.model.block import PAGE_NBYTES, BlockKey, Committed, Grant, Slot, Span
from kvstore.model.errors import KVStoreError
from kvstore.model.hint import Hint, HintKind
from kvstore.move.deletions import Deletions
from kvstore.move.object_side import Objects
from kvstore.move.promote import Promotion
from kvstore.move.scrub import Scrub
from kvstore.move.write_behind import WriteBehind
from kvstore.sealing import Sealing
from kvstore.settings import LimitSettings
from kvstore.store.history import History
from kvstore.store.sessions import Process
from kvstore.store.store import Store
from kvstore.tier.dram import Arena
from kvstore.tier.file import Devices, FileExtent, Mount
from tests.sim.disk import Platter, SimDisk
from tests.sim.loop import SimLoop
from tests.sim.model import Item, Model, Version, Violation

ARENA_BYTES = 1 << 20
LEASE_S = 0.6
RECALL_S = 30.0
SCRUB_EVERY_S = 1.0
TOMBSTONE_NBYTES = PAGE_NBYTES + FOOTER_RECORD_NBYTES_MAX  # its page, its place in a footer
CHECK_KEYS = 8  # read back in one step: their slots must fit into half of the arena


@dataclass(frozen=True, slots=True)
class Settings:
    """What one seed is about. failing: the chance that the disk refuses a write or a sync.
    rots: a bit flips now and then while the power is off. devices: directories of the file tier;
    of several, one may be missing or fail to read for a while. arena_bytes: much of what is asked
    for has left a small one. fine: the file tier keeps fine parts, if there are some. encrypted:
    the file tier is."""

    devices: int
    file_bytes: int
    codec: str
    failing: float
    rots: bool
    arena_bytes: int = ARENA_BYTES
    fine: bool = False
    encrypted: bool = False

    @classmethod
    def drawn(cls, draw: Random) -> Settings:
        return cls(
            devices=draw.choice([1, 2, 2]),
            file_bytes=draw.choice([16 << 20, 768 << 10]),
            codec=draw.choice(["raw", "raw", "lz4", "zstd"]),
            failing=draw.choice([0.0, 0.0, 0.0, 0.02]),
            rots=draw.random() < 0.2,
            arena_bytes=draw.choice([ARENA_BYTES, ARENA_BYTES // 4]),
            fine=draw.random() < 0.7,
        )


class Framed(NamedTuple):
    """A durable record."""

    checksum: int
    extent: FileExtent
    device: int


class Daemon:
    """Alive from `start` to `die` or `close`. Methods of engines raise KVStoreError."""

    scrub_every_s = SCRUB_EVERY_S

    def __init__(
        self,
        loop: SimLoop,
        platters: Sequence[Platter],
        model: Model,
        draw: Random,
        settings: Settings,
        *,
        new_id: Callable[[], int] | None = None,
        sealing: Sealing | None = None,
        now: Callable[[], float] | None = None,
    ) -> None:
        """sealing: of its file tier, if the settings say that it is encrypted. now: its clock, the
        loop's if none is given."""
        now = now or loop.time
        self._loop = loop
        self._platters = platters
        self._failing = settings.failing
        # What a failed sync or rot left in a frame shows when it is read, by whomever.
        self.keeps_bytes = not settings.failing and not settings.rots
        self.disks = [SimDisk(platter, draw) for platter in platters]
        self.out: dict[Item, Framed] = {}  # durable on devices that are out of use
        self.unread: set[Item] = set()  # given up, though they were durable
        self._expected: dict[Item, Framed] = {}
        self._unread_segments: set[tuple[int, int]] = set()  # of devices when they were out
        self.lost_on_return = 0
        self.taken_out = 0
        self.evicted = 0  # how often frames made room; blocks may have kept other parts
        self.fine_served = 0
        self.lent = False  # its cap of files moves: the world looks at all tenants' together
        self.model = model
        self.space = model.space
        self.arena = Arena(settings.arena_bytes, settings.arena_bytes // 2)
        self.metrics = Metrics()
        limits = LimitSettings(lease_s=LEASE_S, group_commit_bytes=1 << 17)
        file = Devices(
            [Path(f"/sim/{number}") for number in range(len(platters))],
            capacity_bytes=settings.file_bytes,
            segment_nbytes=1 << 17,
            disks=self.disks,
            executor=loop.threads,
            sealing=sealing,
        )
        self.file = file
        self.rewritten: set[Item] = set()  # also on a device that was out at the time
        self.given_up: set[Item] = set()  # written too, but without success
        self.planner = Planner(
            self.arena,
            file.frames,
            now=now,
            run_nbytes_max=file.space.frame_nbytes_max - PAGE_NBYTES,
            write_fine_parts=settings.fine,
        )
        write_behind = _WriteBehind(
            self.planner,
            self.arena,
            file,
            codec=codec_by_name(settings.codec),
            metrics=self.metrics,
            group_commit_bytes=limits.group_commit_bytes,
            executor=loop.threads,
            now=now,
        )
        _tell_evictions(self.planner.eviction, self._evicts)
        _tell(self.planner.writes, "done", self._written)
        _tell(self.planner.writes, "failed", self._failed)
        write_behind.on_withdrawn = self._withdrawn
        self._write_behind = write_behind
        self.store = Store(
            arena=self.arena,
            write_behind=write_behind,
            planner=self.planner,
            limits=limits,
            metrics=self.metrics,
            objects=self.object_side(now),
            now=now,
            clock=now,
            new_id=new_id or partial(draw.randrange, 1, 1 << 63),
            scrub=Scrub(
                self.planner,
                write_behind,
                nbytes_per_s=settings.file_bytes,
                every_s=self.scrub_every_s,
                metrics=self.metrics,
                now=now,
            ),
        )
        # Samples hold measured seconds, so how much room they take would differ from run to run.
        self.store.history = History(self.metrics, None, clock=now)

    def object_side(
        self, now: Callable[[], float]
    ) -> Callable[[Promotion, Deletions], Objects] | None:
        """Return what makes its object tier: none. The planner and the arena are there."""
        return None

    async def start(self, expected: dict[Item, Framed], asked: Sequence[BlockKey]) -> None:
        """Serve, and be asked for some keys, one by one, before everything is indexed.

        Of what is `expected` to be durable, that on missing devices is out.
        """
        await self.store.start()
        for disk in self.disks:
            disk.failing = self._failing
        used = {mount.device for mount in self.file.mounts}
        numbers = [n for n, device in enumerate(self.file.devices) if device not in used]
        self.out = {item: framed for item, framed in expected.items() if framed.device in numbers}
        for number in numbers:
            self._unread_segments |= self._segments(number)
        self._expected = dict(expected)
        self.store.namespaces.register(self.space.spec)
        for key in asked:
            self.store.gets.match(self.space.spec.id, [key])
        await self.store.report.recalled(RECALL_S)

    def pull_the_plug(self) -> None:
        for disk in self.disks:
            disk.dead = True

    def trouble(self, draw: Random) -> None:
        """Let one of several devices fail to read for a while, and a missing one come back."""
        for disk in self.disks if len(self.disks) > 1 else ():
            if disk.away:
                self._loop.call_later(draw.uniform(0, 2), setattr, disk, "away", False)
            elif draw.random() < 0.4:
                at = draw.uniform(0, 1)
                self._loop.call_later(at, setattr, disk, "sick", True)
                self._loop.call_later(at + draw.uniform(0, 2), setattr, disk, "sick", False)

    def calm_disks(self) -> None:
        """Let no disk refuse anything any more."""
        for disk in self.disks:
            disk.failing, disk.away = 0.0, False

    def _written(self, write: Write) -> None:
        items = (Item(block.key, write.part) for block in write.blocks)
        self.rewritten.update(item for item in items if item in self.out)

    def _failed(self, write: Write) -> None:
        items = (Item(block.key, write.part) for block in write.blocks)
        self.given_up.update(item for item in items if item in self.out)

    def _evicts(self) -> None:
        self.evicted += 1

    def _withdrawn(self, mount: Mount) -> None:
        self.taken_out += 1
        suspects = {(tag.number, offset) for tag, offset in mount.tier.health.suspects}
        known = {i: framed for i, framed in self.framed().items() if self._is_proven(i, framed)}
        for item, framed in self.framed().items():
            if self.file.devices[framed.device] is mount.device:
                if framed.extent[:2] not in suspects:
                    self.out[item] = framed
                else:
                    self.model.owed.pop(item, None)  # the disk did not read it: given up
                    self.unread.add(item)
        number = self.file.devices.index(mount.device)
        self._expected |= {i: framed for i, framed in known.items() if framed.device == number}
        self._unread_segments |= self._segments(number)

    def _segments(self, number: int) -> set[tuple[int, int]]:
        names = self._platters[number].names
        return {(number, int(n.partition("-")[0], 16)) for n in names if n.endswith(".segment")}

    def _look_at_returned(self) -> None:
        """See that what was durable on a device that is back is there, unless it was deleted."""
        if self._write_behind.recall.unrecalled_runs:
            return
        framed = self.framed()
        for item, before in list(self.out.items()):
            if self.file.devices[before.device].mount is None:
                continue
            del self.out[item]
            gone = item not in framed and not self.model.may_be_gone(item, before.checksum)
            if gone and not self.evicted and not self.corrupt:
                self.lost_on_return += 1

    def durable(self) -> dict[Item, Framed]:
        """Return what has to survive: what is in frames, and what devices hold that are out of use
        or not indexed yet."""
        self._look_at_returned()
        evicted = self.evicted > 0
        out = {
            item: framed
            for item, framed in self.out.items()
            if not (evicted and self.file.devices[framed.device].mount is not None)
            and not self.model.may_be_gone(item, framed.checksum)
        }
        return out | {
            item: framed for item, framed in self.framed().items() if self._is_proven(item, framed)
        }

    def _is_proven(self, item: Item, framed: Framed) -> bool:
        """Whether a frame is known to be whole. `read_back` saw everything that was there at the
        start; a device that came back later may show what was being freed when the power went."""
        unread = (framed.device, framed.extent.segment) in self._unread_segments
        return not unread or self._expected.get(item) == framed

    # ---- what engines call -------------------------------------------------------------------

    def open(self, token: str) -> int:
        return self.store.sessions.open(token, "sim")

    def join(self, session: int, token: str) -> Process:
        return self.store.sessions.join(SessionId(session), token)

    async def reserve(
        self,
        session: int,
        keys: Sequence[BlockKey],
        begin: int,
        parent: BlockKey | None,
        *,
        spans: tuple[Span, ...],
        sizes: Sequence[int],
        refined: bool,
    ) -> Grant:
        return await self.store.puts.reserve(
            SessionId(session),
            self.space.spec.id,
            keys,
            first_block=begin,
            parent=parent,
            spans=spans,
            wait_s=0.2,
            sizes=sizes,
            refined=refined,
        )

    async def commit(
        self, session: int, lease: int, versions: Sequence[Version | None], *, durable: bool
    ) -> Committed:
        published = self.model.publish(v for v in versions if v is not None)
        sums = [version.checksum if version else 0 for version in versions]
        asked = self.store.puts.commit(SessionId(session), lease, sums, durable=durable, wait_s=2.0)
        try:
            done = await asked
        except KVStoreError:
            self.model.retract(published)
            raise
        if done.durable:
            self._owe(v.item for v in published if v.item.part in self.space.bases)
        return done

    async def acquire(
        self,
        session: int,
        keys: Sequence[BlockKey],
        spans: tuple[Span, ...] | None,
        readers: int,
        *,
        in_files: bool = False,
        refined: bool = False,
    ) -> Grant:
        grant = await self.store.gets.acquire(
            SessionId(session),
            self.space.spec.id,
            keys,
            readers=readers,
            wait_s=0.5,
            spans=spans,
            in_files=in_files,
            refined=refined,
        )
        self.check_grant(keys, grant, refined=refined and spans is None)
        lent = self.store.report.stats()["file"]
        if lent["leased_bytes"] > lent["leased_bytes_max"]:
            raise Violation("leaked", f"{lent['leased_bytes']} bytes of files are leased")
        leased = self.store.report.stats()["dram"]
        if any(grant.slots) and leased["leased_bytes"] > leased["leased_bytes_max"]:
            raise Violation("leaked", f"{leased['leased_bytes']} bytes are leased")
        return grant

    async def hint(self, kind: HintKind, keys: Sequence[BlockKey], seconds: float) -> None:
        hint = Hint(
            kind=kind, namespace_id=self.space.spec.id, keys=keys, seconds=seconds, wait_s=0.2
        )
        await self.store.hints.carry_out(hint)
        pinned = self.store.report.stats()["dram"]
        if pinned["pinned_bytes"] > pinned["pinned_bytes_max"]:
            raise Violation("leaked", f"{pinned['pinned_bytes']} bytes are pinned")

    def release(self, session: int, lease: int) -> bool:
        return self.store.release(SessionId(session), [lease])[0]

    async def delete(self, keys: Sequence[BlockKey]) -> None:
        event = self.model.forget(keys)
        await self.store.deletes.delete(self.space.spec.id, keys)
        self.model.bury(keys, event)

    async def clear(self) -> None:
        event = self.model.forget(self.space.keys)
        await self.store.deletes.clear(self.space.spec.id)
        self.model.bury(self.space.keys, event)

    async def flush(self) -> bool:
        before = {i: record for i, record in self.records() if not self.is_spared(i.key)}
        durable = await self.store.puts.flush(3.0)
        if durable:
            now = dict(self.records())
            self._owe(
                item
                for item, record in before.items()
                if now.get(item) is record and item.part in self.space.bases
            )
        return durable

    def is_spared(self, key: BlockKey) -> bool:
        """Say whether a flush need not write a block: another host has it."""
        return False

    # ---- what is checked ---------------------------------------------------------------------

    def records(self) -> Iterator[tuple[Item, StoredPart]]:
        """Yield what the index holds."""
        for block in self.planner.index:
            for record in block.records:
                yield Item(block.key, record.part), record

    def framed(self) -> dict[Item, Framed]:
        """Return which bases the store says are durable, and where; of one that a refined put has
        replaced, that is the old one at first."""
        numbers = {device: number for number, device in enumerate(self.file.devices)}
        replaced = self.planner._ledger.replaced
        found = {}
        for item, record in self.records():
            kept = replaced.of(record)
            frame, value = (kept.frame, kept.checksum) if kept else (record.frame, record.checksum)
            if item.part in self.space.bases and frame is not None:
                place = frame.extent
                found[item] = Framed(value, place.extent, numbers[place.mount.device])
        return found

    def check(self) -> None:
        """Compare the index with the model. Raises Violation."""
        records = dict(self.records())
        for item, record in records.items():
            version = self.model.check(item, record.checksum)
            base = records.get(item._replace(part=self.space.base_of(item.part)))
            if version.pair and record.resident and (not base or base.checksum != version.pair):
                raise Violation("wrong", "a fine part beside a base of another writer")
        self._look_at_returned()
        framed = self.framed()
        if self.lost_on_return:
            raise Violation(
                "lost", f"{self.lost_on_return} durable records of a device that is back"
            )
        missing = [item for item in self.model.owed if item not in framed and item not in self.out]
        several = len(self.disks) > 1
        lost = [
            i for i in missing if not (several and self.model.may_be_gone(i, self.model.owed[i]))
        ]
        if lost and not self.evicted and not self.corrupt:
            raise Violation("lost", f"{len(lost)} durable records, and nothing was evicted")
        for item in missing:
            del self.model.owed[item]
        # Holes that a power cut made data again leave when all is indexed.
        for device, platter in zip(self.file.devices, self._platters, strict=True):
            if self.lent or device.mount is None or device.mount.tier.recall.unrecalled_runs:
                continue
            space = device.mount.tier.space
            excess = space.segments.physical_nbytes - space.freeing_nbytes - space.capacity_bytes
            if excess > platter.tombstones * TOMBSTONE_NBYTES:
                raise Violation("leaked", f"the file tier is {excess} bytes over its cap")

    @property
    def file_nbytes(self) -> int:
        """Bytes of files on devices in use, less those that are being freed."""
        spaces = [mount.tier.space for mount in self.file.mounts]
        return sum(space.segments.physical_nbytes - space.freeing_nbytes for space in spaces)

    @property
    def tombstones_nbytes(self) -> int:
        """Bytes by which tombstones may exceed the cap."""
        return TOMBSTONE_NBYTES * sum(platter.tombstones for platter in self._platters)

    def shares_turn(self, turn: asyncio.Lock) -> None:
        """Index what was found on disk in turns with other stores."""
        self._write_behind.recall.turn = turn

    @property
    def corrupt(self) -> int:
        """Records dropped because bytes did not match a checksum."""
        places = ("promote", "scrub", "write_behind")
        return int(sum(self.metrics.corrupt_blocks.labels(p)._value.get() for p in places))

    def check_grant(self, keys: Sequence[BlockKey], grant: Grant, *, refined: bool = False) -> None:
        """refined: bases without their fine parts may not be there. What lies in files its reader
        has to look at: whose it is, nobody has seen yet."""
        sums: dict[Item, int] = {}
        places = grant.places or (None,) * len(grant.slots)
        for slot, place, value, item in zip(
            grant.slots, places, grant.checksums, items(keys, grant), strict=True
        ):
            if slot is not None or place is not None:
                version = self.model.check(item, value)
                sums[item] = value
                base = sums.get(item._replace(part=self.space.base_of(item.part)))
                if version.pair and slot is not None and base not in (None, version.pair):
                    raise Violation("wrong", "a fine part is served with another base")
            if slot is not None and place is not None:
                raise Violation("bug", "a record has a slot and a place")
        self.fine_served += sum(item.part in self.space.fine for item in sums)
        for item, value in sums.items():
            if not self.space.needs_fine(item.part, len(self.model.data(value))):
                continue
            if item.key in (chain[0] for chain in self.space.chains):
                raise Violation("wrong", "the first block is not exact")
            fine = self.space.fine[self.space.bases.index(item.part)]
            if refined and item._replace(part=fine) not in sums:
                raise Violation("wrong", "who insists on fine parts got a block without")

    def read_file(self, path: str, offset: int, nbytes: int) -> bytes | None:
        """Read a file as another process does; None: its disk does not answer."""
        number = int(Path(path).parent.name)
        if self.disks[number].away or self.disks[number].sick:
            return None
        file = self._platters[number].names.get(Path(path).name)
        return file.read(offset, nbytes) if file is not None else b""

    async def read_back(self, expected: dict[Item, Framed]) -> None:
        """Read everything; what is `expected` has to be there, unless its device is out of use.

        Of several devices, one that comes back may hold a newer version than was served meanwhile.
        """
        found: dict[Item, int] = {}
        for start in range(0, len(self.space.keys), CHECK_KEYS):
            keys = self.space.keys[start : start + CHECK_KEYS]
            spans = tuple(Span(part, 0, len(keys)) for part in self.space.parts)
            grant = await self.store.gets.acquire(
                DAEMON_SESSION, self.space.spec.id, keys, spans=spans, wait_s=30.0
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
        # What a refined put took the place of may be what is found, or what took it.
        several = len(self.disks) > 1 or bool(self.space.fine)
        lost = [
            item
            for item, framed in expected.items()
            if item not in self.out
            and found.get(item) != framed.checksum
            and not (several and (item in found or self.model.may_be_gone(item, framed.checksum)))
        ]
        if lost and not self.evicted:
            raise Violation("lost", f"{len(lost)} durable records after a restart")

    def read(self, slot: Slot) -> bytes:
        return bytes(self.arena.view(slot))

    def _owe(self, items: Iterator[Item]) -> None:
        """Note what was answered as durable."""
        framed = self.framed()
        for item in items:
            if item in framed:
                self.model.owed[item] = framed[item].checksum
            elif not (self.evicted or item in self.out or item in self.unread):
                raise Violation("lost", "answered as durable, and in no frame")


class _WriteBehind(WriteBehind):
    """Tells when devices go."""

    on_withdrawn: Callable[[Mount], None]

    async def withdrawn(self, mount: Mount) -> None:
        self.on_withdrawn(mount)
        await super().withdrawn(mount)


def _tell(writes: Writes, method: str, told: Callable[[Write], None]) -> None:
    """Call `told` before a method that says what became of a write."""
    real = getattr(writes, method)

    def first_told(write: Write, *args: Any) -> None:
        told(write)
        real(write, *args)

    setattr(writes, method, first_told)


def _tell_evictions(eviction: Eviction, told: Callable[[], None]) -> None:
    """Call `told` after frames have made room."""
    real = eviction.evict_file

    def then_tell(*args: Any) -> int:
        freed = real(*args)
        if freed:
            told()
        return freed

    eviction.evict_file = then_tell  # type: ignore[method-assign]


def items(keys: Sequence[BlockKey], grant: Grant) -> list[Item]:
    """Return what the slots of a grant stand for, in their order."""
    return [Item(keys[i], span.part) for span in grant.spans for i in range(span.begin, span.end)]
