"""A lender over plain memory and files, for tests of links: it keeps what it was given."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Sequence

from kvstore.model.block import BlockKey, FilePlace, Namespace, NamespaceId, Part, Span
from kvstore.model.checksum import checksum
from kvstore.model.errors import KVStoreError, UnknownNamespace
from kvstore.model.member import NodeId
from kvstore.peer.base import HeadsAsk, HeadsReply, LentRecord, PeerMatch

Record = tuple[NamespaceId, BlockKey, Part]
FIRST = Part(0, 0)


class MemoryLoan:
    """What one READ was lent. Implements `Loan`."""

    def __init__(self, lender: MemoryLender, records: Sequence[LentRecord | None]) -> None:
        self.records = records
        self._lender = lender
        self.released = 0

    def held(self) -> bool:
        assert not self.released, "a loan that was released is asked for"
        return self._lender.holds

    def release(self) -> None:
        self.released += 1


class MemoryLender:
    """Implements `Lender`. holds: what `held` answers. busy: whether its engines are. fails: raised
    by the next `lend`. corrupted, deleted: what it was told. loans: all it has made."""

    def __init__(self, instance: str = "1" * 16) -> None:
        self.instance = instance
        self.holds = True
        self.busy = False
        self.fails: KVStoreError | None = None
        self.namespaces: dict[NamespaceId, Namespace] = {}
        self.records: dict[Record, LentRecord] = {}
        self.loans: list[MemoryLoan] = []
        self.corrupted: list[BlockKey] = []
        self.deleted: list[tuple[NamespaceId, list[BlockKey] | None]] = []
        self.changes: list[tuple[bytes, bool]] = []
        self._news = asyncio.Event()

    def put(self, namespace: Namespace, key: BlockKey, data: bytes, part: Part = FIRST) -> None:
        """Keep a record in memory of its own."""
        view = memoryview(mmap.mmap(-1, len(data)))
        view[:] = data
        self._keep(namespace, key, part, LentRecord(checksum(view), len(data), view=view))
        self._change(key[:8], came=True)

    def put_file(
        self, namespace: Namespace, key: BlockKey, place: FilePlace, sum_of_it: int
    ) -> None:
        """Keep a record that lies in a file."""
        self._keep(namespace, key, FIRST, LentRecord(sum_of_it, place.nbytes, place=place))

    def _keep(self, namespace: Namespace, key: BlockKey, part: Part, record: LentRecord) -> None:
        self.records[namespace.id, key, part] = record
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _change(self, head: bytes, *, came: bool) -> None:
        self.changes.append((head, came))
        self._wake()

    # ---- Lender ----------------------------------------------------------------------------------

    def engines_busy(self) -> bool:
        return self.busy

    def register(self, namespace: Namespace) -> None:
        self.namespaces[namespace.id] = namespace

    async def match(
        self, namespace_id: NamespaceId, keys: Sequence[BlockKey], skip_blocks: int, refined: bool
    ) -> PeerMatch:
        namespace = self._known(namespace_id)
        parts = [
            Part(g, s) for g, group in enumerate(namespace.groups) for s in range(group.shards)
        ]
        hit = 0
        for key in keys:
            found = [self.records.get((namespace_id, key, part)) for part in parts]
            if None in found:
                break
            hit += 1
        return PeerMatch(hit, hit)

    async def arrival(
        self, namespace_id: NamespaceId, keys: Sequence[BlockKey], spans: Sequence[Span]
    ) -> None:
        while None in self._found(namespace_id, keys, spans):
            await self._news.wait()

    async def lend(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        spans: Sequence[Span],
        refined: bool,
        borrower: NodeId,
    ) -> MemoryLoan:
        fails, self.fails = self.fails, None
        if fails is not None:
            raise fails
        loan = MemoryLoan(self, self._found(namespace_id, keys, spans))
        self.loans.append(loan)
        return loan

    async def heads(self, ask: HeadsAsk) -> HeadsReply:
        if ask.instance != self.instance or ask.since < 0:
            heads = {head for head, _ in self.changes}
            ordered = sorted(heads, key=lambda head: int.from_bytes(head, "little"))
            return HeadsReply(
                self.instance, ask.level, len(self.changes), snapshot=True, heads=b"".join(ordered)
            )
        if len(self.changes) <= ask.since:
            try:
                async with asyncio.timeout(ask.wait_s):
                    await self._news.wait()
            except TimeoutError:
                pass
        new = self.changes[ask.since :]
        return HeadsReply(
            self.instance,
            ask.level,
            ask.since + len(new),
            snapshot=False,
            heads=b"".join(head for head, _ in new),
            came=bytes(came for _, came in new),
        )

    async def corrupt(self, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> None:
        self._known(namespace_id)
        self.corrupted += keys

    async def delete(self, namespace_id: NamespaceId, keys: Sequence[BlockKey] | None) -> None:
        self._known(namespace_id)
        self.deleted.append((namespace_id, None if keys is None else [*keys]))

    def _known(self, namespace_id: NamespaceId) -> Namespace:
        namespace = self.namespaces.get(namespace_id)
        if namespace is None:
            raise UnknownNamespace("not here")
        return namespace

    def _found(
        self, namespace_id: NamespaceId, keys: Sequence[BlockKey], spans: Sequence[Span]
    ) -> list[LentRecord | None]:
        self._known(namespace_id)
        return [
            self.records.get((namespace_id, key, part))
            for part, begin, end in spans
            for key in keys[begin:end]
        ]
