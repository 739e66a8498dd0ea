"""Coded records between device pages and host memory: coded on the device, moved by DMA.

    pages --encode--> staging memory;  sizes and checksums come back, then slots are reserved
    staging memory --DMA--> the arena's slots                          (pack stream, copy stream)
    the arena's slots --DMA--> a piece of the ring --decode--> pages

A record's size is known only when it is encoded, so saving has two steps, and device blocks are
free after the first. What is decoded is the copy in the piece, which is summed up there: a slot may
change at any moment. As in `lane.py`, copies go straight to and from slots that are registered with
the device, for others through a pinned buffer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any, NamedTuple

from torch import Tensor

from kvstore_kernels.codec.copies import Decoded, Fine
from kvstore_kernels.codec.device_coder import DeviceCoder
from kvstore_kernels.codec.device_passes import (
    Arrived,
    Decoding,
    Encoding,
    OnDevice,
    Staged,
    padded,
)
from kvstore_kernels.device import Device, Event, Stream
from kvstore_kernels.lane import PIECES, Staging
from kvstore_kernels.registration import Extents, Place, Registration
from kvstore_kernels.views import tensor_of

ENCODED_NBYTES_MAX = 32 << 20
"""How much an engine encodes at once: staging memory has as much for each group of layers. It is
the device's, so half of what is encoded on a processor; 16 blocks of 2 MiB are still one
reservation."""
PIECE_NBYTES = 16 << 20
"""Of the ring that loads go through, which has three."""


def _staging(device: Device, nbytes: int) -> Staging:
    """Return device memory that nothing uses any more."""
    made = Staging(device, nbytes)
    device.mark().synchronize()  # what had this memory before may still have been in use
    return made


class _Copy(NamedTuple):
    """Host memory, where it lies in staging memory, and where the device reaches it, or None."""

    host: Tensor
    begin: int
    reached: Place | None

    def ends(self, memory: Staging) -> tuple[Tensor, Tensor]:
        """Return staging memory, and the host memory that a DMA copies to or from."""
        end = self.begin + len(self.host)
        if self.reached is None:
            return memory.staged[self.begin : end], memory.pinned[self.begin : end]
        host, at = self.reached
        return memory.staged[self.begin : end], host[at : at + len(self.host)]


def _copies(
    registration: Registration | None,
    holds: ExitStack,
    parts: Sequence[tuple[int, memoryview]],
) -> list[_Copy]:
    """Describe copies of host memory to or from a place in staging memory, while `holds` does."""
    hosts = [tensor_of(view) for _, view in parts]
    reached: list[Place | None] = [None] * len(hosts)
    if registration is not None:
        reached = holds.enter_context(registration.held(hosts))
    return [
        _Copy(host, begin, place)
        for host, (begin, _), place in zip(hosts, parts, reached, strict=True)
    ]


class EncodingLane:
    """Saves of several groups of blocks. Used by one thread. bounced_nbytes: the slower path's."""

    def __init__(self, device: Device, registration: Registration | None = None) -> None:
        """registration: what host memory the device reaches; None if it reaches none."""
        self.bounced_nbytes = 0
        self._device = device
        self._registration = registration
        self._memory: dict[int, Staging] = {}
        self._pack = device.stream()
        self._copy = device.stream()

    def encode(
        self,
        group: int,
        coder: DeviceCoder,
        blocks: Sequence[int],
        after: Any,
        exact: Sequence[bool] = (),
    ) -> list[OnDevice]:
        """Encode blocks, once the device has come to `after`, as `DeviceCoder.encode`.

        The blocks are free when this returns. The records, whose sizes and checksums it returns,
        stay in device memory until the group's next call, which takes
        `coder.room_nbytes()` for each block. Raises ValueError for blocks that there are not.
        """
        memory = self._room(group, len(blocks) * coder.room_nbytes())
        coder.check(blocks, memory.staged)
        made: list[Encoding] = []
        self._pack.wait(after)
        try:
            self._pack.run(lambda: made.append(coder.encode(blocks, memory.staged, exact=exact)))
            self._pack.record().synchronize()
            while made[0].left():
                self._pack.run(made[0].next_pass)
                self._pack.record().synchronize()
        finally:
            self._pack.record().synchronize()
        return made[0].records()

    def copy_out(self, group: int, parts: Sequence[tuple[Staged, memoryview]]) -> None:
        """Copy records of the group's last `encode` into slots; done when this returns.

        Raises ValueError for a slot of another size."""
        for record, view in parts:
            if len(view) != record.nbytes:
                raise ValueError(f"a slot of {len(view)} bytes for a record of {record.nbytes}")
        if not parts:
            return
        memory = self._memory[group]
        with ExitStack() as holds:
            copies = _copies(
                self._registration, holds, [(record.begin, view) for record, view in parts]
            )

            def copy() -> None:
                for staged, host in (each.ends(memory) for each in copies):
                    host.copy_(staged, non_blocking=True)

            try:
                self._copy.run(copy)
            finally:
                self._copy.record().synchronize()
            for each in copies:
                if each.reached is None:
                    each.host.copy_(each.ends(memory)[1])
                    self.bounced_nbytes += len(each.host)

    def _room(self, group: int, nbytes: int) -> Staging:
        memory = self._memory.get(group)
        if memory is None or len(memory.staged) < nbytes:
            self._memory.pop(group, None)
            memory = self._memory[group] = _staging(self._device, nbytes)
        return memory


class Load(NamedTuple):
    """A record in host memory, of one block, and its fine part."""

    block: int
    record: memoryview
    fine: Fine | None = None


@dataclass(slots=True)
class _Round:
    """What one piece of the ring carries."""

    memory: Staging
    loads: list[Load] = field(default_factory=list)
    arrived: list[Arrived] = field(default_factory=list)
    end: int = 0
    copies: list[_Copy] = field(default_factory=list)
    holds: ExitStack = field(default_factory=ExitStack)
    decoding: Decoding | None = None
    done: Event | None = None

    def add(self, load: Load, fine: Fine | None, nbytes: int) -> None:
        """fine: what of the load's is copied at all."""
        begin = self.end
        fine_begin = begin + padded(len(load.record))
        each = Arrived(begin, len(load.record))
        if fine is not None:
            each = Arrived(*each[:2], fine_begin, len(fine.record), fine.checksum)
        self.loads.append(load)
        self.arrived.append(each)
        self.end += nbytes

    def parts(self) -> Iterator[tuple[int, memoryview]]:
        for load, each in zip(self.loads, self.arrived, strict=True):
            yield each.begin, load.record
            if each.fine_nbytes and load.fine is not None:
                yield each.fine_begin, load.fine.record

    def copy_in(self) -> None:
        for staged, host in (each.ends(self.memory) for each in self.copies):
            staged.copy_(host, non_blocking=True)


class DecodingLane:
    """Loads. Used by one thread at a time. bounced_nbytes: what took the slower path."""

    def __init__(
        self,
        device: Device,
        room_nbytes_max: int,
        registration: Registration | None = None,
        *,
        pieces: int = PIECES,
        piece_nbytes: int = PIECE_NBYTES,
    ) -> None:
        """room_nbytes_max: the most `DeviceCoder.room_nbytes` of the coders says."""
        self.bounced_nbytes = 0
        self._registration = registration
        self._piece_nbytes = max(piece_nbytes, room_nbytes_max)
        self._pieces = [_staging(device, self._piece_nbytes) for _ in range(pieces)]
        self._pack: Stream = device.stream()
        self._copy: Stream = device.stream()

    def decode(self, coder: DeviceCoder, loads: Sequence[Load], after: Any) -> list[Decoded]:
        """Decode records into blocks, once the device has come to `after`; done when this returns.

        As `CodedCopies.refine`: a fine part that is not its base's, or not what was stored, is not
        used. Raises ValueError for blocks that there are not, or are given twice.
        """
        coder.check([load.block for load in loads], self._pieces[0].staged)
        if len({load.block for load in loads}) != len(loads):
            raise ValueError("a block is given twice")
        too_large = {i for i, each in enumerate(loads) if len(each.record) > coder.record_nbytes}
        fitting = [load for i, load in enumerate(loads) if i not in too_large]
        decoded = iter(self._flow(coder, fitting, after))
        return [Decoded(None) if i in too_large else next(decoded) for i in range(len(loads))]

    def _flow(self, coder: DeviceCoder, loads: Sequence[Load], after: Any) -> list[Decoded]:
        under_way: deque[_Round] = deque()
        found: list[Decoded] = []
        try:
            self._pack.wait(after)
            for round_ in list(self._rounds(coder, loads)):
                if len(under_way) == len(self._pieces):
                    found += self._end_first(under_way)
                under_way.append(round_)
                self._begin(coder, round_)
            while under_way:
                found += self._end_first(under_way)
        finally:
            # Whatever happened: nobody may have this memory while a copy is in flight.
            self._copy.record().synchronize()
            self._pack.record().synchronize()
            for round_ in under_way:
                round_.holds.close()
        return found

    def _rounds(self, coder: DeviceCoder, loads: Sequence[Load]) -> Iterator[_Round]:
        pieces = cycle(self._pieces)
        round_ = _Round(next(pieces))
        for load in loads:
            fine = load.fine
            if fine is not None and len(fine.record) > coder.fine_nbytes:
                fine = None  # larger than any fine part of this memory
            nbytes = padded(len(load.record)) + (padded(len(fine.record)) if fine else 0)
            if round_.end + nbytes > self._piece_nbytes:
                yield round_
                round_ = _Round(next(pieces))
            round_.add(load, fine, nbytes)
        if round_.loads:
            yield round_

    def _begin(self, coder: DeviceCoder, round_: _Round) -> None:
        round_.copies = _copies(self._registration, round_.holds, list(round_.parts()))
        for each in round_.copies:
            if each.reached is None:
                each.ends(round_.memory)[1].copy_(each.host)
                self.bounced_nbytes += len(each.host)

        def decode() -> None:
            blocks = [load.block for load in round_.loads]
            round_.decoding = coder.decode(blocks, round_.memory.staged, round_.arrived)

        self._copy.run(round_.copy_in)
        self._pack.wait(self._copy.record())
        self._pack.run(decode)
        round_.done = self._pack.record()

    def _end_first(self, rounds: deque[_Round]) -> Iterator[Decoded]:
        """Wait for the first round, raw records included; yield what its records were."""
        round_ = rounds[0]
        assert round_.done is not None
        round_.done.synchronize()
        decoding = round_.decoding
        assert decoding is not None
        if decoding.left():
            self._pack.run(decoding.next_pass)
            self._pack.record().synchronize()
        rounds.popleft().holds.close()
        for load, each in zip(round_.loads, decoding.found(), strict=True):
            unused = load.fine is not None and each.refined is None
            yield each._replace(refined=False) if unused else each


class CodedLanes:
    """Both directions between one device and the arena, and what of it the device reaches.

    They take device memory for what is encoded at once, of each group of layers that was saved
    (1.25 times as much if records are lossy), for L3's escapes meanwhile, and for three pieces of a
    ring.
    """

    def __init__(
        self,
        device: Device,
        coders: Sequence[DeviceCoder],
        extents: Extents,
        on_thread: Callable[[], object],
        *,
        piece_nbytes: int = PIECE_NBYTES,
    ) -> None:
        """coders: of each group of layers. extents, on_thread: as `Registration` takes them; its
        thread starts here."""
        self.device = device
        self.registration = Registration(device, extents, on_thread)
        self.out = EncodingLane(device, self.registration)
        room_nbytes = max(coder.room_nbytes() for coder in coders)
        self.back = DecodingLane(device, room_nbytes, self.registration, piece_nbytes=piece_nbytes)
        self.registration.start()

    @property
    def bounced_nbytes(self) -> int:
        """What took the slower path, both ways."""
        return self.out.bounced_nbytes + self.back.bounced_nbytes

    def close(self, wait_s: float) -> None:
        """Let go of the arena, when copies under way have ended."""
        self.registration.close(wait_s)
