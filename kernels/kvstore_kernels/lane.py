"""Records between device pages and host memory, one direction: packed on the device, moved by DMA.

    pages --gather--> a piece of the ring --DMA--> the arena's slots      (pack stream, copy stream)
    the arena's slots --DMA--> a piece of the ring --scatter--> pages

The ring is a few pieces of device memory, so packing one overlaps the copy of another, and the
model's SMs are held for the packing alone. The copy goes straight to and from slots that are
registered with the device; for others through a pinned buffer beside the piece, which costs the
host another copy and is counted. Each direction has its own streams, so loads do not queue behind
saves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any, NamedTuple

from torch import Tensor

from kvstore_kernels.device import Device, Event, memory_on
from kvstore_kernels.layout import ALIGNMENT
from kvstore_kernels.packing import Batch, Leaves, PagedKV, Sums, leaves_of
from kvstore_kernels.registration import Extents, Place, Registration
from kvstore_kernels.views import tensor_of

PIECES = 3
PIECE_NBYTES = 32 << 20


class Transfer(NamedTuple):
    """Blocks and the host memory of their records, each at least as long as the record is."""

    paged: PagedKV
    batch: Batch
    records: Sequence[memoryview]


class Staging:
    """Device memory, and the pinned buffer beside it, made when it is needed."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self.staged = memory_on(device.torch_device, nbytes)
        self._device = device
        self._pinned: Tensor | None = None

    @property
    def pinned(self) -> Tensor:
        if self._pinned is None:
            self._pinned = self._device.pinned(len(self.staged))
        return self._pinned


class _Run(NamedTuple):
    """Bytes [begin, end) of host memory, staged from `at` on."""

    host: Tensor
    begin: int
    end: int
    at: int

    def goes_on_with(self, after: _Run) -> bool:
        """Whether `after` adjoins, in host memory and staged."""
        staged_end = self.at + self.end - self.begin
        return (self.end, staged_end) == (after.begin, after.at) and self.host is after.host


@dataclass(slots=True)
class _Round:
    """What one piece carries: some records of one transfer.

    reached: where the device reaches each record, or None. holds: keeps it so.
    """

    paged: PagedKV
    batch: Batch
    offsets: list[int]
    views: list[memoryview]
    ends_transfer: bool
    piece: Staging
    records: list[Tensor] = field(default_factory=list)
    reached: list[Place | None] = field(default_factory=list)
    holds: ExitStack = field(default_factory=ExitStack)
    sums: Sums | None = None
    done: Event | None = None

    def gather(self) -> None:
        self.sums = self.paged.gather(self.batch, self.piece.staged)

    def scatter(self) -> None:
        self.sums = self.paged.scatter(self.piece.staged, self.batch)

    def copy_out(self) -> None:
        for begin, host in self._copies():
            host.copy_(self.piece.staged[begin : begin + len(host)], non_blocking=True)

    def copy_in(self) -> None:
        for begin, host in self._copies():
            self.piece.staged[begin : begin + len(host)].copy_(host, non_blocking=True)

    def bounced(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the records the device does not reach, with their place in the pinned buffer."""
        for index, record in enumerate(self.records):
            if self.reached[index] is None:
                begin = self.offsets[index]
                yield record, self.piece.pinned[begin : begin + len(record)]

    def leaves(self) -> Leaves:
        """Return the sums of the device, or those of the bytes in host memory now."""
        return list(map(leaves_of, self.records)) if self.sums is None else self.sums.leaves()

    def _copies(self) -> Iterator[tuple[int, Tensor]]:
        """Yield (offset in the piece, host memory); what adjoins in both is one copy."""
        run: _Run | None = None
        for after in map(self._run, range(len(self.records))):
            if run is not None and run.goes_on_with(after):
                run = run._replace(end=after.end)
                continue
            if run is not None:
                yield run.at, run.host[run.begin : run.end]
            run = after
        if run is not None:
            yield run.at, run.host[run.begin : run.end]

    def _run(self, index: int) -> _Run:
        at, nbytes, reached = self.offsets[index], len(self.records[index]), self.reached[index]
        if reached is None:
            return _Run(self.piece.pinned, at, at + _padded(nbytes), at)
        host, begin = reached
        return _Run(host, begin, begin + nbytes, at)


class Lane:
    """One direction. Used by one thread at a time. bounced_nbytes: what took the slower path."""

    def __init__(
        self,
        device: Device,
        record_nbytes_max: int,
        registration: Registration | None = None,
        *,
        pieces: int = PIECES,
        piece_nbytes: int = PIECE_NBYTES,
    ) -> None:
        """registration: what host memory the device reaches; None if it reaches none."""
        self.bounced_nbytes = 0
        self._registration = registration
        self._piece_nbytes = max(piece_nbytes, _padded(record_nbytes_max))
        self._pieces = [Staging(device, self._piece_nbytes) for _ in range(pieces)]
        device.mark().synchronize()  # what had this memory before may still have been in use
        self._pack = device.stream()
        self._copy = device.stream()

    def read(self, transfers: Sequence[Transfer], after: Any) -> Generator[Leaves]:
        """Copy device blocks into records, once the device has come to `after`.

        Yields for each transfer, in order and when it is done, the sums of its records' leaves.
        Raises ValueError, before anything is copied, for blocks or records that do not fit."""
        return self._flow(transfers, after, out=True)

    def write(self, transfers: Sequence[Transfer], after: Any) -> Generator[Leaves]:
        """Copy records into device blocks, once the device has come to `after`; else the same."""
        return self._flow(transfers, after, out=False)

    def _flow(self, transfers: Sequence[Transfer], after: Any, *, out: bool) -> Generator[Leaves]:
        rounds = list(self._rounds(transfers))  # here is found what does not fit
        under_way: deque[_Round] = deque()
        leaves: Leaves = []
        try:
            self._pack.wait(after)
            for round_ in rounds:
                if len(under_way) == len(self._pieces):
                    yield from self._end_first(under_way, leaves, out)
                under_way.append(round_)
                self._begin(round_, out)
            while under_way:
                yield from self._end_first(under_way, leaves, out)
        finally:
            # Whatever happened: nobody may have this memory while a copy is in flight.
            self._copy.record().synchronize()
            self._pack.record().synchronize()
            for round_ in under_way:
                round_.holds.close()

    def _rounds(self, transfers: Sequence[Transfer]) -> Iterator[_Round]:
        """Cut transfers into what fits into a piece. The n-th round has the piece of n modulo
        their number: rounds end in the order in which they began."""
        pieces = cycle(self._pieces)
        for paged, batch, views in transfers:
            sizes = _sizes(paged, batch, views)
            offsets = paged.offsets(batch)
            for part in self._parts(offsets):
                begin = offsets[part.start]
                yield _Round(
                    paged=paged,
                    batch=batch[part],
                    offsets=[at - begin for at in offsets[part]],
                    views=[
                        view[:size] for view, size in zip(views[part], sizes[part], strict=True)
                    ],
                    ends_transfer=part.stop == len(sizes),
                    piece=next(pieces),
                )

    def _parts(self, offsets: list[int]) -> Iterator[slice]:
        """Yield what goes together of records at `offsets`, of which the last is their end."""
        first = 0
        for index, end in enumerate(offsets[1:]):
            if end - offsets[first] > self._piece_nbytes:
                yield slice(first, index)
                first = index
        yield slice(first, len(offsets) - 1)

    def _begin(self, round_: _Round, out: bool) -> None:
        round_.records = [tensor_of(view) for view in round_.views]
        round_.reached = [None] * len(round_.records)
        if self._registration is not None:
            held = self._registration.held(round_.records)
            round_.reached = round_.holds.enter_context(held)
        if out:
            self._pack.run(round_.gather)
            self._copy.wait(self._pack.record())
            self._copy.run(round_.copy_out)
            round_.done = self._copy.record()
            return
        for record, bounce in round_.bounced():
            bounce.copy_(record)
        self._copy.run(round_.copy_in)
        self._pack.wait(self._copy.record())
        self._pack.run(round_.scatter)
        round_.done = self._pack.record()

    def _end_first(self, rounds: deque[_Round], leaves: Leaves, out: bool) -> Iterator[Leaves]:
        """Wait for the first round; yield the sums of its transfer, gathered in `leaves`, if that
        ends with it."""
        round_ = rounds[0]
        assert round_.done is not None
        round_.done.synchronize()
        for record, bounce in round_.bounced():
            self.bounced_nbytes += len(record)
            if out:
                record.copy_(bounce)
        leaves += round_.leaves()
        rounds.popleft().holds.close()
        if round_.ends_transfer:
            yield leaves.copy()
            leaves.clear()


class Lanes:
    """Both directions between one device and the arena, and what of it the device reaches."""

    def __init__(
        self,
        device: Device,
        record_nbytes_max: int,
        extents: Extents,
        on_thread: Callable[[], object],
    ) -> None:
        """extents, on_thread: as `Registration` takes them; its thread starts here."""
        self.device = device
        self.registration = Registration(device, extents, on_thread)
        self.out = Lane(device, record_nbytes_max, self.registration)
        self.back = Lane(device, record_nbytes_max, self.registration)
        self.registration.start()

    @property
    def bounced_nbytes(self) -> int:
        """What took the slower path, both ways."""
        return self.out.bounced_nbytes + self.back.bounced_nbytes

    def close(self, wait_s: float) -> None:
        """Let go of the arena, when copies under way have ended."""
        self.registration.close(wait_s)


def _sizes(paged: PagedKV, batch: Batch, views: Sequence[memoryview]) -> list[int]:
    """Return the sizes of the records. Raises ValueError for room that is too small."""
    nbytes = paged.record_nbytes
    if any(not 0 <= group < len(nbytes) for group, _ in batch):
        raise ValueError(f"a group is out of 0..{len(nbytes) - 1}")
    sizes = [nbytes[group] for group, _ in batch]
    if len(sizes) != len(views):
        raise ValueError(f"{len(views)} records for {len(sizes)} blocks")
    for size, view in zip(sizes, views, strict=True):
        if len(view) < size:
            raise ValueError(f"a record of {len(view)} bytes; {size} are wanted")
    return sizes


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
