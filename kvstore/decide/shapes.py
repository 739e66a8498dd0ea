"""What blocks that rest have in common, most of them: all but numbers. See `resting.py`."""

from __future__ import annotations

from typing import TypeAlias

from kvstore.decide.stored import ABSENT, UNJUDGED, groups_of
from kvstore.model.block import NamespaceId, Part

RecordShape: TypeAlias = tuple[Part, bool, bool, bool]
ShapeKey: TypeAlias = tuple[NamespaceId, int, int, tuple[int, int], tuple[RecordShape, ...]]


class Shape:
    """What a block that rests shares with others: all but numbers. `StoredBlock` says what the
    masks are.

    records: of each its part, whether it is fine, resident, and framed; the same of the first.
    is_plain: there is one, not fine, and the arena alone has it. is_double: there is one, not fine,
    and a frame has it too. absent: the shape of the same without the arena's copy, once it was
    asked for. resident_parts, framed_parts: records in the arena, and in frames. has_unwritten: the
    arena alone has one. users: blocks of this shape.
    """

    __slots__ = (
        "absent",
        "complete",
        "fine",
        "framed",
        "framed_parts",
        "has_unwritten",
        "is_double",
        "is_plain",
        "key",
        "namespace_id",
        "number",
        "part",
        "records",
        "refined",
        "resident",
        "resident_groups",
        "resident_parts",
        "unframed",
        "users",
    )

    def __init__(self, number: int, key: ShapeKey) -> None:
        self.number = number
        self.key = key
        self.namespace_id, self.complete, self.resident_groups, self.refined, self.records = key
        self.part, self.fine, self.resident, self.framed = self.records[0]
        is_one = len(self.records) == 1 and not self.fine and self.resident
        self.is_plain = is_one and not self.framed
        is_exact = self.refined == ABSENT and self.complete != UNJUDGED
        self.is_double = is_one and self.framed and is_exact
        self.absent: Shape | None = None
        self.unframed = groups_of(part for part, *_, framed in self.records if not framed)
        self.resident_parts = sum(resident for *_, resident, _ in self.records)
        self.framed_parts = sum(framed for *_, framed in self.records)
        self.has_unwritten = any(resident and not framed for *_, resident, framed in self.records)
        self.users = 0
