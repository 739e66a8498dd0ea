"""Saves, behind the model's back, in pieces of bounded size."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvstore import BlockKey, Client, Grant, NamespaceId, Part, Span
from kvstore.client.save_thread import SaveThread
from kvstore.model.checksum import copies_in
from kvstore_llamacpp.state import Bytes

PIECE_NBYTES = 64 << 20
PIECE_BLOCKS = 256


@dataclass(frozen=True, slots=True)
class Run:
    """Records of consecutive blocks of one group, the first of them of block `begin`.

    sizes: bytes of each. fill: writes the record of a block, whose bytes it is given.
    """

    group: int
    begin: int
    sizes: Sequence[int]
    fill: Callable[[int, Bytes], None]
    varies: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """What one answer has added. keys: of its prefix, from the start.

    buffers: the memory its runs read; lent until the job has ended. session_id: of its
    conversation, for hints.
    """

    namespace_id: NamespaceId
    keys: Sequence[BlockKey]
    runs: Sequence[Run]
    buffers: Sequence[Bytes] = ()
    session_id: str = ""


@dataclass(slots=True)
class Buffers:
    """Memory that is used again: the first touch of new memory takes longer than a copy.

    kept_max, kept_nbytes_max: of what nobody uses now.
    """

    kept_max: int = 4
    kept_nbytes_max: int = 256 << 20
    _free: list[Bytes] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self) -> Bytes | None:
        """Return the largest buffer that is free, if there is one."""
        with self._lock:
            return self._free.pop() if self._free else None

    def give(self, buffer: Bytes) -> None:
        """Lend a buffer back, whole or a part from its start."""
        whole = buffer.base if isinstance(buffer.base, np.ndarray) else buffer
        with self._lock:
            self._free.append(whole)
            self._free.sort(key=len)
            del self._free[: -self.kept_max]
            while sum(map(len, self._free)) > self.kept_nbytes_max:
                self._free.pop()


class Saver(SaveThread[Job]):
    """Stores what answers have added. saved_nbytes: of all records so far."""

    def __init__(self, client: Client, buffers: Buffers, *, wait_s: float, jobs_max: int) -> None:
        """wait_s: how long a piece waits for room in the daemon. jobs_max: queued at once."""
        super().__init__(client, jobs_max=jobs_max)
        self.saved_nbytes = 0
        self._buffers = buffers
        self._wait_s = wait_s
        self._scratch = np.empty(0, np.uint8)

    def give_up(self, buffers: Sequence[Bytes]) -> None:
        """Count a save of which no job came, and take back its memory."""
        self.dropped += 1
        for buffer in buffers:
            self._buffers.give(buffer)

    def let_go(self, job: Job) -> None:
        for buffer in job.buffers:
            self._buffers.give(buffer)

    def save(self, job: Job) -> bool:
        return all(self._save(job, run) for run in job.runs)

    # The thread -----------------------------------------------------------------------------------

    def _save(self, job: Job, run: Run) -> bool:
        """Save a run, piece by piece; False if the store is full."""
        step = max(1, min(PIECE_BLOCKS, PIECE_NBYTES // max(run.sizes)))
        for at in range(0, len(run.sizes), step):
            sizes = run.sizes[at : at + step]
            first = run.begin + at
            grant = self._client.reserve(
                job.namespace_id,
                job.keys[first : first + len(sizes)],
                first_block=first,
                parent=job.keys[first - 1] if first else None,
                spans=[Span(Part(run.group, 0), 0, len(sizes))],
                wait_s=self._wait_s,
                session_id=job.session_id,
                sizes=sizes if run.varies else (),
            )
            self._write(run, first, sizes, grant)
            if grant.refused:
                return False
        return True

    def _write(self, run: Run, first: int, sizes: Sequence[int], grant: Grant) -> None:
        """Write a piece into its slots, and publish it."""
        wanted = [index for index, slot in enumerate(grant.slots) if slot]
        if not wanted:
            if grant.lease_id:
                self._client.release(grant.lease_id)
            return
        try:
            checksums = [0] * len(sizes)
            records = self._records(run, first, [(index, sizes[index]) for index in wanted])
            views = [
                self._client.view(slot)[:nbytes]
                for slot, nbytes in zip(grant.slots, sizes, strict=True)
                if slot
            ]
            for index, found in zip(wanted, copies_in(records, views), strict=True):
                checksums[index] = found
        except BaseException:
            self._client.release(grant.lease_id)
            raise
        committed = self._client.commit(grant.lease_id, checksums).committed
        self.saved_blocks += committed
        self.saved_nbytes += committed * (sum(sizes) // len(sizes))

    def _records(self, run: Run, first: int, wanted: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Return records in memory of our own: their checksums are of what was meant."""
        total = sum(nbytes for _, nbytes in wanted)
        if len(self._scratch) < total:
            self._scratch = np.empty(total, np.uint8)
        records, at = [], 0
        for index, nbytes in wanted:
            record = self._scratch[at : at + nbytes]
            run.fill(first + index, record)
            records.append(record.data)
            at += nbytes
        return records
