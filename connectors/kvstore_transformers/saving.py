"""Saves, behind `generate`'s back, in pieces of bounded size.

A cache's tensors are never changed in place, so a save needs no copy of them: it keeps them alive
until it has read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvstore import BlockKey, Client, Grant, Group, NamespaceId, Part, Span
from kvstore.client.save_thread import SaveThread
from kvstore.model.checksum import copies_in
from kvstore_transformers.cache import Pages, PrefixCache
from kvstore_transformers.coding import Coding
from kvstore_transformers.copying import Copier
from kvstore_transformers.namespace import LayerGroup
from kvstore_transformers.pool import HbmPool, HeldPages

PIECE_NBYTES = 64 << 20
PIECE_BLOCKS = 256


@dataclass(frozen=True, slots=True)
class Saved:
    """Part of a group: blocks from `begin` on, of which the first has the index 0 in `pages`."""

    begin: int
    record_nbytes: int
    pages: Pages


def saved_of(cache: PrefixCache, layers: LayerGroup, group: Group, stored_blocks: int) -> Saved:
    """Return which blocks of a group are to be stored, of those after `stored_blocks`.

    Of a window, from the one before the prompt's end on: a later prompt resumes there at the
    earliest, or at the end of what was generated.
    """
    resume = (len(cache.prompt) - 1) // cache.block_tokens
    needed = group.blocks_needed(resume, cache.block_tokens).start
    first, pages = cache.pages(layers)
    begin = max(stored_blocks, first, needed if group.window_tokens else 0)
    return Saved(begin, group.record_nbytes, [part[begin - first :] for part in pages])


@dataclass(frozen=True, slots=True)
class Job:
    """The blocks [first, len(keys)) of a prefix. groups: where each begins, in namespace order.
    pooled: the same for the pool in GPU memory, from the prefix's start; empty without one.
    refined: replace what is stored without its fine parts."""

    namespace_id: NamespaceId
    keys: Sequence[BlockKey]
    first: int
    groups: Sequence[Saved]
    after: Any
    pooled: Sequence[HeldPages] = ()
    refined: bool = False

    @property
    def piece_blocks(self) -> int:
        """How many blocks to reserve at once."""
        nbytes = sum(group.record_nbytes for group in self.groups)
        return max(1, min(PIECE_BLOCKS, PIECE_NBYTES // nbytes))


class Coded(NamedTuple):
    """Records that are coded, one per block of `spans`. None: a block that is exact has no fine
    part. sizes: what to reserve for each. uncoded: of the base parts, which come first, whether
    each is raw."""

    spans: Sequence[Span]
    records: Sequence[memoryview | None]
    sizes: Sequence[int]
    uncoded: Sequence[bool]


class Saver(SaveThread[Job]):
    """Stores what `generate` has added. saved_uncoded_blocks: records that coding made no
    smaller, so they were stored raw."""

    def __init__(
        self,
        client: Client,
        copier: Copier,
        pool: HbmPool | None,
        coding: Coding | None = None,
        *,
        wait_s: float,
        jobs_max: int,
    ) -> None:
        """coding: how records are coded; None: they are as the model keeps them.
        wait_s: how long a piece waits for room in the daemon. jobs_max: queued at once."""
        super().__init__(client, jobs_max=jobs_max, enter=copier.enter_thread)
        self._copier = copier
        self._pool = pool
        self._coding = coding
        self._wait_s = wait_s
        self.saved_uncoded_blocks = 0

    @property
    def takes_jobs(self) -> bool:
        return self._pool is not None or super().takes_jobs

    def save(self, job: Job) -> bool:
        if self._pool is not None:
            self._pool.store(job.keys, job.pooled, job.after, loaded_blocks=job.first)
        opened = [
            self._open(index, group.pages) if group.begin < len(job.keys) else None
            for index, group in enumerate(job.groups)
        ]
        return all(
            self._save(job, opened, first, min(first + job.piece_blocks, len(job.keys)))
            for first in range(job.first, len(job.keys), job.piece_blocks)
        )

    # The thread -----------------------------------------------------------------------------------

    def _open(self, group: int, pages: Pages) -> Any:
        if self._coding is not None:
            return self._coding.copies(group, pages)
        return self._copier.open(pages)

    def _save(self, job: Job, opened: Sequence[Any], first: int, last: int) -> bool:
        """Save the blocks [first, last); False if the store is full."""
        spans = [
            Span(Part(index, 0), max(first, group.begin) - first, last - first)
            for index, group in enumerate(job.groups)
            if group.begin < last
        ]
        coded = self._encoded(job, opened, first, spans)
        grant = self._client.reserve(
            job.namespace_id,
            job.keys[first:last],
            first_block=first,
            parent=job.keys[first - 1] if first else None,
            spans=coded.spans if coded else spans,
            wait_s=self._wait_s,
            sizes=coded.sizes if coded else (),
            refined=job.refined,
        )
        if not any(grant.slots):
            if grant.lease_id:
                self._client.release(grant.lease_id)
        else:
            try:
                if coded:
                    checksums = self._copy_coded(coded.records, grant)
                    kept = zip(grant.slots, coded.uncoded, strict=False)
                    self.saved_uncoded_blocks += sum(raw for slot, raw in kept if slot)
                else:
                    checksums = self._copy(job, opened, first, grant)
            except BaseException:
                self._client.release(grant.lease_id)
                raise
            self.saved_blocks += self._client.commit(grant.lease_id, checksums).committed
        return not grant.refused

    def _encoded(
        self, job: Job, opened: Sequence[Any], first: int, spans: Sequence[Span]
    ) -> Coded | None:
        """Return the records of the spans' blocks, and behind them their fine parts if records are
        lossy. None: records are not coded."""
        if self._coding is None:
            return None
        bases: list[memoryview] = []
        fines: list[memoryview | None] = []
        fine_sizes: list[int] = []
        uncoded: list[bool] = []
        for part, begin, end in spans:
            at = first - job.groups[part.group].begin
            exact = [first + block == 0 for block in range(begin, end)]
            encoded = opened[part.group].encode(range(at + begin, at + end), exact)
            bases += [each.base for each in encoded]
            fines += [each.fine for each in encoded]
            uncoded += [each.uncoded for each in encoded]
            fine_sizes += [self._coding.fine_nbytes[part.group]] * len(encoded)
        sizes = [len(base) for base in bases]
        if not self._coding.lossy:
            return Coded(spans, bases, sizes, uncoded)
        refining = [
            span._replace(part=Part(len(job.groups) + span.part.group, 0)) for span in spans
        ]
        return Coded([*spans, *refining], [*bases, *fines], sizes + fine_sizes, uncoded)

    def _copy_coded(self, records: Sequence[memoryview | None], grant: Grant) -> list[int]:
        """Copy records to their slots; return the checksum of each, 0 where there is none."""
        pairs = [
            (record, self._client.view(slot)) if slot and record is not None else None
            for record, slot in zip(records, grant.slots, strict=True)
        ]
        taken = [pair for pair in pairs if pair]
        sums = iter(copies_in([record for record, _ in taken], [view for _, view in taken]))
        return [next(sums) if pair else 0 for pair in pairs]

    def _copy(self, job: Job, opened: Sequence[Any], first: int, grant: Grant) -> list[int]:
        """Copy pages to their slots; return the checksum of each, 0 where there is none."""
        checksums: list[int] = []
        for span in grant.spans:
            group = job.groups[span.part.group]
            part = grant.slots[len(checksums) : len(checksums) + span.end - span.begin]
            views = [
                self._client.view(slot)[: group.record_nbytes] if slot else None for slot in part
            ]
            wanted = [(first + span.begin + at - group.begin, v) for at, v in enumerate(views) if v]
            blocks, records = [block for block, _ in wanted], [view for _, view in wanted]
            sums = iter(self._copier.read(opened[span.part.group], blocks, records, job.after))
            checksums += [0 if view is None else next(sums) for view in views]
        return checksums
