"""The only writer of the index: every decision, none of the I/O.

The store asks, the planner answers at once and returns Moves; the mover carries them out and
reports back (`written`, `write_failed`, `read_done`). All methods run on one thread.

A record is always in one of these places, and every method below is a step between them:

    nowhere --place--> slot --commit--> arena, dirty --take_writes, written--> arena + frame
    arena + frame --place, which evicts--> frame --plan_reads, read_done--> arena + frame
    arena + frame --evict_file--> arena
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from operator import itemgetter

from kvstore.decide.index import Extent, HeldSlot, Index, StoredBlock, StoredFrame, StoredPart
from kvstore.decide.planner.demotion import Demotion
from kvstore.decide.planner.departures import Departures
from kvstore.decide.planner.dirty import DirtyRecords
from kvstore.decide.planner.leases import Reservation
from kvstore.decide.planner.ledger import Counts, Ledger
from kvstore.decide.planner.match import longest_hit
from kvstore.decide.planner.moves import Check, Read, Space, Write
from kvstore.decide.planner.pins import Pins
from kvstore.decide.planner.places import is_readable, reachable_groups
from kvstore.decide.planner.second_use import SecondUse
from kvstore.decide.planner.steps import STEP_BLOCKS, Steps
from kvstore.decide.planner.unwritten import Unwritten
from kvstore.decide.policy import PolicyFactory, WriteBudget, policy_by_name
from kvstore.model.block import BlockKey, Match, Namespace, NamespaceId, Part, Span, padded
from kvstore.model.outcome import Reason

RUN_BLOCKS_MAX = 16
RUN_NBYTES_MAX = 16 << 20
READ_NBYTES = 2 << 20
WRITE_BATCH_RECORDS_MAX = 8192
WITHDRAW_STEP_FRAMES = 64
DEPARTED_KEYS_MAX = 1 << 16
LRU = policy_by_name("lru")


@dataclass(slots=True)
class _Piece:
    """What one read will bring up: position in the frame, which record, where it goes."""

    frame: StoredFrame  # pinned
    items: list[tuple[int, StoredBlock, StoredPart, HeldSlot]] = field(default_factory=list)

    def read(self) -> Read:
        self.items.sort(key=itemgetter(0))
        positions, blocks, records, slots = zip(*self.items, strict=True)
        return Read(self.frame, self.frame.extent, positions, blocks, records, slots)


@dataclass(frozen=True, slots=True)
class Placement:
    """What `place` found: unpinned slots over the spans, and how many records had no room."""

    held: tuple[HeldSlot | None, ...]
    refused: int


@dataclass(slots=True)
class Deletion:
    """What a delete touched: how many blocks, and of which namespaces."""

    deleted: int = 0
    namespaces: set[NamespaceId] = field(default_factory=set)


class Planner:
    """Plans over one arena (`dram`) and at most one file tier (`file`).

    run_nbytes_max: payload of the largest frame that the file tier takes. read_nbytes_max: what one
    read brings up at most, if that is more than one record. write_budget: what it does not admit
    stays in the arena alone. write_on_demotion: write what is about to leave the arena, not
    everything at once. write_on_second_use: write what is used again.
    """

    def __init__(
        self,
        dram: Space,
        file: Space | None,
        *,
        now: Callable[[], float],
        dram_policy: PolicyFactory = LRU,
        file_policy: PolicyFactory = LRU,
        departed_keys_max: int = DEPARTED_KEYS_MAX,
        run_nbytes_max: int = RUN_NBYTES_MAX,
        read_nbytes_max: int = READ_NBYTES,
        write_budget: WriteBudget | None = None,
        write_on_demotion: bool = False,
        write_on_second_use: bool = False,
    ) -> None:
        self._now = now
        self._write_budget = write_budget
        self._ledger = Ledger(
            dram,
            file,
            dram_policy=dram_policy,
            file_policy=file_policy,
            now=now,
            departed_keys_max=departed_keys_max,
        )
        self.pins = Pins(self._ledger)
        self._write_on_demotion = write_on_demotion and file is not None
        if self._write_on_demotion:
            admits = self._to_be_written if write_budget is not None else None
            self._ledger.demotion = Demotion(self.index, self.dirty, admits)
        if write_on_second_use and file is not None:
            second = SecondUse(self.index, self.dirty, self._to_be_written)
            self._ledger.second_use = self._ledger.unwritten = second
        elif write_budget is not None and file is not None and not write_on_demotion:
            self._ledger.unwritten = Unwritten(self.index, self.dirty, self._is_within_budget)
        self._run_nbytes_max = min(run_nbytes_max, RUN_NBYTES_MAX)
        self._read_nbytes_max = read_nbytes_max

    def set_write_budget(self, nbytes_per_day: int) -> None:
        """Let so many bytes a day be written to the file tier from now on; 0 is no limit."""
        if not self._ledger.has_file:
            return
        if not nbytes_per_day:
            self._write_budget = None
        elif self._write_budget is not None:
            self._write_budget.set_rate(nbytes_per_day)
        else:
            self._write_budget = WriteBudget(nbytes_per_day, self._now)
        limited = self._write_budget is not None
        if self._ledger.demotion is not None:
            self._ledger.demotion.admits = self._to_be_written if limited else None
        elif self._ledger.second_use is None:
            offers = Unwritten(self.index, self.dirty, self._is_within_budget)
            self._ledger.unwritten = offers if limited else None

    @property
    def index(self) -> Index:
        return self._ledger.index

    @property
    def dirty(self) -> DirtyRecords:
        """What is not durable yet, to look at."""
        return self._ledger.dirty

    @property
    def counts(self) -> Counts:
        return self._ledger.counts

    @property
    def departures(self) -> Departures:
        """What left lately, and why."""
        return self._ledger.departures

    @property
    def resident_blocks(self) -> int:
        return self._ledger.resident_blocks

    @property
    def framed_blocks(self) -> int:
        return self._ledger.framed_blocks

    # ---- match -------------------------------------------------------------------------------

    def namespace(self, namespace_id: NamespaceId) -> Namespace:
        """Return a registered namespace, used last from now on. Raises UnknownNamespace."""
        return self.index.namespaces.use(namespace_id)

    def match(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        skip_blocks: int = 0,
        *,
        in_files: bool = False,
    ) -> Match:
        """Return how long the prefix would hit now. Changes nothing.

        in_files: what the asker could read in files by itself counts as resident.
        """
        namespace = self.namespace(namespace_id)
        blocks = self.index.find(namespace_id, keys)
        complete = [0 if block is None else block.complete for block in blocks]
        resident = [0 if block is None else block.resident_groups for block in blocks]
        if in_files and resident != complete:
            resident = [reachable_groups(block, namespace) if block else 0 for block in blocks]
        hit = longest_hit(namespace, complete, skip_blocks)
        if resident == complete:
            return Match(hit, hit)
        return Match(hit, longest_hit(namespace, resident, skip_blocks))

    def find(
        self, namespace_id: NamespaceId, keys: Sequence[BlockKey], spans: Sequence[Span]
    ) -> list[StoredPart | None]:
        """Return the records of `spans` in their order, None where one is not stored."""
        blocks = self.index.find(namespace_id, keys)
        return [
            None if block is None else block.record(part)
            for part, begin, end in spans
            for block in blocks[begin:end]
        ]

    def touch(self, prefix: Sequence[BlockKey]) -> None:
        """Note that a request asked for a prefix, whether or not all of it is stored."""
        if self._write_budget is not None:
            self._write_budget.asked(prefix)
        self._ledger.touch(prefix)

    # ---- hints: see also `pins` ----------------------------------------------------------------

    def end(self, prefix: Sequence[BlockKey]) -> Sequence[BlockKey]:
        """Take the hint that the session whose last request asked for a prefix is over; returns
        the blocks that it alone has used."""
        return self._ledger.end(prefix)

    def expect(self, prefix: Sequence[BlockKey], in_s: float) -> None:
        """Take the hint that somebody will ask for a prefix in so many seconds."""
        self._ledger.expect(prefix, self._now() + in_s)

    def send_down(self, prefix: Sequence[BlockKey]) -> tuple[int, int, bool]:
        """Take the hint that the arena has better uses than what only the last asker of a prefix
        has used. What is in the file tier leaves. Returns blocks, bytes, and whether to ask again
        when what is dirty is written."""
        return self._ledger.send_down(prefix)

    # ---- put ---------------------------------------------------------------------------------

    def place(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        spans: Sequence[Span],
        parent: BlockKey | None = None,
    ) -> Steps[Placement]:
        """Find slots for records, evicting for them; None where one is stored already.

        Blocks are served from the first on: where room ends, every later one is refused, because
        the start of a prefix is worth more than its end. What the arena has of the prefix stays.
        parent: the block before the first one.
        """
        namespace = self.namespace(namespace_id)
        starts = _starts(spans)
        held: list[HeldSlot | None] = [None] * starts.pop()
        refused = 0
        tail: list[HeldSlot] = []  # pinned: of the last block that is here, so all before it stay
        self._move_pin(tail, self.index.get(namespace_id, parent) if parent is not None else None)
        try:
            for i in range(len(keys)):
                if i and i % STEP_BLOCKS == 0:
                    yield
                block = self.index.get(namespace_id, keys[i])
                self._move_pin(tail, block)
                for span, start in zip(spans, starts, strict=True):
                    if not span.begin <= i < span.end or (block and block.record(span.part)):
                        continue
                    nbytes = namespace.record_nbytes(span.part)
                    slot = None if refused else self._ledger.find_slot(nbytes)
                    held[start + i - span.begin] = slot
                    refused += slot is None
        except BaseException:  # nobody waits for the answer any more
            for slot in held:
                if slot is not None:
                    self.unpin(slot)
            raise
        finally:
            self._ledger.drop_pins(tail)
        return Placement(tuple(held), refused)

    def _move_pin(self, tail: list[HeldSlot], block: StoredBlock | None) -> None:
        """Pin what the arena has of a block, instead of `tail`."""
        if block is None or not block.resident_parts:
            return
        slots = [r.resident for r in block.records if r.resident is not None]
        for slot in slots:
            slot.pins += 1
        self._ledger.drop_pins(tail)
        tail[:] = slots

    def commit(
        self,
        reservation: Reservation,
        held: Sequence[HeldSlot | None],
        checksums: Sequence[int],
        *,
        durable: bool = False,
    ) -> Steps[tuple[int, int]]:
        """Publish what was written into reserved slots. Keep them pinned until the last step.

        durable: write it behind at once in any case.

        Returns how many records are new, and how many another writer had published meanwhile.
        """
        new = existing = 0
        spans, index = reservation.spans, self.index
        starts = _starts(spans)
        for i in range(len(reservation.keys)):
            if i and i % STEP_BLOCKS == 0:
                yield
            touched = None
            for (part, begin, end), start in zip(spans, starts[:-1], strict=True):
                at = start + i - begin
                slot = held[at] if begin <= i < end else None
                if slot is None:
                    continue
                block = self._block_of(reservation, i)
                if block is None or block.record(part) is not None:
                    existing += 1
                    continue
                record = StoredPart(index.own_part(part), slot.nbytes, checksums[at])
                block.add(record)
                self._ledger.make_resident(block, record, slot)
                now = durable or self._is_written_at_once(block)
                if self._ledger.has_file and now and self._to_be_written(block, record):
                    self.dirty.add(block, part, record)
                touched = block
                new += 1
            if touched is not None:
                index.refresh(touched)
        return new, existing

    def _block_of(self, reservation: Reservation, i: int) -> StoredBlock | None:
        """Return the block to store under, None if another namespace has its key."""
        key = reservation.keys[i]
        block = self.index.get(reservation.namespace_id, key)
        if block is None and self.index.by_key(key) is None:
            parent = reservation.keys[i - 1] if i else reservation.parent
            if not i and parent is not None and (above := self.index.by_key(parent)) is not None:
                parent = above.key  # the same object
            block = StoredBlock(key, reservation.namespace_id, reservation.first_block + i, parent)
            self.index.add(block)
        return block

    def _is_written_at_once(self, block: StoredBlock) -> bool:
        """Say whether the admission lets a block be written that was just put."""
        if self._ledger.second_use is not None:
            return self._ledger.second_use.is_second(block)
        return not self._write_on_demotion

    def _to_be_written(self, block: StoredBlock, record: StoredPart) -> bool:
        """Spend the write budget on a record, if it lets it pass; count what it keeps out."""
        admitted = self._is_within_budget(block, record)
        self.counts.unwritten += not admitted
        return admitted

    def _is_within_budget(self, block: StoredBlock, record: StoredPart) -> bool:
        if self._write_budget is None:
            return True
        return self._write_budget.admits(
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
        namespace = self.index.namespaces.spec(block.namespace_id)
        if namespace is not None and all(group.window_tokens for group in namespace.groups):
            return True
        above = self.index.by_key(block.parent)
        if above is None:
            return False
        demotion = self._ledger.demotion
        return _is_written(above) or (demotion is not None and demotion.is_admitted(above.key))

    def demote(self, nbytes: int) -> None:
        """Queue the writes of what will leave the arena first, to have `nbytes` free later."""
        self._ledger.demote(nbytes)

    def shed(self, nbytes: int) -> int:
        """Evict what is to leave the arena first, about `nbytes` of it; returns the bytes freed."""
        return self._ledger.shed(nbytes)

    def demote_all(self) -> None:
        """Queue the writes of all that the arena alone has."""
        self._ledger.demote_all()

    # ---- write behind ------------------------------------------------------------------------

    def take_writes(self, nbytes_max: int) -> list[Write]:
        """Take dirty records, oldest first, as runs of consecutive blocks; slots get pinned."""
        runs: dict[tuple[NamespaceId, Part], list[list[tuple[StoredBlock, StoredPart]]]] = {}
        for key, part in self.dirty.take(nbytes_max, WRITE_BATCH_RECORDS_MAX):
            block = self.index.by_key(key)
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

    def written(
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
                self.dirty.clean(record)
                self._ledger.detach(block, record)  # that of a disk that came back meanwhile
                self._ledger.attach(frame, position, block, record)
        self._ledger.drop_pins(write.held)
        self._ledger.free_if_dead(frame)

    def write_failed(self, write: Write) -> None:
        """Note that a run could not be written: it stays in the arena and may be evicted."""
        for block, record in zip(write.blocks, write.stored, strict=True):
            if block.record(write.part) is record:
                self.dirty.fail(block.key, write.part, record)
        self._ledger.drop_pins(write.held)

    def is_wanted(self, write: Write) -> bool:
        """Say whether every record of a run under way is still stored."""
        records = zip(write.blocks, write.stored, strict=True)
        return all(block.record(write.part) is record for block, record in records)

    def write_corrupt(self, write: Write, keys: Sequence[BlockKey]) -> None:
        """Forget records of a failed write whose bytes are not what was committed."""
        for block, record in zip(write.blocks, write.stored, strict=True):
            if block.key in keys and block.record(write.part) is record:
                self._ledger.forget_part(block, record, Reason.CORRUPT)

    def retry_failed(self) -> None:
        """Queue what could not be written once more, as far as it is still in the arena."""
        for (key, part), record in self.dirty.take_failed().items():
            block = self.index.by_key(key)
            alive = block is not None and block.record(part) is record
            unwritten = record.resident is not None and record.frame is None
            if block and alive and unwritten and not record.dirty:
                self.dirty.add(block, part, record)

    def evict_file(self, nbytes: int, helps: Callable[[Extent], bool] = lambda extent: True) -> int:
        """Make room for a frame, of frames for which `helps` holds; returns the bytes of those
        that are on their way back, maybe fewer."""
        return self._ledger.evict_file(nbytes, helps)

    # ---- promotion ---------------------------------------------------------------------------

    def plan_reads(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        spans: Sequence[Span],
        *,
        first_alone: bool = False,
        in_files: bool = False,
    ) -> Generator[Read]:
        """Plan to bring up what `spans` names and the arena lacks, as far as there is room.

        In prefix order, in pieces of at most `read_nbytes_max` or one record, each yielded as soon
        as it is planned: the disk reads the first while the last are still looked for, and one
        large frame keeps a device's queue busy. Closed early, it gives back what it took.
        first_alone: the first block comes in reads of its own, and so is up sooner.
        in_files: what the asker can read in files by itself stays there.
        """
        pieces: dict[Part, _Piece] = {}
        planned: deque[Read] = deque()
        try:
            first = min((span.begin for span in spans), default=0)
            for index in range(first, max((span.end for span in spans), default=0)):
                while planned:
                    yield planned.popleft()
                block = self.index.get(namespace_id, keys[index])
                wanted = [part for part, begin, end in spans if begin <= index < end]
                if block and in_files:
                    wanted = [part for part in wanted if not is_readable(block.record(part))]
                if block and not all(self._arrives(block, p, pieces, planned) for p in wanted):
                    break
                if first_alone and pieces:
                    planned += [piece.read() for piece in pieces.values()]
                    pieces.clear()
                    first_alone = False
            planned += [piece.read() for piece in pieces.values()]
            pieces.clear()
            while planned:
                yield planned.popleft()
        finally:
            for read in (*planned, *(piece.read() for piece in pieces.values())):
                self.read_done(read, read.positions, corrupt=False)

    def _arrives(
        self, block: StoredBlock, part: Part, pieces: dict[Part, _Piece], planned: deque[Read]
    ) -> bool:
        """Put a record that is only in a frame into the part's piece. False: there is no room."""
        record = block.record(part)
        if record is None or record.frame is None or record.resident or record.loading:
            return True
        slot = self._ledger.find_slot(record.nbytes)
        if slot is None:
            return False
        slot.pins += 1
        record.loading = slot
        piece = pieces.get(part)
        limit = self._read_nbytes_max // padded(record.nbytes)
        if piece is not None and (piece.frame is not record.frame or len(piece.items) >= limit):
            planned.append(piece.read())
            piece = None
        if piece is None:
            record.frame.pins += 1
            piece = pieces[part] = _Piece(record.frame)
        piece.items.append((record.position, block, record, slot))
        return True

    def read_done(self, read: Read, bad: Sequence[int], *, corrupt: bool) -> None:
        """Note which blocks came up; positions in `bad` did not, and are forgotten if `corrupt`."""
        items = zip(read.positions, read.blocks, read.stored, read.held, strict=True)
        for position, block, record, slot in items:
            record.loading = None
            if block.record(read.frame.part) is not record:
                continue  # deleted meanwhile
            if position not in bad:
                self._ledger.make_resident(block, record, slot)
                self.index.refresh(block)
            elif (
                corrupt and record.frame is read.frame
            ):  # else a disk that is back has a better one
                self._ledger.forget_part(block, record, Reason.CORRUPT)
        self._ledger.drop_pins(read.held)
        self._ledger.unpin_frame(read.frame)

    def next_check(self, before: float) -> Check | None:
        """Take the frame that was not looked at for longest, if that was `before` some time."""
        for frame in self._ledger.frames:
            if frame.checked_at >= before:
                return None
            if frame.blocks:  # else it only waits for somebody's pin
                break
        else:
            return None
        self._ledger.frames.move_to_end(frame)
        frame.checked_at = self._now()
        frame.pins += 1
        positions, blocks = zip(*sorted(frame.blocks.items()), strict=True)
        records = [block.record(frame.part) for block in blocks]
        return Check(frame, positions, blocks, [record for record in records if record is not None])

    def check_of(
        self, block: StoredBlock, record: StoredPart, seen_s: float = math.inf
    ) -> Check | None:
        """Take one record of a frame to be looked at; None: it is in none, or is gone, or its
        frame was last seen to be good more than `seen_s` ago."""
        frame = record.frame
        if frame is None or block.record(record.part) is not record:
            return None
        if frame.checked_at < self._now() - seen_s:
            return None
        frame.pins += 1
        return Check(frame, (record.position,), (block,), (record,))

    def resident_is_wrong(self, block: StoredBlock, record: StoredPart, held: HeldSlot) -> None:
        """Note that the arena's bytes of a record are not what was put. What a frame has of it
        stays; without one, the part is forgotten."""
        if block.record(record.part) is not record or record.resident is not held:
            return
        if record.frame is None:
            self._ledger.forget_part(block, record, Reason.CORRUPT)
        else:
            self._ledger.drop_resident(block, record, Reason.CORRUPT)

    def check_done(self, check: Check, bad: Sequence[int]) -> None:
        """Note which positions of a frame are rotten. What the arena has as well is written anew;
        of the rest, the part is forgotten."""
        part = check.frame.part
        for position, block, record in zip(
            check.positions, check.blocks, check.stored, strict=True
        ):
            gone = block.record(part) is not record or record.frame is not check.frame
            if gone or position not in bad:
                continue
            if record.resident is None:
                self._ledger.forget_part(block, record, Reason.CORRUPT)
            else:
                self._ledger.detach(block, record)
                if not record.dirty:
                    self.dirty.add(block, part, record)
        self._ledger.unpin_frame(check.frame)

    def recover(
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
        index, part = self.index, self.index.own_part(frame.part)
        key_at = {position: key for position, key, _, _ in blocks}
        for position, key, nbytes, value in blocks:
            block = index.by_key(key)
            if block is None:
                above = key_at.get(position - 1) if position else parent
                block = StoredBlock(key, namespace_id, first_block + position, above)
                index.add(block)
            elif block.namespace_id != namespace_id:
                continue  # no honest writer stores one key in two namespaces
            record = block.record(part)
            if record is not None:
                if record.frame is not None and record.frame.sequence >= frame.sequence:
                    continue
                if (record.nbytes, record.checksum) == (nbytes, value):
                    self.dirty.drop(key, part, record)
                    self._ledger.detach(block, record)
                else:
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

    def save_policies(self) -> bytes:
        """Return what policies should know after a restart: a few MiB at most."""
        budget = self._write_budget
        return (budget.save() if budget is not None else b"") + self._ledger.save()

    def load_policies(self, saved: bytes) -> None:
        """Take what another life has saved, before anything is recovered; what cannot be read is
        ignored."""
        budget, policies = WriteBudget.split(saved)
        if self._write_budget is not None:
            self._write_budget.load(budget)
        self._ledger.load(policies)

    # ---- leaving -----------------------------------------------------------------------------

    def delete(self, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> Deletion:
        """Forget blocks now. What may be on disk is the mover's to bury."""
        blocks = (self.index.get(namespace_id, key) for key in keys)
        return self._forget([block for block in blocks if block is not None], Reason.DELETED)

    def clear(self, namespace_id: NamespaceId | None) -> Deletion:
        """Forget every block of a namespace, or of all."""
        blocks = self.index if namespace_id is None else self.index.blocks_in(namespace_id)
        return self._forget(list(blocks), Reason.CLEARED)

    @contextmanager
    def pinned(self, slots: Sequence[HeldSlot]) -> Iterator[None]:
        """Keep slots where they are for as long as the context lasts."""
        for held in slots:
            held.pins += 1
        try:
            yield
        finally:
            self._ledger.drop_pins(slots)

    @contextmanager
    def pinned_frames(self, frames: Collection[StoredFrame]) -> Iterator[None]:
        """Keep frames on their disks for as long as the context lasts."""
        for frame in frames:
            frame.pins += 1
        try:
            yield
        finally:
            for frame in frames:
                self.unpin_frame(frame)

    def unpin(self, held: HeldSlot) -> None:
        """Free a slot that neither the index nor anybody else holds any more."""
        self._ledger.unpin(held)

    def unpin_frame(self, frame: StoredFrame) -> None:
        """Undo one pin of a frame, which may have been deleted meanwhile: then it leaves now."""
        self._ledger.unpin_frame(frame)

    def _forget(self, blocks: Sequence[StoredBlock], reason: Reason) -> Deletion:
        deletion = Deletion()
        for block in dict.fromkeys(blocks):
            self._ledger.forget(block, reason)
            deletion.deleted += 1
            deletion.namespaces.add(block.namespace_id)
        return deletion


def _is_written(block: StoredBlock) -> bool:
    """Say whether the file tier has, or is getting, some of a block."""
    return any(record.frame is not None or record.dirty for record in block.records)


def _starts(spans: Sequence[Span]) -> list[int]:
    """Return where the slots of each span start in a grant, and at last how many there are."""
    return [0, *accumulate(end - begin for _, begin, end in spans)]


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
