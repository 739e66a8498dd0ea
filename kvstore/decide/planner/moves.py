"""The moves a planner returns, and the bookkeeping side of a tier it plans with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvstore.decide.index import Extent, HeldSlot, StoredBlock, StoredFrame, StoredPart
from kvstore.model.block import NamespaceId, Part, padded


class Space(Protocol):
    """The half of a tier that costs no I/O."""

    def allocate(self, nbytes: int) -> Any | None:
        """Set `nbytes` aside and return the place, or None when there is no room."""

    def free(self, place: Any) -> None:
        """Give a place back."""


@dataclass(frozen=True, slots=True)
class Write:
    """Write a run behind: consecutive blocks of one prefix, one part, into one frame."""

    namespace_id: NamespaceId
    part: Part
    blocks: Sequence[StoredBlock]
    stored: Sequence[StoredPart]
    held: Sequence[HeldSlot]  # pinned until `Writes.done` or `Writes.failed`

    @property
    def nbytes(self) -> int:
        return sum(slot.nbytes for slot in self.held)


@dataclass(frozen=True, slots=True)
class Read:
    """Promote blocks of one frame. `held` are empty slots, pinned until `Reads.done`."""

    frame: StoredFrame
    extent: Extent
    positions: Sequence[int]  # ascending
    blocks: Sequence[StoredBlock]
    stored: Sequence[StoredPart]
    held: Sequence[HeldSlot]


@dataclass(frozen=True, slots=True)
class Check:
    """Look whether the live records of a frame, pinned until `Checks.done`, are good."""

    frame: StoredFrame
    positions: Sequence[int]  # ascending
    blocks: Sequence[StoredBlock]
    stored: Sequence[StoredPart]

    @property
    def nbytes(self) -> int:
        return sum(padded(self.frame.stored_nbytes[position]) for position in self.positions)
