"""Admission to the file tier: which records of the arena are written, and when.

A record is written when it is put, or when it is about to be demoted, or when it is used again. A
write budget, if there is one, has the last word.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstore.decide.index import StoredBlock, StoredPart
from kvstore.decide.planner.demotion import Demotion
from kvstore.decide.planner.ledger import Ledger
from kvstore.decide.planner.second_use import SecondUse
from kvstore.decide.planner.steps import Steps
from kvstore.decide.planner.unwritten import Unwritten
from kvstore.decide.policy import WriteBudget
from kvstore.model.block import BlockKey


class Admission:
    """Decides what the write-behind queue gets. budget: None is no limit."""

    def __init__(
        self,
        ledger: Ledger,
        budget: WriteBudget | None,
        *,
        on_demotion: bool,
        on_second_use: bool,
        now: Callable[[], float],
    ) -> None:
        self._ledger = ledger
        self._index = ledger.index
        self._budget = budget
        self._now = now
        self._second_use: SecondUse | None = None
        self._offered_again: Unwritten | None = None  # None: offered once, when it is put
        if not ledger.has_file:
            return
        if on_demotion:
            admits = self.to_be_written if budget is not None else None
            ledger.demotion = Demotion(ledger.index, ledger.dirty, admits)
        if on_second_use:
            self._second_use = SecondUse(ledger.index, ledger.dirty, self.to_be_written)
            self._offered_again = self._second_use
        elif budget is not None and not on_demotion:
            self._offered_again = self._offers()

    def _offers(self) -> Unwritten:
        return Unwritten(self._index, self._ledger.dirty, self._is_within_budget)

    @property
    def budget(self) -> WriteBudget | None:
        return self._budget

    def set_budget(self, nbytes_per_day: int) -> None:
        """Let so many bytes a day be written to the file tier from now on; 0 is no limit."""
        if not self._ledger.has_file:
            return
        if not nbytes_per_day:
            self._budget = None
        elif self._budget is not None:
            self._budget.set_rate(nbytes_per_day)
        else:
            self._budget = WriteBudget(nbytes_per_day, self._now)
        limited = self._budget is not None
        if self._ledger.demotion is not None:
            self._ledger.demotion.admits = self.to_be_written if limited else None
        elif self._second_use is None:
            self._offered_again = self._offers() if limited else None

    def asked(self, prefix: Sequence[BlockKey]) -> None:
        """Note that a request asked for a prefix, whether or not all of it is stored."""
        if self._budget is not None:
            self._budget.asked(prefix)

    def used(self, prefix: Sequence[BlockKey]) -> None:
        """Offer to the file tier what it lacks of a prefix that was just used."""
        own, again = self._ledger.copies.use(prefix, self._index.by_key)
        if self._ledger.demotion is not None:
            self._ledger.demotion.want(own)
        if self._offered_again is not None:
            self._offered_again.used(own)
        elif again and self._ledger.demotion is None:
            Unwritten(self._index, self._ledger.dirty, self.to_be_written).used(own)

    def copied(self, key: BlockKey) -> None:
        """Note a block that another host has as well: it may leave unwritten until its second
        use."""
        self._ledger.copies.came(key)
        if self._ledger.demotion is not None:
            self._ledger.demotion.spare([key])

    def offer_all(self) -> Steps[bool]:
        """Queue the writes of all that the arena alone has. Returns whether it has a record that
        nobody is going to write, since the write budget has kept some out: of a block that was
        there at first, and that other hosts have not as well."""
        came = self._index.walks.added
        demotion, copies = self._ledger.demotion, self._ledger.copies
        if demotion is not None:
            yield from demotion.queue_all()
        elif self._second_use is not None:
            yield from self._second_use.queue_all(besides=copies)
        elif (
            self._budget is None and self._ledger.counts.unwritten
        ):  # it had one, and kept some out
            every = Unwritten(self._index, self._ledger.dirty, self.to_be_written)
            yield from every.queue_all(besides=copies)
        if not self._ledger.counts.unwritten:
            return False
        for keys in self._index.walks.unwritten(came):
            blocks = map(self._index.by_key, [key for key in keys if key not in copies])
            if any(True for each in blocks if each for _ in self._ledger.dirty.unwritten(each)):
                return True
            yield
        return False

    def is_written_at_once(self, block: StoredBlock) -> bool:
        """Say whether the admission lets a block be written that was just put."""
        if self._second_use is not None:
            return self._second_use.is_second(block)
        return self._ledger.demotion is None

    def to_be_written(self, block: StoredBlock, record: StoredPart) -> bool:
        """Spend the write budget on a record, if it lets it pass; count what it keeps out."""
        admitted = self._is_within_budget(block, record)
        self._ledger.counts.unwritten += not admitted
        return admitted

    def _is_within_budget(self, block: StoredBlock, record: StoredPart) -> bool:
        if self._budget is None:
            return True
        return self._budget.admits(
            block.key,
            record.nbytes,
            parent=block.parent,
            begun=self._is_begun(block),
            half=_is_written(block),
        )

    def _is_begun(self, block: StoredBlock) -> bool:
        """Say whether the file tier has, or is getting, what a hit needs before a block."""
        if block.parent is None:
            return True
        namespace = self._index.namespaces.spec(block.namespace_id)
        if namespace is not None and all(group.window_tokens for group in namespace.groups):
            return True
        above = self._index.by_key(block.parent)
        if above is None:
            return False
        demotion = self._ledger.demotion
        return _is_written(above) or (demotion is not None and demotion.is_admitted(above.key))

    def save(self) -> bytes:
        """Return what the write budget should know after a restart."""
        return self._budget.save() if self._budget is not None else b""

    def load(self, saved: bytes) -> bytes:
        """Take what `save` returned; returns the bytes that follow it."""
        budget, rest = WriteBudget.split(saved)
        if self._budget is not None:
            self._budget.load(budget)
        return rest


def _is_written(block: StoredBlock) -> bool:
    """Say whether the file tier has, or is getting, some of a block."""
    return any(record.frame is not None or record.dirty for record in block.records)
