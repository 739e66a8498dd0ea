"""Coded records between an engine's memory and slots that others can write to.

A slot may change at any moment: its lease may end. So a record is copied to private memory, summed
up there and decoded from there; and it is encoded in private memory, before there is a slot,
because only then its size is known.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore_kernels.codec.coder import Coder, Encoded

PRIVATE_NBYTES = 2 << 20
"""Copied, summed up and decoded in turn: what a core's own cache holds."""


class Scratch:
    """Private memory that is kept for the next call: of the thread that encodes, and of each that
    decodes. Fresh memory costs more than a copy."""

    def __init__(self) -> None:
        self._room = np.empty(0, np.uint8)
        self._private = threading.local()

    def room(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return memory of the one thread that encodes."""
        if len(self._room) < nbytes:
            self._room = np.empty(nbytes, np.uint8)
        return self._room

    def private(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return memory of the calling thread."""
        memory: npt.NDArray[np.uint8] | None = getattr(self._private, "memory", None)
        if memory is None or len(memory) < nbytes:
            memory = self._private.memory = np.empty(max(PRIVATE_NBYTES, nbytes), np.uint8)
        return memory


class Fine(NamedTuple):
    """A stored fine part, and what its checksum has to be."""

    record: memoryview
    checksum: int


class Decoded(NamedTuple):
    """base: the checksum of a base part as it was when it was copied; None: it is no record of this
    memory. refined: the fine part was used; None: there was none."""

    base: int | None
    refined: bool | None = None


class CodedCopies:
    """Copies of one group of layers. Decoding may run in several threads, encoding in one."""

    def __init__(
        self,
        coder: Coder,
        checksum: Callable[[memoryview], int],
        scratch: Scratch,
        *,
        lossy: bool = False,
    ) -> None:
        """lossy: blocks are encoded by EP, in a base and a fine part."""
        self._coder = coder
        self._checksum = checksum
        self._scratch = scratch
        self._lossy = lossy
        self.record_nbytes = coder.record_nbytes
        """The most a record has."""

    def encode(self, blocks: Sequence[int], exact: Sequence[bool] = ()) -> list[Encoded]:
        """Encode blocks; the records are valid until the scratch is asked for room again.

        exact: of lossy copies, the blocks that are stored exactly all the same; none: no block is.
        """
        wanted = len(blocks) * self._coder.room_nbytes(lossy=self._lossy)
        room = self._scratch.room(wanted)
        if self._lossy:
            return self._coder.encode_lossy(blocks, exact or [False] * len(blocks), room)
        return self._coder.encode_exact(blocks, room)

    def decode(self, blocks: Sequence[int], records: Sequence[memoryview]) -> list[int | None]:
        """Decode records into blocks; return `Decoded.base` of each."""
        return [each.base for each in self.refine(blocks, records, [None] * len(records))]

    def refine(
        self,
        blocks: Sequence[int],
        records: Sequence[memoryview],
        fines: Sequence[Fine | None],
    ) -> list[Decoded]:
        """Decode records into blocks, with the fine parts that there are.

        A fine part with another checksum, or of another base, is not used: the base alone is
        decoded. A block whose base has a wrong checksum holds anything.
        """
        done: list[Decoded] = []
        private = self._scratch.private(
            _whole(self.record_nbytes) + _whole(self._coder.fine_nbytes)
        )
        while len(done) < len(blocks):
            batch = _Batch(private, self._coder, self._checksum)
            begin = len(done)
            for record, fine in zip(records[begin:], fines[begin:], strict=True):
                if len(record) > self.record_nbytes or not batch.add(record, fine):
                    break
            if not batch.bases:
                done.append(Decoded(None))  # larger than any record of this memory
                continue
            done += batch.decode(blocks[begin : begin + len(batch.bases)])
        return done


class _Batch:
    """Records that are copied, and then decoded together."""

    def __init__(
        self,
        private: npt.NDArray[np.uint8],
        coder: Coder,
        checksum: Callable[[memoryview], int],
    ) -> None:
        self._private = private
        self._coder = coder
        self._checksum = checksum
        self._at = 0
        self.bases: list[memoryview] = []
        self._sums: list[int] = []
        self._fines: list[memoryview | None] = []
        self._refined: list[bool | None] = []

    def add(self, record: memoryview, fine: Fine | None) -> bool:
        """Copy a record and its fine part; False if there is no room for both."""
        fits = fine is not None and len(fine.record) <= self._coder.fine_nbytes
        wanted = _whole(len(record)) + (_whole(len(fine.record)) if fine and fits else 0)
        if self._at + wanted > len(self._private):
            return False
        base = self._copy(record)
        self.bases.append(base)
        self._sums.append(self._checksum(base))
        used: memoryview | None = None
        if fine is not None and fits:
            copied = self._copy(fine.record)
            if self._checksum(copied) == fine.checksum:
                used = copied if self._coder.refines(copied, self._sums[-1]) else None
        self._fines.append(used)
        self._refined.append(None if fine is None else used is not None)
        return True

    def _copy(self, record: memoryview) -> memoryview:
        view = self._private[self._at : self._at + len(record)]
        view[:] = np.frombuffer(record, np.uint8)
        self._at += _whole(len(record))
        return view.data

    def decode(self, blocks: Sequence[int]) -> Iterator[Decoded]:
        fines = self._fines if any(each is not None for each in self._fines) else ()
        wrong = self._coder.decode(blocks, self.bases, fines, self._sums)
        for error, sum_, refined in zip(wrong, self._sums, self._refined, strict=True):
            yield Decoded(None if error is not None else sum_, refined)


def _whole(nbytes: int) -> int:
    return -(-nbytes // 64) * 64
