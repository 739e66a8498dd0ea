"""What a fetch needs of the store to write what it brings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvstore.decide.planner import SessionId
from kvstore.model.block import BlockKey, Grant, NamespaceId, Slot, Span


class WriterPuts(Protocol):
    """Takes records in."""

    async def reserve(
        self,
        session: SessionId,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        *,
        first_block: int,
        parent: BlockKey | None,
        spans: tuple[Span, ...],
        sizes: Sequence[int] = (),
        refined: bool = False,
        copy: bool = False,
        bases: Sequence[int] = (),
    ) -> Grant: ...

    async def commit(
        self, session: SessionId, lease_id: int, checksums: Sequence[int]
    ) -> object: ...


class WriterDeletes(Protocol):
    """Deletes blocks that were deleted while they were on their way."""

    async def delete(self, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> int: ...


class Writer(Protocol):
    """The part of the store that takes records in."""

    @property
    def puts(self) -> WriterPuts: ...

    @property
    def deletes(self) -> WriterDeletes: ...

    def release(self, session: SessionId, lease_ids: Sequence[int]) -> list[bool]: ...

    def view(self, slot: Slot) -> memoryview: ...
