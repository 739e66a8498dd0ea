"""Records from files into device pages, past host memory where `storage.py` has the means.

    a file --read--> a piece of the ring --scatter--> pages           (threads, pack stream)

The ring is one of its own, beside that of `lane.py`: a disk may hang for as long as it likes, and
then its piece is lost, but nothing of the copies from the arena. Whoever reads waits until a
deadline only; after a read that did not come back in time the lane is `stuck` and takes no more
work until it has. A program that ends does not wait for it either.

Records lie in a piece as in a file, each from a multiple of 4 KiB on, so that those side by side in
both are one read, and cuFile needs no buffer of its own. cuFile has not been tried yet.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvstore_kernels.device import Device, memory_on
from kvstore_kernels.lane import PIECE_NBYTES, PIECES
from kvstore_kernels.packing import Batch, Leaves, PagedKV, leaves_of
from kvstore_kernels.read_threads import ReadThreads
from kvstore_kernels.storage import READ_THREADS, FileReader, OpenFile

PAGE_NBYTES = 4096
READ_NBYTES_MAX = 4 << 20
"""Of one read: more of them at once keep a disk busier than larger ones."""


class FilePart(NamedTuple):
    """Bytes [offset, offset + nbytes) of a file; of the whole pages that hold them, all may be
    read. offset: a multiple of 4 KiB."""

    path: str
    offset: int
    nbytes: int


class FileTransfer(NamedTuple):
    """Blocks, and where in files their records are, each as long as the record is."""

    paged: PagedKV
    batch: Batch
    parts: Sequence[FilePart]


@dataclass(slots=True)
class _Round:
    """What one piece carries: some records of one transfer, from `offsets` on."""

    paged: PagedKV
    batch: Batch
    parts: Sequence[FilePart]
    offsets: list[int]
    ends_transfer: bool
    staged: Tensor
    reads: list[Future[None]] = field(default_factory=list)

    def spans(self) -> Iterator[tuple[str, int, int, int]]:
        """Yield (path, offset in the file, offset in the piece, length) of each read, in pages."""
        run: tuple[str, int, int, int] | None = None
        for part, at in zip(self.parts, self.offsets, strict=True):
            nbytes = _padded(part.nbytes)
            if run is not None:
                path, begin, staged_at, length = run
                goes_on = (path, begin + length, staged_at + length) == (part.path, part.offset, at)
                if goes_on and length + nbytes <= READ_NBYTES_MAX:
                    run = (path, begin, staged_at, length + nbytes)
                    continue
                yield run
            run = (part.path, part.offset, at, nbytes)
        if run is not None:
            yield run


class _Files:
    """The files of one call, each opened once."""

    def __init__(self, reader: FileReader) -> None:
        self._reader = reader
        self._lock = Lock()
        self._opened: dict[str, OpenFile] = {}

    def read(self, path: str, offset: int, target: Tensor) -> None:
        with self._lock:
            file = self._opened.get(path)
            if file is None:
                file = self._opened[path] = self._reader.open(Path(path))
        file.read(offset, target)

    def close(self) -> None:
        for file in self._opened.values():
            file.close()


class FileLane:
    """Reads of one device. Used by one thread at a time. read_nbytes: what has been scattered."""

    def __init__(
        self,
        device: Device,
        reader: FileReader,
        record_nbytes_max: int,
        *,
        on_thread: Callable[[], object] = lambda: None,
        pieces: int = PIECES,
        piece_nbytes: int = PIECE_NBYTES,
        threads: int = READ_THREADS,
    ) -> None:
        """on_thread: called first in every thread that reads, to pin it, say."""

        def enter() -> None:
            device.enter_thread()
            on_thread()

        self.read_nbytes = 0
        self._reader = reader
        self._piece_nbytes = max(piece_nbytes, _padded(record_nbytes_max))
        self._pieces = [_aligned(self._piece_nbytes, device.torch_device) for _ in range(pieces)]
        device.mark().synchronize()  # what had this memory before may still have been in use
        self._pack = device.stream()
        self._threads = ReadThreads(threads, enter)
        self._late: set[Future[None]] = set()  # reads nobody waits for, which still fill pieces
        self._left_open: list[_Files] = []  # by them

    @property
    def stuck(self) -> bool:
        """Whether a read that was given up has not come back yet."""
        return any(not read.done() for read in self._late)

    def write(
        self, transfers: Sequence[FileTransfer], after: Any, deadline: float
    ) -> Generator[Leaves]:
        """Copy records into device blocks, once the device has come to `after`.

        Yields for each transfer, in order and when it is done, the sums of its records' leaves, as
        they came: what is in a file now may be anything. deadline: a time.monotonic().
        Raises ValueError, before anything is read, for blocks or parts that do not fit; OSError and
        EOFError for files that cannot be read, TimeoutError past the deadline, or while `stuck`;
        RuntimeError if there can be no thread that reads.
        """
        if self.stuck:
            raise TimeoutError("a read that was given up has not come back yet")
        self._late.clear()
        while self._left_open:
            self._left_open.pop().close()
        return self._flow(list(self._rounds(transfers)), after, deadline)

    def close(self) -> None:
        """No reads after it; none of those under way is waited for."""
        self._threads.close()

    def _flow(self, rounds: Sequence[_Round], after: Any, deadline: float) -> Generator[Leaves]:
        under_way: deque[_Round] = deque()
        files = _Files(self._reader)
        leaves: Leaves = []
        try:
            self._pack.wait(after)
            for round_ in rounds:
                if len(under_way) == len(self._pieces):
                    yield from self._end_first(under_way, leaves, deadline)
                under_way.append(round_)
                for path, offset, at, length in round_.spans():
                    target = round_.staged[at : at + length]
                    read = partial(files.read, path, offset, target)
                    round_.reads.append(self._threads.submit(read))
            while under_way:
                yield from self._end_first(under_way, leaves, deadline)
        finally:
            # Whatever happened: nobody may have this memory while something is in flight.
            self._pack.record().synchronize()
            self._end_reads([read for round_ in under_way for read in round_.reads], deadline)
            if self.stuck:
                self._left_open.append(files)
            else:
                files.close()

    def _end_reads(self, reads: Sequence[Future[None]], deadline: float) -> None:
        """Give reads up; those that are not back by the deadline make the lane stuck."""
        begun = [read for read in reads if not read.cancel()]
        self._late.update(wait(begun, max(0.0, deadline - time.monotonic())).not_done)

    def _end_first(
        self, rounds: deque[_Round], leaves: Leaves, deadline: float
    ) -> Iterator[Leaves]:
        """Wait for the first round; yield the sums of its transfer, gathered in `leaves`, if that
        ends with it."""
        round_ = rounds[0]
        for read in round_.reads:
            read.result(max(0.0, deadline - time.monotonic()))
        found: list[Leaves] = []
        self._pack.run(lambda: self._scatter(round_, found))
        self._pack.record().synchronize()
        leaves += found[0]
        self.read_nbytes += sum(part.nbytes for part in round_.parts)
        rounds.popleft()
        if round_.ends_transfer:
            yield leaves.copy()
            leaves.clear()

    def _scatter(self, round_: _Round, found: list[Leaves]) -> None:
        """Unpack a round on the current stream, and sum up the bytes that were unpacked."""
        sums = round_.paged.scatter(round_.staged, round_.batch, round_.offsets)
        if sums is not None:
            found.append(sums.leaves())
            return
        views = [
            round_.staged[at : at + part.nbytes]
            for at, part in zip(round_.offsets, round_.parts, strict=True)
        ]
        found.append([leaves_of(view.cpu()) for view in views])

    def _rounds(self, transfers: Sequence[FileTransfer]) -> Iterator[_Round]:
        """Cut transfers into what fits into a piece. The n-th round has the piece of n modulo
        their number: rounds end in the order in which they began."""
        pieces = cycle(self._pieces)
        for paged, batch, parts in transfers:
            _check(paged, batch, parts)
            first = at = 0
            offsets: list[int] = []
            for index, part in enumerate(parts):
                if at + _padded(part.nbytes) > self._piece_nbytes:
                    some = slice(first, index)
                    yield _Round(paged, batch[some], parts[some], offsets, False, next(pieces))
                    first, at, offsets = index, 0, []
                offsets.append(at)
                at += _padded(part.nbytes)
            yield _Round(paged, batch[first:], parts[first:], offsets, True, next(pieces))


def _check(paged: PagedKV, batch: Batch, parts: Sequence[FilePart]) -> None:
    """Raise ValueError unless each block has a part of its record's size, which fits a page."""
    if len(batch) != len(parts) or not parts:
        raise ValueError(f"{len(parts)} parts of files for {len(batch)} blocks")
    for (group, _), part in zip(batch, parts, strict=True):
        if not 0 <= group < len(paged.record_nbytes):
            raise ValueError(f"a group is out of 0..{len(paged.record_nbytes) - 1}")
        size = paged.record_nbytes[group]
        if part.nbytes != size or part.offset < 0 or part.offset % PAGE_NBYTES:
            raise ValueError(f"{part.nbytes} bytes from {part.offset}; {size} of a page are wanted")


def _aligned(nbytes: int, device: torch.device) -> Tensor:
    """Return (nbytes,) uint8 that begins at a multiple of 4 KiB, as cuFile likes it."""
    memory = memory_on(device, nbytes + PAGE_NBYTES)
    begin = -memory.data_ptr() % PAGE_NBYTES
    return memory[begin : begin + nbytes]


def _padded(nbytes: int) -> int:
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES
