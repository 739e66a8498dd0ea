"""Which blocks may have come, moved or left since somebody last looked.

The steps that move records call `note`, once for each, so it has to be cheap. Where a block is now
is only worked out when somebody looks: ten moves of a block in between are told as one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from kvstore.model.block import BlockKey, Namespace, NamespaceId

if TYPE_CHECKING:
    from kvstore.decide.index import StoredBlock

IN_DRAM = 1
IN_FILES = 2


class Gone(NamedTuple):
    """A block that left while nobody held it: there is no object of it."""

    key: BlockKey
    namespace_id: NamespaceId
    resident_groups: int = 0
    resident_parts: int = 0
    framed_parts: int = 0


Noted: TypeAlias = "StoredBlock | Gone"


class Changed:
    """Blocks in the order in which they first changed. on_change: told when there is a first one.

    As many as there are blocks at most, and those that left since the last look.
    """

    def __init__(self) -> None:
        self._blocks: dict[BlockKey, Noted] = {}
        self.on_change: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return len(self._blocks)

    def note(self, block: Noted) -> None:
        """Note that a block came, moved or left."""
        blocks = self._blocks
        if not blocks:
            self.on_change()
        blocks[block.key] = block

    def note_again(self, block: Noted) -> None:
        """Note a block that was taken, if nothing newer is known of it."""
        if block.key not in self._blocks:
            self.note(block)

    def take(self) -> Iterator[Noted]:
        """Take all of them. Those that change from now on are for the next look."""
        taken, self._blocks = self._blocks, {}
        return iter(taken.values())


def prefix_groups(namespace: Namespace) -> int:
    """Return the groups, as bits, that a resume needs of every block: those without a window."""
    return sum(1 << i for i, group in enumerate(namespace.groups) if not group.window_tokens)


def places_of(blocks: Sequence[Noted], needed: int) -> bytes:
    """Return `place_of` each block. Those without a file are told apart here: most, after puts."""
    return bytes(
        [
            place_of(block, needed)
            if block.framed_parts
            else IN_DRAM
            if block.resident_parts
            and (resident := block.resident_groups)
            and resident & needed == needed
            else 0
            for block in blocks
        ]
    )


def place_of(block: Noted, needed: int) -> int:
    """Return IN_DRAM, IN_FILES, both or 0: which tiers have all the groups `needed` of a block.

    Without such groups, some group has to be there. A block that is complete only in the two tiers
    together is in neither.
    """
    if isinstance(block, Gone) or not (block.resident_parts or block.framed_parts):
        return 0  # it left, and its masks were not looked at since
    complete, resident = block.complete, block.resident_groups
    if not complete or complete & needed != needed:
        return 0
    place = IN_DRAM if resident and resident & needed == needed else 0
    if block.framed_parts:
        records = block.records
        if block.framed_parts == len(records):
            return place | IN_FILES
        if needed and all(
            record.frame is not None for record in records if needed >> record.part.group & 1
        ):
            return place | IN_FILES
    return place
