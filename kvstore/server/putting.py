"""One Put stream under way: what it has reserved, received and not committed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvstore.decide.planner.leases import DAEMON_SESSION
from kvstore.model.block import (
    BlockKey,
    Committed,
    Grant,
    Namespace,
    NamespaceId,
    Part,
    Span,
    padded,
)
from kvstore.model.checksum import checksum
from kvstore.model.errors import CorruptBlock
from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.store.store import Store
from kvstore.system.patience import Patience
from kvstore.transport.chunks import Scatter
from kvstore.transport.messages import parent_of


class Putting:
    """One Put under way. held_nbytes: of the arena, in slots that it has reserved."""

    def __init__(
        self,
        store: Store,
        header: pb.PutHeader,
        namespace: Namespace,
        keys: Sequence[BlockKey],
        wait_s: float,
    ) -> None:
        self.grants: list[Grant] = []
        self.held_nbytes = 0
        self._store = store
        self._header = header
        self._keys = keys
        self._part = Part(header.group, header.shard)
        self._record_nbytes = namespace.fixed_nbytes(self._part)
        self._patience = Patience(wait_s)
        self._ends: list[int] = []  # of the grants, in keys
        self._targets: list[memoryview | None] = [None] * len(keys)
        self._scatter = Scatter(self._targets, self._record_nbytes)
        self._refused = 0

    @property
    def _reserved(self) -> int:
        return self._ends[-1] if self._ends else 0

    async def write(self, chunk: memoryview, room_nbytes: int) -> None:
        """Take the next bytes. room_nbytes: what may be reserved for them."""
        self._scatter.check(chunk)
        end = -(-(self._scatter.at + len(chunk)) // self._record_nbytes)
        if not self._refused and end > self._reserved:
            await self._reserve(end, room_nbytes)
        self._scatter.write(chunk)

    async def _reserve(self, end: int, room_nbytes: int) -> None:
        begin = self._reserved
        fitting = begin + max(0, room_nbytes) // padded(self._record_nbytes)
        if fitting < end:
            self._refused = len(self._keys) - max(begin, fitting)
        if fitting <= begin:
            return
        end = min(end, fitting)
        with self._patience.waiting() as wait_s:
            grant = await self._store.puts.reserve(
                DAEMON_SESSION,
                NamespaceId(self._header.namespace_id),
                self._keys[begin:end],
                first_block=self._header.first_block + begin,
                parent=self._keys[begin - 1] if begin else parent_of(self._header.parent),
                spans=(Span(self._part, 0, end - begin),),
                wait_s=wait_s,
            )
        self.grants.append(grant)
        self._ends.append(end)
        for index, slot in enumerate(grant.slots, begin):
            if slot is not None:
                self._targets[index] = self._store.view(slot)
                self.held_nbytes += padded(slot.nbytes)
        if grant.refused:  # the end of a prefix is worth nothing without what is before it
            self._refused = len(self._keys) - end

    def finish(self) -> None:
        """Raise InvalidRequest if bytes are missing."""
        self._scatter.finish()

    def verify(self) -> None:
        """Raise CorruptBlock unless every record is what its checksum says. Blocking."""
        for index, (target, expected) in enumerate(
            zip(self._targets, self._header.checksums, strict=True)
        ):
            if target is not None and checksum(target) != expected:
                raise CorruptBlock(f"record {index} does not match its checksum: send it again")

    async def commit(self) -> Committed:
        """Publish all of it, first blocks first; one sync of the disk covers what it can."""
        begins = [0, *self._ends]
        done = await asyncio.gather(
            *(
                self._store.puts.commit(
                    DAEMON_SESSION,
                    grant.lease_id,
                    self._header.checksums[begin:end],
                    durable=self._header.durable,
                )
                for grant, begin, end in zip(self.grants, begins, self._ends, strict=False)
            ),
            return_exceptions=True,
        )
        committed = existing = refused = 0
        durable = self._header.durable
        for each in done:
            if isinstance(each, BaseException):
                raise each
            committed += each.committed
            existing += each.existing
            refused += each.refused
            durable = durable and each.durable
        return Committed(committed, existing, refused + self._refused, durable)

    def release(self) -> None:
        """Give back what was not committed. Nothing may be written after this."""
        self._targets.clear()
        self._store.release(DAEMON_SESSION, [grant.lease_id for grant in self.grants])
