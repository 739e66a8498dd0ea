"""Frames that come and go with their disks: found at a start, found later, and withdrawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstore.decide.index import Extent, FoundRun, StoredBlock, StoredFrame, StoredPart
from kvstore.decide.planner.ledger import Ledger
from kvstore.decide.planner.steps import Steps
from kvstore.model.block import BlockKey, NamespaceId

WITHDRAW_STEP_FRAMES = 64


class Recovery:
    """Indexes what disks have, and forgets what they had."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def add(
        self,
        namespace_id: NamespaceId,
        frame: StoredFrame,
        blocks: Sequence[tuple[int, BlockKey, int, int]],
        *,
        first_block: int,
        parent: BlockKey | None,
    ) -> None:
        """Index a frame found on disk. blocks: (position, key, raw bytes, checksum) that are live.

        Called in the order the frames were written, but for those that somebody asks for first, so
        that recency survives a restart. Of a record in several frames the one of the highest
        sequence stays: an older copy may be rotten or freed, and the newer one is why nobody
        noticed. At a start all are here before one is read. A disk that is back later may have a
        newer copy of what is in the arena or on its way there, or the durable one of what is not
        durable yet: then that copy counts as well, and what has other bytes leaves the arena.
        """
        index = self._ledger.index
        part = index.own_part(frame.part)
        positions, keys, sizes, checksums = zip(*blocks, strict=True)
        if positions == tuple(range(len(blocks))):
            parents = [parent, *keys[:-1]]
        else:
            key_at = dict(zip(positions, keys, strict=True))
            parents = [key_at.get(at - 1) if at else parent for at in positions]
        run = FoundRun(namespace_id, first_block, positions, keys, parents, sizes, checksums)
        if self._ledger.adopt(frame, run):
            return
        for (position, key, nbytes, value), above in zip(blocks, parents, strict=True):
            block = index.by_key(key)
            if block is None:
                block = StoredBlock(key, namespace_id, first_block + position, above)
                index.add(block)
            elif block.namespace_id != namespace_id:
                continue  # no honest writer stores one key in two namespaces
            record = block.record(part)
            if record is not None:
                if record.frame is not None and record.frame.sequence >= frame.sequence:
                    continue
                if (record.nbytes, record.checksum) == (nbytes, value):
                    self._ledger.dirty.drop(key, part, record)
                    self._ledger.detach(block, record)
                else:
                    self._ledger.drop_fine_of(block, part)
                    self._ledger.drop(block, record)
                    record = None
            if record is None:
                record = StoredPart(part, nbytes, value)
                block.add(record)
            self._ledger.attach(frame, position, block, record, found=True)
            index.refresh(block)
        self._ledger.free_if_dead(frame)

    def withdraw(self, is_out: Callable[[Extent], bool]) -> Steps[None]:
        """Forget the frames of a disk that is out of use, but for what the arena has of them."""
        for at, frame in enumerate(list(self._ledger.frames)):
            if at % WITHDRAW_STEP_FRAMES == 0:
                yield
            if is_out(frame.extent):
                self._ledger.withdraw(frame)
