"""Write-behind: which dirty records are written next, and what became of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstore.decide.index import Extent, StoredBlock, StoredFrame, StoredPart
from kvstore.decide.planner.ledger import Ledger
from kvstore.decide.planner.moves import Write
from kvstore.decide.planner.steps import Steps
from kvstore.model.block import BlockKey, NamespaceId, Part, padded
from kvstore.model.outcome import Reason

RUN_BLOCKS_MAX = 16
RUN_NBYTES_MAX = 16 << 20
WRITE_BATCH_RECORDS_MAX = 8192
RETRY_RECORDS = 256  # in one step


class Writes:
    """Runs of dirty records. run_nbytes_max: payload of the largest frame the file tier takes."""

    def __init__(self, ledger: Ledger, run_nbytes_max: int, now: Callable[[], float]) -> None:
        self._ledger = ledger
        self._index = ledger.index
        self._run_nbytes_max = min(run_nbytes_max, RUN_NBYTES_MAX)
        self._now = now

    def take(self, nbytes_max: int) -> list[Write]:
        """Take dirty records, oldest first, as runs of consecutive blocks; slots get pinned."""
        runs: dict[tuple[NamespaceId, Part], list[list[tuple[StoredBlock, StoredPart]]]] = {}
        for key, part in self._ledger.dirty.take(nbytes_max, WRITE_BATCH_RECORDS_MAX):
            block = self._index.by_key(key)
            assert block is not None  # forgetting a block takes it off the queue
            record = block.record(part)
            assert record is not None
            open_runs = runs.setdefault((block.namespace_id, part), [])
            if open_runs and self._extends(open_runs[-1], block, record):
                open_runs[-1].append((block, record))
            else:
                open_runs.append([(block, record)])
        return [
            _pinned_write(namespace_id, part, run)
            for (namespace_id, part), open_runs in runs.items()
            for run in open_runs
        ]

    def _extends(
        self, run: list[tuple[StoredBlock, StoredPart]], block: StoredBlock, record: StoredPart
    ) -> bool:
        if run[-1][0].key != block.parent or len(run) >= RUN_BLOCKS_MAX:
            return False
        nbytes = sum(padded(before.nbytes) for _, before in run) + padded(record.nbytes)
        return nbytes <= self._run_nbytes_max

    def done(
        self,
        write: Write,
        extent: Extent,
        codec_id: int,
        stored_nbytes: tuple[int, ...],
        sequence: int,
    ) -> None:
        """Note that a run is durable in a frame."""
        frame = StoredFrame(extent, write.part, codec_id, stored_nbytes, sequence)
        frame.checked_at = self._now()  # it was verified on its way
        for position, (block, record) in enumerate(zip(write.blocks, write.stored, strict=True)):
            if block.record(write.part) is record:
                self._ledger.dirty.clean(record)
                self._ledger.detach(block, record)  # that of a disk that came back meanwhile
                self._ledger.attach(frame, position, block, record)
                self._ledger.moved(block)
        self._ledger.drop_pins(write.held)
        self._ledger.free_if_dead(frame)

    def failed(self, write: Write) -> None:
        """Note that a run could not be written: it stays in the arena and may be evicted."""
        for block, record in zip(write.blocks, write.stored, strict=True):
            if block.record(write.part) is record:
                self._ledger.dirty.fail(block.key, write.part, record)
        self._ledger.drop_pins(write.held)

    def is_wanted(self, write: Write) -> bool:
        """Say whether every record of a run under way is still stored."""
        records = zip(write.blocks, write.stored, strict=True)
        return all(block.record(write.part) is record for block, record in records)

    def corrupt(self, write: Write, keys: Sequence[BlockKey]) -> None:
        """Forget records of a failed write whose bytes are not what was committed."""
        for block, record in zip(write.blocks, write.stored, strict=True):
            if block.key in keys and block.record(write.part) is record:
                self._ledger.forget_part(block, record, Reason.CORRUPT)

    def retry_failed(self) -> Steps[None]:
        """Queue what could not be written once more, as far as it is still in the arena."""
        dirty = self._ledger.dirty
        for _ in range(0, dirty.failed, RETRY_RECORDS):
            for key, part, record in dirty.take_failed(RETRY_RECORDS):
                block = self._index.by_key(key)
                alive = block is not None and block.record(part) is record
                unwritten = record.resident is not None and record.frame is None
                if block and alive and unwritten and not record.dirty:
                    dirty.add(block, part, record)
                    dirty.retried += 1
            yield


def _pinned_write(
    namespace_id: NamespaceId, part: Part, run: list[tuple[StoredBlock, StoredPart]]
) -> Write:
    held = []
    for _, record in run:
        assert record.resident is not None  # a dirty record is never evicted
        record.resident.pins += 1
        held.append(record.resident)
    blocks, records = zip(*run, strict=True)
    return Write(namespace_id, part, blocks, records, held)
