"""Consecutive blocks of one prefix on their way to or from the caller's memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kvstore.client.pieces import Memory, Pieces
from kvstore.model.block import BlockKey, Buffer, NamespaceId, Part, Span
from kvstore.model.errors import InvalidRequest
from kvstore.model.tokens import TOKENS_NBYTES_MAX, BlockTokens

WINDOW_KEYS = 1024
GROWTH = 4  # of windows after a small first one: each costs a reserve and a commit
STREAM_BYTES_PER_S = 50e6  # slowest stream that is still waited for


@dataclass(frozen=True, slots=True)
class Batch:
    """Where blocks stand in their prefix, and which part of each is meant.

    record_nbytes: of each record, or of the largest. sizes: of each record, where they vary.
    tokens: of all the blocks, where the daemon tells routers of them. keys_max: of one call.
    """

    namespace_id: NamespaceId
    keys: Sequence[BlockKey]
    part: Part
    record_nbytes: int
    first_block: int = 0
    parent: BlockKey | None = None
    sizes: Sequence[int] = ()
    tokens: BlockTokens | None = None
    keys_max: int = WINDOW_KEYS

    def cut(self, where: slice) -> Batch:
        """Return some of the blocks, for a call that does not ask where they stand."""
        begin, end, _ = where.indices(len(self.keys))
        tokens = self.tokens and self.tokens.part(begin, end, len(self.keys))
        return replace(self, keys=self.keys[where], sizes=self.sizes[where], tokens=tokens)

    def windows(
        self, nbytes: int, first_nbytes: int | None = None
    ) -> Iterator[tuple[slice, Batch]]:
        """Cut into batches of bounded bytes and keys; yields which keys each has.

        first_nbytes: of the first one; each after it may have GROWTH times as much."""
        nbytes_now = nbytes if first_nbytes is None else min(first_nbytes, nbytes)
        start, most = 0, self.keys_max
        if self.tokens is not None:
            most = min(most, TOKENS_NBYTES_MAX * len(self.keys) // len(self.tokens.packed))
        while start < len(self.keys):
            step = max(1, min(most, nbytes_now // self.record_nbytes))
            where = slice(start, start + step)
            yield (
                where,
                replace(
                    self.cut(where),
                    first_block=self.first_block + start,
                    parent=self.keys[start - 1] if start else self.parent,
                ),
            )
            start += step
            nbytes_now = min(GROWTH * nbytes_now, nbytes)

    @property
    def nbytes(self) -> int:
        return len(self.keys) * self.record_nbytes

    @property
    def spans(self) -> tuple[Span, ...]:
        return (Span(self.part, 0, len(self.keys)),)

    @property
    def stream_s(self) -> float:
        return self.nbytes / STREAM_BYTES_PER_S

    def flat(self, records: Sequence[Buffer | Pieces]) -> list[Memory]:
        """Return records as bytes. Raises InvalidRequest unless they fit keys and namespace."""
        if len(records) != len(self.keys):
            raise InvalidRequest(f"{len(records)} records for {len(self.keys)} keys")
        views: list[Memory] = []
        for index, record in enumerate(records):
            view = record if isinstance(record, Pieces) else memoryview(record)
            nbytes = self.sizes[index] if self.sizes else self.record_nbytes
            whole = isinstance(view, Pieces) or view.c_contiguous
            if not whole or view.nbytes != nbytes:
                raise InvalidRequest(
                    f"record {index} has {view.nbytes} bytes; {nbytes} in one piece "
                    f"are what the namespace says of group {self.part.group}"
                )
            views.append(view if isinstance(view, Pieces) else view.cast("B"))
        return views
