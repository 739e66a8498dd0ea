"""`kvstore bench tier --tier object`: the object tier against the library it is built on.

Ours: runs are written with their checksums, then found by a tier that knows nothing yet, read into
memory that was there before while the rest is looked for, and verified. Raw: put and get loops of
obstore on the same server, with the same sizes and as many requests at once; what they read is
thrown away. Both take turns. Then prefixes are looked up that nobody ever stored, twice.

With `encrypted`, the other side is the same tier without a root key, and both look up what is not
there.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from kvstore.format.frame import FrameHeader, FrameKind, RunBlock
from kvstore.metrics import Metrics
from kvstore.model.block import BlockKey, NamespaceId, Part
from kvstore.model.checksum import checksum
from kvstore.model.errors import CorruptBlock, Unavailable
from kvstore.sealing import FileRoot, Sealing
from kvstore.settings import ObjectSettings
from kvstore.testing.seaweed import Seaweed
from kvstore.tier.object import FoundFrame, ObjectRead, ObjectTier, Outcome
from kvstore_bench.store.store import chain
from kvstore_bench.tiers.tier import Say, summed_up

RUN_BLOCKS = 16
WAIT_S = 120.0
LOOKUPS = 1000


@dataclass(frozen=True, slots=True)
class ObjectPlan:
    """What to move: in each round `blocks` records, as objects of RUN_BLOCKS, `depth` at once."""

    record_nbytes: int = 2 << 20
    blocks: int = 96
    rounds: int = 15
    depth: int = 4

    @property
    def objects(self) -> int:
        return max(1, self.blocks // RUN_BLOCKS)

    @property
    def object_nbytes(self) -> int:
        return RUN_BLOCKS * self.record_nbytes


def run(
    plan: ObjectPlan, url: str, endpoint: str, say: Say, *, encrypted: bool = False
) -> dict[str, Any]:
    """Measure on the bucket `url`, or ("") on a SeaweedFS of our own. What was put stays there."""
    with nullcontext(None) if url else Seaweed() as server:
        where: dict[str, Any] = {"url": url, "endpoint": endpoint}
        where["allow_http"] = endpoint.startswith("http://")
        if server is not None:
            say("starting SeaweedFS")
            server.start()
            os.environ.update(server.environment)
            where = server.settings(os.urandom(4).hex())
        settings = ObjectSettings(**where, believed_s=3600.0, requests_max=4 * plan.depth)
        contest = _Contest(plan, settings, say)
        return asyncio.run(contest.run_encrypted() if encrypted else contest.run())


class _Contest:
    """Both sides, on one bucket."""

    def __init__(self, plan: ObjectPlan, settings: ObjectSettings, say: Say) -> None:
        from kvstore.tier.object.bucket import ObstoreBucket, open_store

        self._plan = plan
        self._settings = settings
        self._say = say
        self._store = open_store(settings)  # of both sides
        self._bucket = ObstoreBucket(self._store, settings)
        self._namespace_id = NamespaceId(os.urandom(32))
        rng = np.random.default_rng(0)
        shape = (plan.objects * RUN_BLOCKS, plan.record_nbytes)
        self._records = [memoryview(row) for row in rng.integers(0, 256, shape, np.uint8)]
        self._targets = [memoryview(bytearray(plan.record_nbytes)) for _ in self._records]
        self._body = b"".join(self._records[:RUN_BLOCKS])
        self._sealing = Sealing(FileRoot(os.urandom(32)))

    async def run(self) -> dict[str, Any]:
        speeds = await self._speeds(
            {
                "write": self._write,
                "raw_write": self._raw_write,
                "read": self._read,
                "raw_read": self._raw_read,
            },
            "raw",
        )
        bytes_per_s = summed_up(speeds)
        cold, warm = await self._absent()
        return {
            "read_vs_raw": bytes_per_s["read"]["p50"] / bytes_per_s["raw_read"]["p50"],
            "write_vs_raw": bytes_per_s["write"]["p50"] / bytes_per_s["raw_write"]["p50"],
            "absent_requests_cold": cold,
            "absent_requests_warm": warm,
            "bytes_per_s": bytes_per_s,
            "plan": asdict(self._plan),
        }

    async def run_encrypted(self) -> dict[str, Any]:
        sealing = self._sealing
        speeds = await self._speeds(
            {
                "write": partial(self._write, sealing=sealing),
                "plain_write": self._write,
                "read": partial(self._read, sealing=sealing),
                "plain_read": self._read,
            },
            "plain",
        )
        bytes_per_s = summed_up(speeds)
        cold, warm = await self._absent(sealing)
        plain_cold, plain_warm = await self._absent()
        return {
            "read_vs_plain": bytes_per_s["read"]["p50"] / bytes_per_s["plain_read"]["p50"],
            "write_vs_plain": bytes_per_s["write"]["p50"] / bytes_per_s["plain_write"]["p50"],
            "absent_requests_cold": cold,
            "absent_requests_warm": warm,
            "plain_absent_requests_cold": plain_cold,
            "plain_absent_requests_warm": plain_warm,
            "bytes_per_s": bytes_per_s,
            "plan": asdict(self._plan),
        }

    async def _speeds(
        self, sides: dict[str, Callable[[int], Awaitable[float]]], other: str
    ) -> dict[str, list[float]]:
        """Return bytes/s of each side, of all rounds."""
        speeds: dict[str, list[float]] = {name: [] for name in sides}
        nbytes = self._plan.objects * self._plan.object_nbytes
        for kind in ("write", "read"):
            for number in range(-1, self._plan.rounds):  # the first one warms up
                self._say(f"{kind}: {nbytes >> 20} MiB, {number + 1} of {self._plan.rounds}")
                for name in (kind, f"{other}_{kind}")[:: 1 if number % 2 else -1]:
                    elapsed_s = await sides[name](number)
                    if number >= 0:
                        speeds[name].append(nbytes / elapsed_s)
        return speeds

    def _keys(self, number: int) -> list[BlockKey]:
        return chain(self._namespace_id, len(self._records), salt=number.to_bytes(4, signed=True))

    async def _write(self, number: int, sealing: Sealing | None = None) -> float:
        keys = self._keys(number)
        async with self._opened(sealing) as (tier, _):

            async def put(index: int) -> None:
                at = range(index * RUN_BLOCKS, (index + 1) * RUN_BLOCKS)
                header = await asyncio.to_thread(self._header, keys, at)
                payload = [self._records[i] for i in at]
                await tier.writes.write([(header, payload)], time.monotonic() + WAIT_S)

            return await self._bounded(self._plan.depth, [put] * self._plan.objects)

    def _header(self, keys: Sequence[BlockKey], at: range) -> FrameHeader:
        sums = [checksum(self._records[i]) for i in at]
        nbytes = self._plan.record_nbytes
        return FrameHeader(
            kind=FrameKind.RUN,
            sequence=1,
            namespace_id=self._namespace_id,
            part=Part(0, 0),
            first_block=at.start,
            parent=keys[at.start - 1] if at.start else None,
            blocks=tuple(
                RunBlock(keys[i], nbytes, nbytes, each, each)
                for i, each in zip(at, sums, strict=True)
            ),
        )

    async def _read(self, number: int, sealing: Sealing | None = None) -> float:
        keys = self._keys(number)
        async with self._opened(sealing) as (tier, _):
            began = time.perf_counter()
            deadline = time.monotonic() + WAIT_S
            places = asyncio.Semaphore(self._plan.depth)

            async def bring_up(frame: FoundFrame) -> None:
                header, good = frame.header, [False] * len(frame.header.blocks)

                def verify(index: int) -> None:
                    block = header.blocks[index]
                    good[index] = (
                        checksum(self._targets[header.first_block + index]) == block.raw_checksum
                    )

                async with places:
                    reads = [
                        ObjectRead(
                            frame.location,
                            header.offsets[index],
                            [self._targets[header.first_block + index]],
                            partial(verify, index),
                            (header, index),
                        )
                        for index in range(len(header.blocks))
                    ]
                    if set(await tier.reads.read(reads, deadline)) != {Outcome.READ}:
                        raise Unavailable("an object could not be read")
                if not all(good):
                    raise CorruptBlock("what was read is not what was written")

            looking = tier.lookups.look(
                self._namespace_id, keys, run_blocks=RUN_BLOCKS, deadline=deadline
            )
            blocks, reads = 0, list[asyncio.Task[None]]()
            async for found in looking:
                blocks = found.blocks
                reads += [asyncio.create_task(bring_up(f)) for f in found.frames[len(reads) :]]
            await asyncio.gather(*reads)
            if blocks != len(keys):
                raise Unavailable(f"{blocks} of {len(keys)} blocks were found")
            return time.perf_counter() - began

    async def _raw_write(self, number: int) -> float:
        import obstore

        from kvstore.tier.object.bucket import PART_NBYTES, PARTS_AT_ONCE, WHOLE_NBYTES_MAX

        async def put(index: int) -> None:
            await obstore.put_async(
                self._store,
                f"raw/{number}/{index}",
                self._body,
                use_multipart=len(self._body) > WHOLE_NBYTES_MAX,
                chunk_size=PART_NBYTES,
                max_concurrency=PARTS_AT_ONCE,
            )

        return await self._bounded(self._plan.depth, [put] * self._plan.objects)

    async def _raw_read(self, number: int) -> float:
        import obstore

        from kvstore.tier.object.ranges import PART_NBYTES

        parts = -(-len(self._body) // PART_NBYTES)

        async def get(index: int) -> None:
            name, part = f"raw/{number}/{index // parts}", index % parts
            nbytes = min(PART_NBYTES, len(self._body) - part * PART_NBYTES)
            await obstore.get_range_async(
                self._store, name, start=part * PART_NBYTES, length=nbytes
            )

        return await self._bounded(4 * self._plan.depth, [get] * (parts * self._plan.objects))

    async def _absent(self, sealing: Sealing | None = None) -> tuple[float, float]:
        """Return requests per lookup of prefixes that nobody stored: the first time, and again."""
        self._say(f"looking up {LOOKUPS} prefixes that are not there, twice")
        prefixes = [
            chain(self._namespace_id, 64, salt=b"absent" + number.to_bytes(4))
            for number in range(LOOKUPS)
        ]
        async with self._opened(sealing) as (tier, metrics):
            counts = [_requests(metrics)]
            for _ in range(2):

                async def look(index: int) -> None:
                    deadline = time.monotonic() + WAIT_S
                    await tier.lookups.find(
                        self._namespace_id,
                        prefixes[index],
                        run_blocks=RUN_BLOCKS,
                        deadline=deadline,
                    )

                await self._bounded(16, [look] * LOOKUPS)
                counts.append(_requests(metrics))
        cold, warm = counts[1] - counts[0], counts[2] - counts[1]
        return cold / LOOKUPS, warm / LOOKUPS

    async def _bounded(self, depth: int, jobs: Sequence[Callable[[int], Awaitable[None]]]) -> float:
        """Run `jobs`, each with its number, `depth` at once; return the seconds it took."""
        began = time.perf_counter()
        places = asyncio.Semaphore(depth)

        async def one(index: int) -> None:
            async with places:
                await jobs[index](index)

        await asyncio.gather(*map(one, range(len(jobs))))
        return time.perf_counter() - began

    @asynccontextmanager
    async def _opened(
        self, sealing: Sealing | None = None
    ) -> AsyncIterator[tuple[ObjectTier, Metrics]]:
        metrics = Metrics()
        tier = ObjectTier(self._settings, metrics, bucket=self._bucket, sealing=sealing)
        tier.start()
        try:
            await tier.ready(time.monotonic() + WAIT_S)
            yield tier, metrics
        finally:
            await tier.close()


def _requests(metrics: Metrics) -> float:
    found: dict[str, float] = metrics.totals()["object_requests"]
    return sum(found.values())
