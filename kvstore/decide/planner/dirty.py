"""What was committed and is not durable yet, in the order it came."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice

from kvstore.decide.index import StoredBlock, StoredPart
from kvstore.model.block import BlockKey, Part


class DirtyRecords:
    """A queue of records to write, and which of those taken from it are still unanswered.

    takes_fine: fine parts are written, too.
    """

    def __init__(self, now: Callable[[], float], *, takes_fine: bool = True) -> None:
        self.takes_fine = takes_fine
        self.nbytes = 0
        self.queued_nbytes = 0  # of them, not taken yet
        self.last = 0  # sequence of the newest commit
        self._now = now
        self._queue: OrderedDict[tuple[BlockKey, Part], StoredPart] = OrderedDict()
        self._since: OrderedDict[int, float] = OrderedDict()  # sequence -> when it was committed
        self._failed: dict[tuple[BlockKey, Part], StoredPart] = {}
        self.retried = 0  # records that had failed, and were queued anew

    @property
    def count(self) -> int:
        """Records the file tier has not answered for."""
        return len(self._since)

    @property
    def oldest_s(self) -> float:
        """Age of the oldest record the file tier has not answered for; 0 when there is none."""
        return self._now() - next(iter(self._since.values())) if self._since else 0.0

    def takes(self, record: StoredPart) -> bool:
        """Say whether a record is ever written."""
        return self.takes_fine or not record.fine

    def unwritten(self, block: StoredBlock) -> Iterator[tuple[Part, StoredPart]]:
        """Yield what the arena alone has of a block and may be written, nobody is writing, and no
        write has failed."""
        for record in block.records:
            part = record.part
            if record.resident is None or record.frame is not None or record.dirty:
                continue
            if self.takes(record) and not self.has_failed(block.key, part):
                yield part, record

    def settled(self, sequence: int) -> bool:
        """Tell whether the file tier has answered for every commit up to `sequence`."""
        return not self._since or next(iter(self._since)) > sequence

    def add(self, block: StoredBlock, part: Part, record: StoredPart) -> None:
        self.last += 1
        record.dirty = self.last
        self.nbytes += record.nbytes
        self._queue[block.key, part] = record
        self.queued_nbytes += record.nbytes
        self._since[record.dirty] = self._now()

    def take(self, nbytes_max: int, records_max: int) -> Iterator[tuple[BlockKey, Part]]:
        """Take the oldest off the queue; they stay unanswered until `clean`."""
        nbytes = 0
        for (key, part), record in list(islice(self._queue.items(), records_max)):
            if nbytes >= nbytes_max:
                return
            del self._queue[key, part]
            self.queued_nbytes -= record.nbytes
            nbytes += record.nbytes
            yield key, part

    def clean(self, record: StoredPart) -> None:
        """The file tier has answered for a record, or nobody needs it any more."""
        if record.dirty:
            del self._since[record.dirty]
            record.dirty = 0
            self.nbytes -= record.nbytes

    def fail(self, key: BlockKey, part: Part, record: StoredPart) -> None:
        """The file tier could not take a record: it may be evicted, or be written by a retry."""
        self.clean(record)
        self._failed[key, part] = record

    @property
    def failed(self) -> int:
        """How many writes have failed, of records that are still here and that nobody has tried
        again."""
        return len(self._failed)

    def take_failed(self, records_max: int) -> list[tuple[BlockKey, Part, StoredPart]]:
        """Return some of those, what failed first before others: they are tried again."""
        return [(*each, self._failed.pop(each)) for each in list(islice(self._failed, records_max))]

    def give_up(self, key: BlockKey, part: Part) -> bool:
        """Forget a record that leaves the arena unwritten. True: nothing ever made it durable."""
        return self._failed.pop((key, part), None) is not None

    def has_failed(self, key: BlockKey, part: Part) -> bool:
        """Tell whether the last write of a record failed and nobody has tried again."""
        return (key, part) in self._failed

    def drop(self, key: BlockKey, part: Part, record: StoredPart) -> None:
        """Forget a record whether or not it was taken."""
        if self._queue.pop((key, part), None) is not None:
            self.queued_nbytes -= record.nbytes
        self._failed.pop((key, part), None)
        self.clean(record)

    @property
    def any_failed(self) -> bool:
        """Whether a record that is still in the arena could not be written."""
        return any(r.resident is not None and r.frame is None for r in self._failed.values())
