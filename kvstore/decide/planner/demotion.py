"""Write what is about to leave the arena, instead of everything at once.

It spares flash: what was deleted, or belongs to a session that said it is over, before its room was
needed is never written. What a crash finds in the arena alone is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvstore.decide.index import Index, StoredBlock, StoredPart
from kvstore.decide.planner.dirty import DirtyRecords
from kvstore.decide.planner.steps import Steps
from kvstore.model.block import BlockKey

RUN_BLOCKS = 16
"""Blocks of a prefix that are written together: the tail leaves first, and then those before it."""
DECIDED_MAX = 256
"""Blocks that one call decides at most: a prefix may have tens of thousands."""


class Demotion:
    """Knows which blocks may leave the arena as they are. Bounded by the blocks in the arena."""

    def __init__(
        self,
        index: Index,
        dirty: DirtyRecords,
        admits: Callable[[StoredBlock, StoredPart], bool] | None,
    ) -> None:
        """admits: asked once for each record, from the start of a prefix on; None: all are."""
        self._index = index
        self._dirty = dirty
        self.admits = admits
        self._spared: set[BlockKey] = set()
        self._admitted: set[BlockKey] = set()
        self._to_decide: list[BlockKey] = []  # a block, and those before it, the last one first
        self._is_climbing = False  # to the first of them

    @property
    def decides(self) -> bool:
        """Whether a decision has begun that `go_on` has to finish."""
        return bool(self._to_decide)

    def spare(self, keys: Iterable[BlockKey]) -> None:
        """Let blocks leave unwritten."""
        self._spared.update(keys)

    def want(self, keys: Iterable[BlockKey]) -> None:
        """Take `spare` back: they were used."""
        if self._spared:
            self._spared.difference_update(keys)

    def left(self, key: BlockKey) -> None:
        """Forget a block that is not in the arena any more."""
        self._spared.discard(key)
        self._admitted.discard(key)

    def is_admitted(self, key: BlockKey) -> bool:
        """Say whether a block will be written when its turn comes: the end of a prefix leaves, and
        is written, before its start."""
        return key in self._admitted

    def holds_back(self, block: StoredBlock) -> bool:
        """Queue the writes that a block must wait for before it leaves; False: there are none. A
        block that is not decided yet has to wait as well."""
        if not self._is_unwritten(block):
            return False
        self.queue(block, block.nbytes)
        return self._is_unwritten(block)  # unless the write budget has spared it

    def queue_wanted(self, keys: Sequence[BlockKey]) -> None:
        """Queue the writes of blocks, whatever was said of them before."""
        self.want(keys)
        for key in keys:
            block = self._index.by_key(key)
            if block is not None:
                self._decide_at_once(block)
                self._queue(block)

    def queue_all(self) -> Steps[None]:
        """Queue the writes of all that the arena alone has."""
        for keys in self._index.walks.unwritten():
            for key in keys:
                block = self._index.by_key(key)
                if block is None or not block.resident_parts:
                    continue
                while not self._decide(block):
                    yield
                    self.go_on()
                self._queue(block)
            yield

    def queue(self, block: StoredBlock, nbytes_max: int) -> int:
        """Queue the writes of a block and of those before it, if they are decided; returns the
        bytes looked at, at most a block more than `nbytes_max`."""
        if not self._decide(block):
            return 0
        run: list[StoredBlock] = []
        nbytes = 0
        above: StoredBlock | None = block
        while above is not None and above.resident_parts and len(run) < RUN_BLOCKS:
            run.append(above)
            nbytes += above.nbytes
            if nbytes >= nbytes_max:
                break
            above = self._index.by_key(above.parent) if above.parent is not None else None
        for each in reversed(run):
            self._queue(each)
        return nbytes

    def _decide(self, block: StoredBlock) -> bool:
        """Let a block and what is before it in the arena be written, or leave as it is. Each is
        looked at once, until it is used again.

        Returns whether the block is decided. If not, `go_on` has to be called again.
        """
        if self.admits is None or not self._is_undecided(block):
            return True
        if self._to_decide:
            return False
        self._to_decide.append(block.key)
        self._is_climbing = True
        self.go_on()
        return not self._is_undecided(block)

    def _decide_at_once(self, block: StoredBlock) -> None:
        while not self._decide(block):
            self.go_on()

    def go_on(self) -> None:
        """Go on with the decision that was begun, if there is one, for DECIDED_MAX blocks.

        The budget is asked from the start of a prefix on, so the first of its blocks that is not
        decided is looked for before any is decided.
        """
        for _ in range(DECIDED_MAX):
            if not self._to_decide:
                break
            block = self._index.by_key(self._to_decide[-1])
            if self._is_climbing:
                above = self._above(block) if block is not None else None
                if above is not None and self._is_undecided(above):
                    self._to_decide.append(above.key)
                else:
                    self._is_climbing = False
            else:
                del self._to_decide[-1]
                if block is not None and self._is_undecided(block):
                    self._ask(block)

    def _above(self, block: StoredBlock) -> StoredBlock | None:
        """Return the block before one. A parent in another place of the prefix is none: whoever put
        the block named it wrongly, and parents that name each other have no first one."""
        above = self._index.by_key(block.parent) if block.parent is not None else None
        if above is not None and above.block_index == block.block_index - 1:
            return above
        return None

    def _ask(self, block: StoredBlock) -> None:
        """Decide a block by what the budget says of its records."""
        if self.admits is not None:
            asked = [self.admits(block, record) for _, record in self._dirty.unwritten(block)]
            (self._admitted if all(asked) else self._spared).add(block.key)

    def _is_undecided(self, block: StoredBlock) -> bool:
        decided = block.key in self._admitted or block.key in self._spared
        return not decided and any(True for _ in self._dirty.unwritten(block))

    def _queue(self, block: StoredBlock) -> None:
        key = block.key
        if key in self._spared or (self.admits is not None and key not in self._admitted):
            return
        for part, record in self._dirty.unwritten(block):
            self._dirty.add(block, part, record)
        self._admitted.discard(key)

    def _is_unwritten(self, block: StoredBlock) -> bool:
        return block.key not in self._spared and any(
            record.resident is not None
            and record.frame is None
            and self._dirty.takes(record)
            and not self._dirty.has_failed(block.key, record.part)
            for record in block.records
        )
