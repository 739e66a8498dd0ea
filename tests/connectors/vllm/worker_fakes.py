"""Pages and a client that do what a test says."""

from __future__ import annotations

import asyncio
import queue
import threading
from concurrent.futures import Future
from types import SimpleNamespace

from kvstore import (
    BlockKey,
    Committed,
    Grant,
    Group,
    Match,
    Namespace,
    Slot,
    checksum,
)
from kvstore.model.outcome import Ready
from kvstore_kernels.codec.copies import Decoded
from kvstore_vllm.metadata import LossySizes
from kvstore_vllm.pages import Encoded
from kvstore_vllm.prefill import HostEvent

RECORD = 64


NAMESPACE = Namespace(
    block_tokens=4,
    groups=(Group("a", RECORD, shards=2), Group("b", RECORD, shards=2)),
    identity=(("model", "test"),),
)


class FakePages:
    """Device blocks as byte strings; copies can be held open."""

    record_nbytes = raw_nbytes = (RECORD, RECORD)
    writers = 2
    coded = False
    lossy = ()
    bounced_nbytes = 0

    def __init__(self) -> None:
        self.blocks = {(g, b): bytes([g * 100 + b]) * RECORD for g in (0, 1) for b in range(50)}
        self.gate = threading.Event()
        self.gate.set()
        self.copying = threading.Event()
        self.error: Exception | None = None

    def enter_thread(self) -> None: ...

    def mark(self) -> None: ...

    def event(self) -> HostEvent:
        return HostEvent()

    def read(self, group, blocks, records, after):
        self.copying.set()
        self.gate.wait(10)
        if self.error:
            raise self.error
        for block, record in zip(blocks, records, strict=True):
            record[:] = self.blocks[group, block]
        return map(checksum, records)

    def write(self, group, blocks, records, after):
        self.gate.wait(10)
        if self.error:
            raise self.error
        for block, record in zip(blocks, records, strict=True):
            self.blocks[group, block] = bytes(record)
        return [checksum(record) for record in records]

    def close(self) -> None: ...


class CodedPages(FakePages):
    """The same with records that are encoded before there are slots: as they are."""

    coded = True
    encoded_nbytes_max = 1 << 20

    def __init__(self) -> None:
        super().__init__()
        self.encoded: list[tuple[int, int]] = []

    def encode(self, group, blocks, after, exact=()):
        self.copying.set()
        self.gate.wait(10)
        self.encoded += [(group, block) for block in blocks]
        return [Encoded(memoryview(self.blocks[group, block]), None) for block in blocks]

    def store(self, group, parts):
        for record, view in parts:
            view[:] = record
        return [checksum(view) for _, view in parts]


class LossyPages(FakePages):
    """The same with fine parts, which only count: those that match their checksums are used."""

    coded = True
    lossy = (LossySizes(RECORD, RECORD), LossySizes(RECORD, RECORD))

    def refine(self, group, blocks, records, fines, after):
        return [
            Decoded(sum_, None if fine is None else checksum(fine.record) == fine.checksum)
            for sum_, fine in zip(self.write(group, blocks, records, after), fines, strict=True)
        ]


class FakeClient:
    """A daemon with one arena extent; slot i is its i-th record."""

    def __init__(self) -> None:
        self.available = True
        self.instance = "daemon-1"
        self.arena = bytearray(100 * RECORD)
        self.committed: dict[int, list[int]] = {}
        self.reserved: list[tuple] = []
        self.told: list[object] = []  # tokens, with each reservation
        self.released: list[int] = []
        self.corrupt: list[BlockKey] = []
        self.admin = SimpleNamespace(delete=self._delete)
        self.registered: set[bytes] = set()
        self.held = True
        self.error: Exception | None = None
        self.existing = 0
        self.stored: list[bool] = []  # what it answers of each record, if it is asked
        self.arrivals: queue.SimpleQueue[Ready | Exception] = queue.SimpleQueue()
        self.waited_for: list[int] = []

    def submit(self, make):
        future: Future = Future()
        remote = Remote(self)
        try:
            found = asyncio.run(make(remote))
            if remote.waits:
                threading.Thread(target=self._deliver, args=[future]).start()
            else:
                future.set_result(found)
        except Exception as error:
            future.set_exception(error)
        return future

    def _deliver(self, future):
        arrival = self.arrivals.get()
        if future.cancelled():
            return
        if isinstance(arrival, Exception):
            future.set_exception(arrival)
        else:
            future.set_result(arrival)

    def connect(self):
        if self.error:
            raise self.error

    def release(self, *leases):
        self.released += leases
        return [self.held] * len(leases)

    def commit(self, lease, sums):
        self.committed[lease] = sums
        return Committed(sum(1 for each in sums if each), 0, 0, False)

    def _delete(self, namespace_id, keys, *, corrupt):
        assert corrupt
        self.corrupt += keys
        return len(keys)

    def view(self, slot):
        return memoryview(self.arena)[slot.offset : slot.offset + slot.nbytes]


class Remote:
    def __init__(self, client: FakeClient) -> None:
        self._client = client
        self.waits = False

    async def ready(self, lease_id, blocks, *, wait_s):
        self._client.waited_for.append(blocks)
        self.waits = True

    async def register(self, namespace, *, now):
        assert not now
        return namespace.id

    async def release(self, *leases):
        return self._client.release(*leases)

    async def match(self, namespace_id, keys, *, each, spans, refined):
        client = self._client
        if client.error:
            raise client.error
        assert each
        assert len(client.stored) == sum(end - begin for _, begin, end in spans)
        return Match(0, 0, present=tuple(client.stored))

    async def reserve(
        self,
        namespace_id,
        keys,
        *,
        first_block,
        parent,
        spans,
        wait_s,
        session_id,
        sizes=(),
        refined=False,
        tokens=None,
    ):
        client = self._client
        if client.error:
            raise client.error
        client.reserved.append((namespace_id, tuple(keys), first_block, parent, tuple(spans)))
        client.told.append(tokens)
        count = sum(end - begin for _, begin, end in spans)
        slots = tuple(
            None if i < client.existing else Slot(0, i * RECORD, RECORD) for i in range(count)
        )
        return Grant(len(client.reserved), 30.0, tuple(spans), slots)
