"""Blocks that nobody uses, in columns: about 40 bytes each, beside the key.

A block is an object with objects under it while something is done with it: it is put, leased,
written, read, evicted. For the rest of its life, hours of it, nobody holds any of them, and then it
is a row: numbers in arrays, and one number for what it shares with most others (its *shape*). It is
*woken*, that is, made of its row again, for whoever asks for it next.

Nobody has to say that he is done with a block. The reference counts of its objects say so: if
nothing but the index holds any of them, no one can tell whether they are the same later on.
"""

from __future__ import annotations

import struct
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from sys import getrefcount
from typing import Any

from kvstore.decide.rows import Objects, Rows
from kvstore.decide.shapes import RecordShape, Shape, ShapeKey
from kvstore.decide.stored import (
    FoundRun,
    HeldSlot,
    StoredBlock,
    StoredFrame,
    StoredPart,
    slot_at,
)
from kvstore.model.block import BlockKey, NamespaceId, Part, Slot

AWAKE_MAX = 512  # blocks that nobody uses: to wake one takes longer than to match one that is awake
AWAKE_PEAK = 4096  # above it, each that is woken lets others rest; else that waits for `settle`
LOOKED_AT = 2  # awake blocks, for each that is woken or comes
LOOKED_AT_IN_A_MATCH = 8
_RECORD = struct.Struct("<QQIIH")  # checksum, place, bytes; number of its frame, and position there


def _alone() -> int:
    """Return the reference count of what one container and one local variable hold."""
    container = [object()]
    item = container[0]
    return getrefcount(item)


_ALONE = _alone()


class Frames:
    """Frames by number, while a record that rests is in them."""

    def __init__(self) -> None:
        self._frames: list[StoredFrame | None] = [None]  # 0: in no frame
        self._free: list[int] = []

    def keep(self, frame: StoredFrame, records: int = 1) -> int:
        """Return the number of a frame in which one more record rests, or several."""
        if not frame.resting:
            if not self._free:
                self._free.append(len(self._frames))
                self._frames.append(None)
            frame.number = self._free.pop()
            self._frames[frame.number] = frame
        frame.resting += records
        return frame.number

    def drop(self, number: int) -> StoredFrame:
        """Return a frame; the record that rested there is awake, or gone."""
        frame = self._frames[number]
        assert frame is not None
        frame.resting -= 1
        if not frame.resting:
            self._frames[number] = None
            self._free.append(number)
        return frame


class Resting:
    """The blocks of an index, by row: awake ones, and those that rest.

    parents: of those that rest.
    """

    def __init__(self, rows: Rows) -> None:
        self.awake: OrderedDict[int, StoredBlock] = OrderedDict()  # awake for longest first
        self.shape_of = rows.column("I")  # 0: it is awake, or not in the index
        self.shapes: list[Shape | None] = [None]
        self.count = 0  # of those that rest
        self._rows = rows
        self._shapes: dict[ShapeKey, Shape] = {}
        self._last = _nobodys()  # what the last one to rest had
        self._free: list[int] = []
        self._frames = Frames()
        self._checksums = rows.column("Q")
        self._places = rows.column("Q")
        self._sizes = rows.column("I")
        self._indices = rows.column("I")
        self.parents: Objects[BlockKey | None] = rows.objects()
        # Made when there is a first one that needs them.
        self._in_frame: array[int] | None = None
        self._positions: array[int] | None = None
        self._more: Objects[bytes | None] | None = None  # records beyond the first

    def __len__(self) -> int:
        return len(self.awake) + self.count

    def came(self, row: int, block: StoredBlock) -> None:
        """Note a new block, or one that was woken."""
        self.awake[row] = block
        if len(self.awake) > AWAKE_PEAK:
            self.settle()

    def found(self, rows: range, run: FoundRun, frame: StoredFrame, like: StoredBlock) -> None:
        """Note new blocks that rest from the start, each with one record, in a frame. like: a block
        of their shape. Its numbers fit into rows."""
        if self._in_frame is None or self._positions is None:
            self._in_frame, self._positions = self._rows.column("I"), self._rows.column("H")
        at, count = slice(rows.start, rows.stop), len(rows)
        self._checksums[at] = array("Q", run.checksums)
        self._places[at] = array("Q", bytes(8 * count))
        self._sizes[at] = array("I", run.sizes)
        self._indices[at] = array("I", [run.first_block + each for each in run.positions])
        self._positions[at] = array("H", run.positions)
        self._in_frame[at] = array("I", [self._frames.keep(frame, count)]) * count
        self.parents.put(rows.start, run.parents)
        shape = self._shape(_key(like, _shapes_of(like.records)))
        self.shape_of[at] = array("I", [shape.number]) * count
        shape.users += count
        self.count += count

    def forget(self, row: int) -> None:
        """Forget a block that is awake."""
        del self.awake[row]

    def take(self, row: int) -> tuple[Shape, Slot] | None:
        """Forget a block that rests and is plain; return its shape and where it was. None: it is
        another one, and stays."""
        shape = self.shapes[self.shape_of[row]]
        if shape is None or not shape.is_plain:
            return None
        self._leave(row, shape)
        return shape, slot_at(self._places[row], self._sizes[row])

    def demote(self, row: int) -> tuple[Shape, Slot] | None:
        """Note that a block that rests has left the arena, if a frame has its one record as well;
        return its shape before, and where it was. None: it is another one, and stays."""
        shape = self.shapes[self.shape_of[row]]
        if shape is None or not shape.is_double:
            return None
        absent = shape.absent
        if absent is None or not absent.users:
            absent = shape.absent = self._absent(shape)
        absent.users += 1
        self.shape_of[row] = absent.number
        self._lose(shape)
        slot = slot_at(self._places[row], self._sizes[row])
        self._places[row] = 0
        return shape, slot

    def _absent(self, shape: Shape) -> Shape:
        part, fine, _, framed = shape.records[0]
        records = ((part, fine, False, framed),)
        return self._shape((shape.namespace_id, shape.complete, 0, shape.refined, records))

    def wake(self, row: int) -> StoredBlock:
        """Make a block of a row that rests. It rests again when nobody holds it."""
        shape = self.shapes[self.shape_of[row]]
        assert shape is not None
        block = StoredBlock(
            self._rows.keys[row], shape.namespace_id, self._indices[row], self.parents[row]
        )
        self._leave(row, shape)
        block.complete, block.resident_groups = shape.complete, shape.resident_groups
        block.refined = shape.refined
        if len(shape.records) == 1:
            record = StoredPart(shape.part, self._sizes[row], self._checksums[row], fine=shape.fine)
            if shape.resident:
                record.resident = HeldSlot.at(self._places[row], record.nbytes)
                block.resident_parts = 1
            if shape.framed and self._in_frame is not None and self._positions is not None:
                record.frame = self._frames.drop(self._in_frame[row])
                record.position = self._positions[row]
                block.framed_parts = 1
            block.stored = record
            self.came(row, block)
            return block
        for record in self._records(row, shape):
            block.add(record)
            block.resident_parts += record.resident is not None
            block.framed_parts += record.frame is not None
        self.came(row, block)
        return block

    def _leave(self, row: int, shape: Shape) -> None:
        self.shape_of[row] = 0
        self.parents[row] = None
        self.count -= 1
        self._lose(shape)

    def _lose(self, shape: Shape) -> None:
        """Note that a shape has one user less."""
        shape.users -= 1
        if not shape.users:
            self.shapes[shape.number] = None
            del self._shapes[shape.key]
            self._free.append(shape.number)

    def _records(self, row: int, shape: Shape) -> Iterator[StoredPart]:
        first, *others = shape.records
        number = position = 0
        if self._in_frame is not None and self._positions is not None:
            number, position = self._in_frame[row], self._positions[row]
        values = self._checksums[row], self._places[row], self._sizes[row], number, position
        yield self._record(first, values)
        if others:
            assert self._more is not None
            packed, self._more[row] = self._more[row], None
            assert packed is not None
            for each, values in zip(others, _RECORD.iter_unpack(packed), strict=True):
                yield self._record(each, values)

    def _record(self, shape: RecordShape, values: tuple[int, int, int, int, int]) -> StoredPart:
        part, fine, resident, framed = shape
        checksum, place, nbytes, number, position = values
        record = StoredPart(part, nbytes, checksum, fine=fine)
        if resident:
            record.resident = HeldSlot.at(place, nbytes)
        if framed:
            record.frame, record.position = self._frames.drop(number), position
        return record

    # ---- to rest -----------------------------------------------------------------------------

    def settle(self, most: int = LOOKED_AT) -> None:
        """Let blocks rest that nobody uses, if enough are awake. Looks at a few."""
        awake = self.awake
        spare = len(awake) - AWAKE_MAX
        for _ in range(most if spare > most else spare):
            row = next(iter(awake))
            block = awake[row]
            if getrefcount(block) <= _ALONE and self._rest(row, block):
                del awake[row]
            else:
                awake.move_to_end(row)

    def rest_all(self) -> None:
        """Let all blocks rest that nobody uses. It looks at all that are awake."""
        for row in list(self.awake):
            block = self.awake[row]
            if getrefcount(block) <= _ALONE and self._rest(row, block):
                del self.awake[row]

    def _rest(self, row: int, block: StoredBlock) -> bool:
        """Write a block into its row. False: it is in use, or has values that a row has no room
        for. Most have one record."""
        record = block.stored
        if type(record) is not StoredPart:
            del record  # or it would be one more that holds it
            return _is_unused(block) and self._rest_slowly(row, block)
        if record.dirty or record.loading is not None or getrefcount(record) > _ALONE:
            return False
        held, frame = record.resident, record.frame
        if held is not None:
            if held.pins or getrefcount(held) > _ALONE or held.nbytes != record.nbytes:
                return False
            place = held.place
        else:
            place = 0
        try:
            self._checksums[row] = record.checksum
            self._places[row] = place
            self._sizes[row] = record.nbytes
            self._indices[row] = block.block_index
            if frame is not None:
                self._rest_in_frame(row, record, frame)
        except OverflowError:
            return False
        shape = self._last
        if (
            record.part is not shape.part
            or block.namespace_id is not shape.namespace_id
            or block.complete != shape.complete
            or block.resident_groups != shape.resident_groups
            or block.refined is not shape.refined
            or record.fine is not shape.fine
            or (held is None) is shape.resident
            or (frame is None) is shape.framed
            or len(shape.records) != 1
            or not shape.users
        ):
            key = _key(block, _shapes_of((record,)))
            shape = self._last = self._shape(key)
        self.parents[row] = block.parent
        self.shape_of[row] = shape.number
        shape.users += 1
        self.count += 1
        return True

    def _rest_in_frame(self, row: int, record: StoredPart, frame: StoredFrame) -> None:
        if self._in_frame is None or self._positions is None:
            self._in_frame, self._positions = self._rows.column("I"), self._rows.column("H")
        self._positions[row] = record.position
        self._in_frame[row] = self._frames.keep(frame)

    def _rest_slowly(self, row: int, block: StoredBlock) -> bool:
        """The same for one that has several records."""
        records = block.records
        first = records[0]
        values = [_values(record) for record in records]
        try:
            self._checksums[row], self._places[row], self._sizes[row] = values[0]
            self._indices[row] = block.block_index
            more = b"".join([_RECORD.pack(*each, 0, 0) for each in values[1:]])
        except (OverflowError, struct.error):
            return False
        if block.framed_parts:
            if self._in_frame is None or self._positions is None:
                self._in_frame, self._positions = self._rows.column("I"), self._rows.column("H")
            numbers = [0 if r.frame is None else self._frames.keep(r.frame) for r in records]
            self._in_frame[row], self._positions[row] = numbers[0], first.position
            others = zip(values[1:], numbers[1:], records[1:], strict=True)
            more = b"".join([_RECORD.pack(*each, n, r.position) for each, n, r in others])
        if more:
            if self._more is None:
                self._more = self._rows.objects()
            self._more[row] = more
        key = _key(block, _shapes_of(records))
        shape = self._shape(key)
        self.parents[row] = block.parent
        self.shape_of[row] = shape.number
        shape.users += 1
        self.count += 1
        return True

    def _shape(self, key: ShapeKey) -> Shape:
        """Return the shape for a key, for one user more."""
        known = self._shapes.get(key)
        if known is not None:
            return known
        if not self._free:
            self._free.append(len(self.shapes))
            self.shapes.append(None)
        number = self._free.pop()
        shape = self.shapes[number] = self._shapes[key] = Shape(number, key)
        return shape


def _nobodys() -> Shape:
    block = StoredBlock(BlockKey(b""), NamespaceId(b""), 0, None)
    return Shape(0, _key(block, ((Part(0, 0), False, False, False),)))


def _key(block: StoredBlock, records: tuple[RecordShape, ...]) -> ShapeKey:
    """Return what tells shapes apart."""
    masks = block.complete, block.resident_groups, block.refined
    return block.namespace_id, *masks, records


def _shapes_of(records: Sequence[StoredPart]) -> tuple[RecordShape, ...]:
    return tuple((r.part, r.fine, r.resident is not None, r.frame is not None) for r in records)


def _values(record: StoredPart) -> tuple[int, int, int]:
    place = record.resident.place if record.resident is not None else 0
    return record.checksum, place, record.nbytes


def _is_unused(block: StoredBlock) -> bool:
    """Say whether nobody holds a record or slot of a block that has several, or works on one."""
    stored: Any = block.stored
    if getrefcount(stored) > _ALONE:
        return False
    for record in stored.values() if type(stored) is dict else stored:
        if getrefcount(record) > _ALONE or not _is_quiet(record):
            return False
    return True


def _is_quiet(record: StoredPart) -> bool:
    held = record.resident
    if held is not None and (
        getrefcount(held) > _ALONE or held.pins or held.nbytes != record.nbytes
    ):
        return False
    return not record.dirty and record.loading is None and record.position < 1 << 16
