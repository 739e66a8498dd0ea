"""Saves, behind `generate`'s back, in pieces of bounded size.

A cache's tensors are never changed in place, so a save needs no copy of them: it keeps them alive
until it has read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvstore import BlockKey, Client, Grant, Group, NamespaceId, Part, Span
from kvstore.client.save_thread import SaveThread
from kvstore_transformers.cache import Pages, PrefixCache
from kvstore_transformers.coding import CodedCopier, Encoded, Sized
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

    def piece_blocks(self, piece_nbytes: int) -> int:
        """How many blocks to reserve at once."""
        nbytes = sum(group.record_nbytes for group in self.groups)
        return max(1, min(PIECE_BLOCKS, piece_nbytes // nbytes))


@dataclass(frozen=True, slots=True)
class Coded:
    """Records that are coded, one per block of `spans`: base parts, then the fine parts of lossy
    ones. None: a block that is exact has no fine part.

    sizes: what to reserve for each. groups: of layers, of each. uncoded: of the base parts, whether
    each is raw."""

    spans: Sequence[Span]
    records: Sequence[Sized | None]
    sizes: Sequence[int]
    groups: Sequence[int]
    uncoded: Sequence[bool]


class Saver(SaveThread[Job]):
    """Stores what `generate` has added. saved_uncoded_blocks: records that coding made no
    smaller, so they were stored raw."""

    def __init__(
        self,
        client: Client,
        copier: Copier | CodedCopier,
        pool: HbmPool | None,
        *,
        wait_s: float,
        jobs_max: int,
    ) -> None:
        """copier: of records as the model keeps them, or of coded ones. wait_s: how long a piece
        waits for room in the daemon. jobs_max: queued at once."""
        super().__init__(client, jobs_max=jobs_max, enter=copier.enter_thread)
        self._copier = copier
        self._pool = pool
        self._piece_nbytes = PIECE_NBYTES
        if isinstance(copier, CodedCopier):
            self._piece_nbytes = copier.encoded_nbytes_max
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
        step = job.piece_blocks(self._piece_nbytes)
        return all(
            self._save(job, opened, first, min(first + step, len(job.keys)))
            for first in range(job.first, len(job.keys), step)
        )

    # The thread -----------------------------------------------------------------------------------

    def _open(self, group: int, pages: Pages) -> Any:
        if isinstance(self._copier, CodedCopier):
            return self._copier.open(group, pages)
        return self._copier.open(pages)

    def _save(self, job: Job, opened: Sequence[Any], first: int, last: int) -> bool:
        """Save the blocks [first, last); False if the store is full."""
        spans = [
            Span(Part(index, 0), max(first, group.begin) - first, last - first)
            for index, group in enumerate(job.groups)
            if group.begin < last
        ]
        copier = self._copier
        coded = None
        if isinstance(copier, CodedCopier):
            coded = self._encoded(copier, job, opened, first, spans)
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
                if isinstance(copier, CodedCopier):
                    assert coded is not None
                    checksums = self._copy_coded(copier, opened, coded, grant)
                    kept = zip(grant.slots, coded.uncoded, strict=False)
                    self.saved_uncoded_blocks += sum(raw for slot, raw in kept if slot)
                else:
                    checksums = self._copy(copier, job, opened, first, grant)
            except BaseException:
                self._client.release(grant.lease_id)
                raise
            self.saved_blocks += self._client.commit(grant.lease_id, checksums).committed
        return not grant.refused

    def _encoded(
        self,
        copier: CodedCopier,
        job: Job,
        opened: Sequence[Any],
        first: int,
        spans: Sequence[Span],
    ) -> Coded:
        """Encode the spans' blocks. What is encoded stays until the next call."""
        coding = copier.coding
        blocks: list[Encoded] = []
        groups: list[int] = []
        for part, begin, end in spans:
            at = first - job.groups[part.group].begin
            exact = [first + block == 0 for block in range(begin, end)] if coding.lossy else ()
            pages = opened[part.group]
            blocks += copier.encode(pages, range(at + begin, at + end), exact, job.after)
            groups += [part.group] * (end - begin)
        bases, uncoded = [each.base for each in blocks], [each.uncoded for each in blocks]
        sizes = [base.nbytes for base in bases]
        if not coding.lossy:
            return Coded(spans, bases, sizes, groups, uncoded)
        refining = [
            span._replace(part=Part(len(job.groups) + span.part.group, 0)) for span in spans
        ]
        records = [*bases, *(each.fine for each in blocks)]
        sizes += [coding.fine_nbytes[group] for group in groups]
        return Coded([*spans, *refining], records, sizes, groups * 2, uncoded)

    def _copy_coded(
        self, copier: CodedCopier, opened: Sequence[Any], coded: Coded, grant: Grant
    ) -> list[int]:
        """Copy records to their slots; return the checksum of each, 0 where there is none."""
        checksums = [0] * len(coded.records)
        for group in dict.fromkeys(coded.groups):
            taken = {
                index: (record, self._client.view(slot))
                for index, (record, slot) in enumerate(zip(coded.records, grant.slots, strict=True))
                if coded.groups[index] == group and slot and record is not None
            }
            found = copier.store(opened[group], list(taken.values()))
            for index, sum_ in zip(taken, found, strict=True):
                checksums[index] = sum_
        return checksums

    def _copy(
        self, copier: Copier, job: Job, opened: Sequence[Any], first: int, grant: Grant
    ) -> list[int]:
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
            sums = iter(copier.read(opened[span.part.group], blocks, records, job.after))
            checksums += [0 if view is None else next(sums) for view in views]
        return checksums
