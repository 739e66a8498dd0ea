"""etcd in memory, for the membership driver that ships: away, emptied, slow, on the virtual clock.

Only its calls are replaced (`EtcdCalls`). What the driver makes of silence and of an empty etcd is
its own code.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar

from kvstore.membership.etcd_calls import Grant
from kvstore.model.errors import Unavailable
from kvstore.rpc.etcd import etcd_pb2 as pb

T = TypeVar("T")
CALL_S = 0.003
LOST = 0.01  # of the messages
TICK_S = 0.5  # between two looks at what has expired

CLIENT: ContextVar[tuple[SimEtcd, str]] = ContextVar("client")
"""Which etcd the calls made in this context reach, and from which host."""


@dataclass(slots=True)
class _Key:
    value: bytes
    lease: int
    created: int
    changed: int


@dataclass(slots=True)
class _Lease:
    ttl_s: int
    until: float


class SimEtcd:
    """away: it answers nobody, like one that is stopped. cut_off: hosts that do not reach it.
    emptied: how often it lost everything."""

    def __init__(self, loop: asyncio.AbstractEventLoop, draw: Random) -> None:
        self.away = False
        self.cut_off: set[str] = set()
        self.emptied = 0
        self._missed: dict[str, float] = {}  # by host: when a message did not arrive
        self._loop = loop
        self._draw = draw
        self._keys: dict[bytes, _Key] = {}
        self._past: dict[bytes, list[tuple[int, _Key | None]]] = {}  # from which revision on
        self._leases: dict[int, _Lease] = {}
        self._next_lease = 1
        self._revision = 1
        self._watching: dict[asyncio.Queue[pb.Event], None] = {}

    def empty(self) -> None:
        """Lose everything, as one does that starts again without its data."""
        self.emptied += 1
        self._keys.clear()
        self._past.clear()
        self._leases.clear()
        self._watching.clear()
        self._revision = 1

    def has(self, node: str) -> bool:
        return any(key.endswith(f"/nodes/{node}".encode()) for key in self._keys)

    def missed_at(self, host: str) -> float:
        """Return when a message between etcd and a host did not arrive last."""
        return self._missed.get(host, -math.inf)

    async def expire(self) -> None:
        """Drop what is not renewed. Ends by being cancelled. One that is away loses its time, and
        gives every lease its whole time when it is back."""
        while True:
            await asyncio.sleep(TICK_S)
            now = self._loop.time()
            for lease_id, lease in list(self._leases.items()):
                if self.away:
                    lease.until = now + lease.ttl_s
                elif now > lease.until:
                    self.revoke(lease_id)

    # ---- what calls do, once they have arrived ---------------------------------------------------

    def range(self, request: pb.RangeRequest) -> pb.RangeResponse:
        """Raises Unavailable for a revision that is to come."""
        if request.revision > self._revision:
            raise Unavailable("etcd: mvcc: required revision is a future revision")
        begin, end = request.key, request.range_end or request.key + b"\0"
        there = self._at(request.revision)
        found = [
            self._kv(key, held)
            for key, held in sorted(there.items())
            if begin <= key < end and held.changed >= request.min_mod_revision
        ]
        shown = found[: request.limit] if request.limit else found
        return pb.RangeResponse(
            header=pb.Header(revision=self._revision),
            kvs=[] if request.count_only else shown,
            more=len(shown) < len(found),
            count=len(found),
        )

    def _at(self, revision: int) -> dict[bytes, _Key]:
        """Return the keys as they were at a revision; 0: as they are."""
        if not revision:
            return self._keys
        there = {}
        for key, past in self._past.items():
            held = [each for since, each in past if since <= revision]
            if held and held[-1] is not None:
                there[key] = held[-1]
        return there

    def txn(self, request: pb.TxnRequest) -> pb.TxnResponse:
        holds = all(self._holds(each) for each in request.compare)
        responses = [self._do(op) for op in (request.success if holds else request.failure)]
        header = pb.Header(revision=self._revision)
        return pb.TxnResponse(header=header, succeeded=holds, responses=responses)

    def grant(self, ttl_s: int) -> Grant:
        lease_id, self._next_lease = self._next_lease, self._next_lease + 1
        self._leases[lease_id] = _Lease(ttl_s, self._loop.time() + ttl_s)
        return Grant(lease_id, float(ttl_s))

    def renew(self, lease_id: int) -> bool:
        lease = self._leases.get(lease_id)
        if lease is not None:
            lease.until = self._loop.time() + lease.ttl_s
        return lease is not None

    def revoke(self, lease_id: int) -> None:
        self._leases.pop(lease_id, None)
        for key in [k for k, held in self._keys.items() if held.lease == lease_id]:
            del self._keys[key]
            self._revision += 1
            self._past[key].append((self._revision, None))
            kv = pb.KeyValue(key=key, mod_revision=self._revision)
            self._tell(pb.Event(type=pb.Event.DELETE, kv=kv))

    def watch(self, queue: asyncio.Queue[pb.Event]) -> None:
        self._watching[queue] = None

    def unwatch(self, queue: asyncio.Queue[pb.Event]) -> None:
        self._watching.pop(queue, None)

    @property
    def revision(self) -> int:
        return self._revision

    def _kv(self, key: bytes, held: _Key) -> pb.KeyValue:
        return pb.KeyValue(key=key, value=held.value, lease=held.lease, mod_revision=held.changed)

    def _holds(self, compare: pb.Compare) -> bool:
        held = self._keys.get(compare.key)
        if compare.target == pb.Compare.CREATE:
            return bool((held.created if held else 0) == compare.create_revision)
        if compare.target == pb.Compare.MOD:
            return bool((held.changed if held else 0) == compare.mod_revision)
        assert compare.target == pb.Compare.LEASE
        return bool((held.lease if held else 0) == compare.lease)

    def _do(self, op: pb.RequestOp) -> pb.ResponseOp:
        if op.HasField("request_range"):
            return pb.ResponseOp(response_range=self.range(op.request_range))
        put, held = op.request_put, self._keys.get(op.request_put.key)
        if put.lease not in self._leases:
            raise Unavailable("etcd: requested lease not found")
        self._revision += 1
        created = held.created if held else self._revision
        new = self._keys[put.key] = _Key(put.value, put.lease, created, self._revision)
        self._past.setdefault(put.key, []).append((self._revision, new))
        self._tell(pb.Event(type=pb.Event.PUT, kv=self._kv(put.key, new)))
        return pb.ResponseOp()

    def _tell(self, event: pb.Event) -> None:
        for queue in self._watching:
            queue.put_nowait(event)

    # ---- the way to it ---------------------------------------------------------------------------

    def reaches(self, host: str) -> bool:
        return not self.away and host not in self.cut_off

    async def arrive(self, host: str) -> None:
        """Take as long as a message does; never return if it does not arrive."""
        await asyncio.sleep(self._draw.expovariate(1 / CALL_S))
        if not self.reaches(host) or self._draw.random() < LOST:
            self._missed[host] = self._loop.time()
            await asyncio.Event().wait()


class SimEtcdCalls:
    """In the place of `EtcdCalls`, with the same deadlines."""

    endpoint = "http://etcd:2379"

    def __init__(self, *_: Any) -> None:
        self.failed = 0
        self._etcd, self._host = CLIENT.get()

    async def close(self) -> None:
        """Nothing is open."""

    async def list(
        self, begin: bytes, end: bytes, *, limit: int, timeout_s: float
    ) -> pb.RangeResponse:
        request = pb.RangeRequest(key=begin, range_end=end, limit=limit)
        return await self.range(request, timeout_s=timeout_s)

    async def range(self, request: pb.RangeRequest, *, timeout_s: float) -> pb.RangeResponse:
        return await self._call(lambda: self._etcd.range(request), timeout_s)

    async def txn(self, request: pb.TxnRequest, *, timeout_s: float) -> pb.TxnResponse:
        return await self._call(lambda: self._etcd.txn(request), timeout_s)

    async def grant(self, ttl_s: int, *, timeout_s: float) -> Grant:
        return await self._call(lambda: self._etcd.grant(ttl_s), timeout_s)

    async def revoke(self, lease: int, *, timeout_s: float) -> None:
        await self._call(lambda: self._etcd.revoke(lease), timeout_s)

    async def renew(self, lease: int, *, timeout_s: float) -> bool:
        return await self._call(lambda: self._etcd.renew(lease), timeout_s)

    async def watch(
        self, begin: bytes, end: bytes, *, revision: int, lasts_s: float
    ) -> AsyncGenerator[pb.WatchResponse, None]:
        """Yield what changes. One that began before etcd went away is silent from then on."""
        queue: asyncio.Queue[pb.Event] = asyncio.Queue()
        try:
            async with asyncio.timeout(lasts_s):
                await self._etcd.arrive(self._host)
                if self._etcd.revision >= revision:  # what it would begin with is not kept
                    yield pb.WatchResponse(canceled=True)
                    return
                self._etcd.watch(queue)
                while True:
                    event = await queue.get()
                    await self._etcd.arrive(self._host)
                    yield pb.WatchResponse(events=[event])
        except TimeoutError:
            return
        finally:
            self._etcd.unwatch(queue)

    async def _call(self, work: Callable[[], T], timeout_s: float) -> T:
        """Raises Unavailable if no answer comes in time: it may have been carried out."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._etcd.arrive(self._host)
                result = work()
                await self._etcd.arrive(self._host)
                return result
        except TimeoutError:
            self.failed += 1
            raise Unavailable("no endpoint of cluster.etcd answers") from None
