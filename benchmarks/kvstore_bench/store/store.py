"""`kvstore bench store`: the local path against what the machine could do at best.

Every figure is a ratio taken in one run. Rounds alternate the sides, because a shared machine is
faster in one minute than in the next; a ratio is that of the medians over all rounds.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.synchronize import Event
from typing import TYPE_CHECKING, Any

import grpc.aio
import numpy as np

from kvstore import AsyncClient, Client, Group, Namespace
from kvstore.client.copying import COPY_THREADS
from kvstore.model.block import PAGE_NBYTES, BlockKey, NamespaceId
from kvstore.model.errors import Unavailable
from kvstore.model.keys import root_key
from kvstore.rpc import RPC_VERSION
from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.rpc.v1 import kvstore_pb2_grpc as rpc
from kvstore.testing.daemon import Daemon

if TYPE_CHECKING:  # the stub's asyncio type exists for type checkers only
    from kvstore.rpc.v1.kvstore_pb2_grpc import KVStoreAsyncStub

Say = Callable[[str], None]

MATCH_KEYS = 1000
SMALL_RECORD_NBYTES = 16
FILL_KEYS = 1024
EXTENT_NBYTES = 256 << 20
WRITER_START_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class StorePlan:
    """What to measure. record_nbytes x records is what a round moves. copy_threads: of the client,
    and of the plain copy beside it."""

    records: int = 64
    record_nbytes: int = 2 << 20
    rounds: int = 30
    match_rounds: int = 300
    copy_threads: int = COPY_THREADS
    resident_blocks: int = 0
    writer_s: float = 20.0

    @property
    def arena_nbytes(self) -> int:
        """An arena in which nothing that is measured gets evicted."""
        moved = 3 * self.records * self.record_nbytes
        blocks = self.resident_blocks + 16 * FILL_KEYS
        return -(-(moved + blocks * PAGE_NBYTES) // EXTENT_NBYTES) * EXTENT_NBYTES


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one side, over the rounds."""

    p50: float
    p25: float
    p75: float
    p99: float
    rounds: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """Summarise at least two rounds."""
        quarters = statistics.quantiles(seconds, n=4)
        return cls(
            p50=statistics.median(seconds),
            p25=quarters[0],
            p75=quarters[2],
            p99=float(np.percentile(seconds, 99)),
            rounds=len(seconds),
        )


def run(plan: StorePlan, say: Say) -> dict[str, Any]:
    """Measure a daemon of our own, which keeps everything in DRAM."""
    settings = (f"dram.capacity={plan.arena_nbytes}", f"dram.extent={EXTENT_NBYTES}")
    with Daemon(*settings, file=False) as daemon:
        result = measure(daemon.start().target, plan, say)
        daemon.stop()
    return result


def measure(target: str, plan: StorePlan, say: Say) -> dict[str, Any]:
    """Run everything against the daemon at `target`, whose arena holds `plan.arena_nbytes`."""
    timings: dict[str, Timing] = {}
    with Client(target, name="kvstore bench store", copy_threads=plan.copy_threads) as client:
        await_arena(client, plan.arena_nbytes)
        say(f"copies: {plan.records} x {plan.record_nbytes >> 10} KiB, {plan.rounds} rounds")
        timings |= _copies(client, plan)
        say(f"match of {MATCH_KEYS} keys, {plan.match_rounds} rounds")
        timings |= _matches(client, target, plan)
    result = {
        "local_get_ratio": timings["memcpy"].p50 / timings["get"].p50,
        "local_get_ratio_unverified": timings["memcpy"].p50 / timings["get_unverified"].p50,
        "local_put_ratio": timings["memcpy"].p50 / timings["put"].p50,
        "match_1000_p50_ms": 1e3 * timings["match"].p50,
        "match_1000_vs_empty_rpc": timings["match"].p50 / timings["empty_rpc"].p50,
        "memcpy_gb_per_s": plan.records * plan.record_nbytes / timings["memcpy"].p50 / 1e9,
    }
    if plan.resident_blocks:
        say(f"filling up to {plan.resident_blocks:,} blocks")
        loaded = _loaded_matches(target, plan)
        timings["match_loaded"] = loaded
        result["match_1000_p99_ms"] = 1e3 * loaded.p99
        result["resident_blocks"] = plan.resident_blocks
    seconds = {name: asdict(timing) for name, timing in timings.items()}
    return {**result, "plan": asdict(plan), "seconds": seconds}


class Copies:
    """Put and get of the same bytes, and a plain copy of them by as many threads."""

    def __init__(self, client: Client, plan: StorePlan) -> None:
        draw = np.random.default_rng(0)
        self._client = client
        self._namespace = client.register(bench_namespace("copies", plan.record_nbytes))
        self._source = draw.integers(0, 256, (plan.records, plan.record_nbytes), np.uint8)
        self._target = np.ones_like(self._source)
        self._records, self._targets = views_of(self._source), views_of(self._target)
        self._keys = chain(self._namespace, plan.records)
        self._threads = ThreadPoolExecutor(plan.copy_threads)
        step = -(-plan.records // plan.copy_threads)
        self._shares = [slice(at, at + step) for at in range(0, plan.records, step)]
        self.put()

    def close(self) -> None:
        self._threads.shutdown()

    def memcpy(self) -> None:
        """Copy as the client's threads do, without a daemon and without checksums."""
        list(self._threads.map(self._copy, self._shares))

    def _copy(self, share: slice) -> None:
        np.copyto(self._target[share], self._source[share])

    def get(self, verify: bool = True) -> None:
        targets = self._targets
        if not all(self._client.get_into(self._namespace, self._keys, targets, verify=verify)):
            raise Unavailable("a record that was just stored is missing")

    def put(self) -> None:
        done = self._client.put(self._namespace, self._keys, self._records)
        if done.committed != len(self._keys):
            raise Unavailable(f"the daemon took {done.committed} of {len(self._keys)} records")

    def delete(self) -> None:
        self._client.admin.delete(self._namespace, self._keys)

    def check(self) -> None:
        """Get the records once more, each byte over another one. Raises Unavailable."""
        for verify in (True, False):
            np.invert(self._source, out=self._target)  # no byte is right already
            self.get(verify=verify)
            if not np.array_equal(self._source, self._target):
                raise Unavailable("the records came back wrong")


def _copies(client: Client, plan: StorePlan) -> dict[str, Timing]:
    """Time put and get of the same bytes, beside a plain copy of them."""
    with closing(Copies(client, plan)) as copies:
        sides = {
            "memcpy": copies.memcpy,
            "get": copies.get,
            "get_unverified": lambda: copies.get(verify=False),
            "put": copies.put,
        }
        timings = alternate(sides, plan.rounds, {"put": copies.delete})
        copies.check()
    return timings


def _matches(client: Client, target: str, plan: StorePlan) -> dict[str, Timing]:
    """Time a match of 1000 stored keys beside an RPC of as many bytes that does nothing.

    Both from asyncio; the match goes as every local client's does, the empty call is gRPC's own.
    """
    namespace_id = client.register(bench_namespace("match", SMALL_RECORD_NBYTES))
    keys = chain(namespace_id, MATCH_KEYS)
    client.put(namespace_id, keys, [bytes(SMALL_RECORD_NBYTES)] * MATCH_KEYS)
    nbytes = pb.MatchRequest(namespace_id=namespace_id, keys=b"".join(keys)).ByteSize()
    empty = pb.OpenSessionRequest(rpc_version=RPC_VERSION, client="x" * nbytes)
    seconds: dict[str, list[float]] = {"match": [], "empty_rpc": []}

    async def alternate(remote: AsyncClient) -> None:
        async with grpc.aio.insecure_channel(target) as channel:
            stub: KVStoreAsyncStub = rpc.KVStoreStub(channel)
            for _ in range(plan.match_rounds):
                seconds["match"].append(await _timed_match(remote, namespace_id, keys))
                started = time.perf_counter()
                await stub.OpenSession(empty)
                seconds["empty_rpc"].append(time.perf_counter() - started)

    client.submit(alternate).result()
    return {name: Timing.of(each) for name, each in seconds.items()}


def _loaded_matches(target: str, plan: StorePlan) -> Timing:
    """Time matches while `resident_blocks` are stored and another process writes all it can."""
    with Client(target) as client:
        namespace_id = client.register(bench_namespace("resident", SMALL_RECORD_NBYTES))
        _fill(client, namespace_id, plan.resident_blocks)
        keys = chain(namespace_id, MATCH_KEYS)
        seconds: list[float] = []

        async def ask(remote: AsyncClient) -> None:
            end = time.monotonic() + plan.writer_s
            while time.monotonic() < end:
                seconds.append(await _timed_match(remote, namespace_id, keys))
                await asyncio.sleep(0.002)  # a lookup now and then, as an engine asks

        with _writer(target):
            client.submit(ask).result()
    return Timing.of(seconds)


async def _timed_match(
    remote: AsyncClient, namespace_id: NamespaceId, keys: Sequence[BlockKey]
) -> float:
    started = time.perf_counter()
    match = await remote.match(namespace_id, keys)
    took_s = time.perf_counter() - started
    if match.hit_blocks != MATCH_KEYS:
        raise Unavailable("blocks that were just stored are missing")
    return took_s


@contextmanager
def _writer(target: str) -> Iterator[None]:
    """Put new blocks from another process, as fast as it can."""
    spawn = multiprocessing.get_context("spawn")
    started, stop = spawn.Event(), spawn.Event()
    process = spawn.Process(target=_write_on, args=(target, started, stop), daemon=True)
    process.start()
    try:
        if not started.wait(WRITER_START_TIMEOUT_S):
            raise Unavailable("the writing process did not start")
        yield
    finally:
        stop.set()
        process.join(WRITER_START_TIMEOUT_S)
        if process.is_alive():
            process.kill()


def _write_on(target: str, started: Event, stop: Event) -> None:
    with Client(target, name="kvstore bench store writer") as client:
        namespace_id = client.register(bench_namespace("written", SMALL_RECORD_NBYTES))
        number = 0
        while not stop.is_set():  # the arena is full soon, then every block evicts another one
            keys = chain(namespace_id, FILL_KEYS, salt=number.to_bytes(8))
            client.put(namespace_id, keys, [bytes(SMALL_RECORD_NBYTES)] * FILL_KEYS)
            started.set()
            number += 1


def _fill(client: Client, namespace_id: NamespaceId, count: int) -> None:
    """Store a chain of `count` small blocks; the first of them are what is asked for later."""
    keys = chain(namespace_id, count)
    for start in range(0, count, FILL_KEYS):
        some = keys[start : start + FILL_KEYS]
        parent = keys[start - 1] if start else None
        done = client.put(
            namespace_id,
            some,
            [bytes(SMALL_RECORD_NBYTES)] * len(some),
            first_block=start,
            parent=parent,
        )
        if done.refused:
            raise Unavailable(f"no room for block {start + done.committed:,}")


def alternate(
    sides: Mapping[str, Callable[[], Any]],
    rounds: int,
    before: Mapping[str, Callable[[], Any]] | None = None,
) -> dict[str, Timing]:
    """Time the sides in turns, after one untimed round. before: what a side needs done each time,
    untimed."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    gc.collect()
    gc.disable()
    try:
        for number in range(-1, rounds):
            order = list(sides.items())
            for name, side in order[::-1] if number % 2 else order:
                if before is not None and name in before:
                    before[name]()
                started = time.perf_counter()
                side()
                if number >= 0:
                    seconds[name].append(time.perf_counter() - started)
    finally:
        gc.enable()
    return {name: Timing.of(each) for name, each in seconds.items()}


def await_arena(client: Client, nbytes: int) -> None:
    """Wait until the daemon has prepared its arena; a first touch is ten times slower."""
    client.connect()
    deadline = time.monotonic() + 10 + nbytes / 200e6
    while sum(len(view) for view in client.extents().values()) < nbytes:
        if time.monotonic() > deadline:
            raise Unavailable(
                f"the daemon's arena stays under {nbytes:,} bytes: raise dram.capacity"
            )
        time.sleep(0.05)
    for view in client.extents().values():
        view[::PAGE_NBYTES].tobytes()  # now our own page tables are full, too


def bench_namespace(name: str, record_nbytes: int) -> Namespace:
    group = Group("all", record_nbytes)
    return Namespace(block_tokens=16, groups=(group,), identity=(("bench", name),))


def chain(namespace_id: NamespaceId, count: int, salt: bytes = b"") -> list[BlockKey]:
    """Return keys of one prefix. Hashed without tokens, which would only cost time."""
    key = root_key(namespace_id, salt)
    keys = []
    for _ in range(count):
        key = BlockKey(hashlib.sha256(key).digest())
        keys.append(key)
    return keys


def views_of(array: np.ndarray[Any, np.dtype[np.uint8]]) -> list[memoryview]:
    return [memoryview(row) for row in array]
