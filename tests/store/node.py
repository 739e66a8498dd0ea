"""A whole store, driven from synchronous tests: real arena, real file tier, its own event loop."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from kvstore.decide.planner import DAEMON_SESSION, Planner
from kvstore.decide.policy import WriteBudget, policy_by_name
from kvstore.format.codec import codec_by_name
from kvstore.metrics import Metrics
from kvstore.model.block import BlockKey, Committed, Grant, Group, Namespace, Part, Span
from kvstore.model.checksum import checksum
from kvstore.model.hint import Hint, HintKind, HintReport
from kvstore.model.keys import KeyChain, root_key
from kvstore.move.deletions import Deletions
from kvstore.move.object_side import Objects
from kvstore.move.pool_side import Pool
from kvstore.move.promote import Promotion
from kvstore.move.write_behind import WriteBehind
from kvstore.settings import LimitSettings, ObjectSettings, PoolSettings
from kvstore.store.store import Store
from kvstore.tier.dram import Arena
from kvstore.tier.file import Devices, Disk
from kvstore.tier.object import ObjectTier
from kvstore.tier.object.connect import connect
from kvstore.tier.pool import PoolTier
from tests.sim.loop import SimLoop
from tests.tier.object.gate import GatedBucket

T = TypeVar("T")
RECORD = 10_000  # not a whole number of pages, on purpose
SPEC = Namespace(2, (Group("full", RECORD), Group("window", 4096, window_tokens=5)), ())
FULL, WINDOW = Part(0, 0), Part(1, 0)


def chain(name: int, blocks: int = 24) -> list[BlockKey]:
    return KeyChain(root_key(SPEC.id), 2).update([name] * 2 * blocks)


def record_bytes(key: BlockKey, part: Part) -> bytes:
    """The one right content of a record, compressible enough for every codec to bother."""
    unit = random.Random(key + bytes(part)).randbytes(100)
    return (unit * 1000)[: SPEC.record_nbytes(part)]


class Node:
    """`with Node(path) as node:`; leave the block to close it, or call `crash`.

    beside: another node, on whose loop this one runs. fine: files and bucket keep fine parts.
    loop: runs it in virtual time. bucket: the folder of an
    object tier, whose requests `gate` holds back if told to. pool: the address of one.
    registers: it knows SPEC from the start.
    """

    def __init__(
        self,
        path: Path | Sequence[Path] | None,
        *,
        arena_bytes: int = 4 << 20,
        file_bytes: int = 64 << 20,
        segment_nbytes: int = 1 << 20,
        codec: str = "raw",
        disk: Disk | None = None,
        loop: SimLoop | None = None,
        bucket: Path | None = None,
        pool: str = "",
        disks: Sequence[Disk] = (),
        hang_s: float = 10.0,
        free_bytes_min: int = 0,
        write_on_demotion: bool = False,
        write_on_second_use: bool = False,
        write_bytes_per_day: int = 0,
        policy: str = "lru",
        fine: bool = False,
        beside: Node | None = None,
        registers: bool = True,
        **limits: Any,
    ) -> None:
        self._registers = registers
        threads = loop.threads if loop else None
        now = self.now = loop.time if loop else time.monotonic
        self._owns_loop = beside is None
        self.loop = beside.loop if beside else loop or asyncio.new_event_loop()
        self.metrics = Metrics()
        self.arena = Arena(arena_bytes, arena_bytes)
        paths = [path] if isinstance(path, Path) else path
        self.file = (
            Devices(
                paths,
                capacity_bytes=file_bytes,
                segment_nbytes=segment_nbytes,
                disks=[disk] if disk else disks,
                hang_s=hang_s,
                free_bytes_min=free_bytes_min,
                executor=threads,
            )
            if paths
            else None
        )
        if bucket:
            where = ObjectSettings(url=f"file://{bucket}")
            self.gate = GatedBucket(connect(where))
            self.objects = ObjectTier(where, self.metrics, bucket=self.gate)
        self.time = 0.0
        self.planner = Planner(
            self.arena,
            self.file.frames if self.file else None,
            now=lambda: self.time,
            dram_policy=policy_by_name(policy),
            file_policy=policy_by_name(policy),
            write_on_demotion=write_on_demotion,
            write_on_second_use=write_on_second_use,
            write_fine_parts=fine,
            write_budget=WriteBudget(write_bytes_per_day, lambda: self.time)
            if write_bytes_per_day
            else None,
        )
        settings = LimitSettings(**limits)
        self.write_behind = WriteBehind(
            self.planner,
            self.arena,
            self.file,
            codec=codec_by_name(codec),
            metrics=self.metrics,
            group_commit_bytes=settings.group_commit_bytes,
            executor=threads,
            now=now,
        )
        self.store = Store(
            arena=self.arena,
            write_behind=self.write_behind,
            planner=self.planner,
            limits=settings,
            metrics=self.metrics,
            now=now,
            objects=self._objects(codec, fine=fine) if bucket else None,
            pool=self._pool(pool) if pool else None,
        )

    def _objects(self, codec: str, *, fine: bool) -> Callable[[Promotion, Deletions], Objects]:
        return lambda promotion, deletions: Objects(
            self.objects,
            self.planner,
            promotion,
            self.arena,
            codec=codec_by_name(codec),
            metrics=self.metrics,
            deletions=deletions,
            fine=fine,
            now=time.monotonic,
        )

    def _pool(self, url: str) -> Callable[[Deletions], Pool]:
        self.pool = PoolTier(PoolSettings(url=url, buffer_bytes=4 << 20), self.metrics, self.now)
        return lambda deletions: Pool(
            self.pool,
            self.planner,
            self.arena,
            deletions=deletions,
            metrics=self.metrics,
            file=self.file,
            now=self.now,
        )

    def __enter__(self) -> Node:
        self.run(self.store.start())
        if self._registers:
            self.store.namespaces.register(SPEC)
        if hasattr(self, "objects"):
            self.run(self.objects.ready(time.monotonic() + 10))
        if hasattr(self, "pool"):
            self.until(lambda: self.pool.up)
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self.store.close())
        if self._owns_loop:
            self.loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        async def bounded() -> T:
            return await asyncio.wait_for(work, 20)

        return self.loop.run_until_complete(bounded())

    def put(
        self,
        keys: Sequence[BlockKey],
        begin: int = 0,
        end: int | None = None,
        *,
        parts: Sequence[Part] = (FULL, WINDOW),
        durable: bool = False,
        damage: bool = False,
        wait_s: float = 0.0,
        session_id: str = "",
    ) -> Committed:
        """Store blocks keys[begin:end] of a prefix, as an engine would."""
        some = keys[begin:end]
        grant = self.run(
            self.store.puts.reserve(
                DAEMON_SESSION,
                SPEC.id,
                some,
                first_block=begin,
                parent=keys[begin - 1] if begin else None,
                spans=tuple(Span(part, 0, len(some)) for part in parts),
                wait_s=wait_s,
                session_id=session_id,
            )
        )
        sums = []
        items = [(key, part) for part in parts for key in some]
        for slot, (key, part) in zip(grant.slots, items, strict=True):
            if slot is not None:
                data = record_bytes(key, part)
                self.store.view(slot)[:] = data
                sums.append(checksum(data) ^ damage)
            else:
                sums.append(0)
        commit = self.store.puts.commit(DAEMON_SESSION, grant.lease_id, sums, durable=durable)
        return self.run(commit)

    def acquire(self, keys: Sequence[BlockKey], **options: Any) -> Grant:
        options.setdefault("wait_s", 5.0)
        return self.run(self.store.gets.acquire(DAEMON_SESSION, SPEC.id, keys, **options))

    def get(self, keys: Sequence[BlockKey], **options: Any) -> int:
        """Acquire a prefix, check every byte of it, release; return the hit in blocks."""
        grant = self.acquire(keys, **options)
        items = [(span.part, keys[i]) for span in grant.spans for i in range(span.begin, span.end)]
        for slot, value, (part, key) in zip(grant.slots, grant.checksums, items, strict=True):
            assert slot is not None
            view = self.store.view(slot)
            assert view == record_bytes(key, part)
            assert checksum(view) == value
            view.release()
        assert self.store.release(DAEMON_SESSION, [grant.lease_id]) == [True]
        return grant.hit_blocks

    def hint(
        self,
        kind: HintKind,
        keys: Sequence[BlockKey] = (),
        session_id: str = "",
        seconds: float = 0.0,
        *,
        bytes_max: int = 0,
        wait_s: float = 5.0,
    ) -> HintReport:
        """Give a hint about a prefix, or a session. seconds: in how many, or for how long."""
        hint = Hint(
            kind=kind,
            session_id=session_id,
            namespace_id=SPEC.id if keys else None,
            keys=keys,
            seconds=seconds,
            bytes_max=bytes_max,
            wait_s=wait_s,
        )
        return self.run(self.store.hints.carry_out(hint))

    def recall(self) -> None:
        """Wait until everything found on disk is indexed."""
        self.run(self.store.report.recalled(10))

    def until(self, condition: Callable[[], bool]) -> None:
        """Let the node work until `condition` holds."""
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline
            self.run(asyncio.sleep(0.001))

    def flush(self) -> bool:
        return self.run(self.store.puts.flush(10))
