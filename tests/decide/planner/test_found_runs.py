"""What a start finds on disk is indexed run by run, all of a run in one where that can be done. The
books are the same as if each block had been looked at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.decide.changed import Changed
from kvstore.decide.heads import Heads
from kvstore.decide.index import FoundRun, StoredBlock, StoredFrame
from kvstore.decide.planner import Planner
from kvstore.decide.planner.ledger import Ledger
from kvstore.decide.rows import SPLIT_ROWS, STEP_ROWS, Rows
from kvstore.model.block import BlockKey, Group, Namespace, NamespaceId, Part
from kvstore.model.keys import KeyChain, root_key
from kvstore.model.outcome import Reason
from tests.decide.planner.spaces import RECORD, CountingSpace

ONE = Namespace(512, (Group("all", RECORD),), (("test", "one record"),))
TWO = Namespace(512, (Group("all", RECORD, shards=2),), (("test", "two records"),))
WHOLE, SECOND = Part(0, 0), Part(0, 1)


def chain_of(namespace: Namespace, blocks: int) -> list[BlockKey]:
    return KeyChain(root_key(namespace.id), 512).update([7] * 512 * blocks)


class Books:
    """A planner that runs are found for. one_by_one: it looks at each block."""

    def __init__(self, *, one_by_one: bool = False) -> None:
        self.file = CountingSpace(RECORD << 12)
        self.planner = Planner(CountingSpace(8 * RECORD), self.file, now=lambda: 0.0)
        self.index = self.planner.index
        self.index.heads, self.index.changed = Heads(), Changed()
        self.index.register(ONE)
        self.index.register(TWO)
        self.ledger: Ledger = self.planner.recovery._ledger
        if one_by_one:
            self.ledger.adopt = lambda frame, run: False  # type: ignore[method-assign]

    def find(
        self,
        keys: Sequence[BlockKey],
        sequence: int = 1,
        *,
        first_block: int = 0,
        parent: BlockKey | None = None,
        namespace_id: NamespaceId = ONE.id,
        part: Part = WHOLE,
        positions: Sequence[int] = (),
        nbytes: int = RECORD,
    ) -> StoredFrame:
        positions = positions or range(len(keys))
        extent = self.file.allocate((max(positions) + 1) * RECORD)
        frame = StoredFrame(extent, part, 0, (RECORD,) * (max(positions) + 1), sequence)
        blocks = [
            (position, key, nbytes, sequence << 32 | position)
            for position, key in zip(positions, keys, strict=True)
        ]
        self.planner.recovery.add(
            namespace_id, frame, blocks, first_block=first_block, parent=parent
        )
        return frame

    @property
    def facts(self) -> dict[str, Any]:
        """All that can be asked of the books."""
        self.index.rest()
        victims = list(self.planner.policies.file.victims())
        blocks = [_facts(block) for block in self.index]
        assert self.index.heads is not None
        assert self.index.changed is not None
        return {
            "blocks": blocks,
            "victims": victims,
            "framed": self.ledger.framed_blocks,
            "frames": [
                (frame.extent, frame.blocks, frame.resting, frame.pins)
                for frame in self.ledger.frames
            ],
            "heads": sorted(self.index.heads.at(0)),
            "changed": sorted(self.index.changed.take()),
            "bytes": [
                (each.file_nbytes, dict(each.file_records), each.blocks)
                for each in map(self.index.namespaces.find, (ONE.id, TWO.id))
                if each is not None
            ],
            "live": sorted(self.file.live),
        }


def _facts(block: StoredBlock) -> tuple[Any, ...]:
    records = [
        (r.part, r.nbytes, r.checksum, r.fine, r.position, r.frame and r.frame.sequence, r.resident)
        for r in block.records
    ]
    masks = block.complete, block.resident_groups, block.refined
    counts = block.framed_parts, block.resident_parts
    return block.key, block.namespace_id, block.block_index, block.parent, masks, counts, records


KEYS = chain_of(ONE, 24)


@st.composite
def _runs(draw: st.DrawFn) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = []
    for sequence in range(1, draw(st.integers(1, 8)) + 1):
        first = draw(st.integers(0, len(KEYS) - 1))
        keys = KEYS[first : first + draw(st.integers(1, 8))]
        if draw(st.booleans()):  # one of them is dead
            dead = draw(st.integers(0, len(keys) - 1))
            positions = [at for at in range(len(keys)) if at != dead] or [0]
        else:
            positions = list(range(len(keys)))
        keys = [keys[at] for at in positions]
        if draw(st.integers(0, 9)) == 0:
            keys = [keys[0]] * len(keys)  # no honest writer does
        runs.append(
            {
                "keys": keys,
                "sequence": sequence,
                "first_block": first,
                "parent": KEYS[first - 1] if first else None,
                "positions": positions,
                "part": draw(st.sampled_from([WHOLE, WHOLE, WHOLE, SECOND, Part(3, 0)])),
                "namespace_id": draw(st.sampled_from([ONE.id, ONE.id, TWO.id])),
                "nbytes": draw(st.sampled_from([RECORD, RECORD, 1, 1 << 32])),
            }
        )
    return draw(st.permutations(runs))


@given(_runs())
@settings(max_examples=150, deadline=None)
def test_the_books_are_the_same_as_of_blocks_that_are_looked_at(runs: list[dict[str, Any]]) -> None:
    books, others = Books(), Books(one_by_one=True)
    for run in runs:
        books.find(**run)
        others.find(**run)
    assert books.facts == others.facts


def test_what_was_found_goes_one_after_the_other() -> None:
    books = Books()
    books.find(KEYS[:16])
    books.find(KEYS[16:], 2, first_block=16, parent=KEYS[15])
    for key in reversed(KEYS):
        block = books.index.by_key(key)
        assert block is not None
        books.ledger.forget(block, Reason.DELETED)
    assert not books.file.live
    assert not len(books.index)
    assert books.ledger.framed_blocks == 0


def test_who_notes_what_comes_hears_of_all_of_it() -> None:
    books = Books()
    with books.index.noting() as came:
        books.find(KEYS[:5])
    assert came == KEYS[:5]


def test_a_run_whose_numbers_have_no_room_in_a_row_is_looked_at() -> None:
    run = FoundRun(ONE.id, 0, [0], KEYS[:1], [None], [RECORD], [1])
    assert run.fits_rows
    assert not run._replace(positions=[1 << 16]).fits_rows
    assert not run._replace(first_block=(1 << 32) - 1, positions=[1]).fits_rows
    assert not run._replace(sizes=[1 << 32]).fits_rows


@pytest.mark.parametrize("before", [0, SPLIT_ROWS])
def test_new_rows_come_in_one_piece(before: int) -> None:
    rows = Rows()
    keeper, other = rows.keeper(), rows.keeper()
    many = [BlockKey(number.to_bytes(32, "little")) for number in range(before + 3 * STEP_ROWS)]
    for key in many[:before]:
        rows.keep(key, other)
    new = many[before:]
    found = rows.keep_new(new, keeper)
    assert found is not None
    assert rows.find_all(new) == list(found)
    assert [rows.keys[row] for row in found] == new
    assert {rows.kept_by[row] for row in found} == {keeper}
    assert rows.end == found.stop


def test_rows_that_are_there_or_free_are_not_new() -> None:
    rows = Rows()
    keeper = rows.keeper()
    one, two = (BlockKey(bytes([number]) * 32) for number in (1, 2))
    row = rows.keep(one, keeper)
    assert rows.keep_new([two, one], keeper) is None
    assert rows.keep_new([two, two], keeper) is None
    rows.drop(row, keeper)
    assert rows.keep_new([two], keeper) is None
    assert rows.find(two) == 0
