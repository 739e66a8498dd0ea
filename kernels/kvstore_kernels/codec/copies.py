"""Coded records between an engine's memory and slots that others can write to.

A slot may change at any moment: its lease may end. So a record is copied to private memory, summed
up there and decoded from there; and it is encoded in private memory, before there is a slot,
because only then its size is known. Copying, summing up and decoding is one call of the native
library, record by record: a core's cache holds one, and other threads run meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore_kernels.codec.coder import Coder, Encoded
from kvstore_kernels.codec.loader import Fine, Loaded

__all__ = ["CodedCopies", "Decoded", "Fine", "Scratch"]


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
            memory = self._private.memory = np.empty(nbytes, np.uint8)
        return memory


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
        private = self._scratch.private(self._coder.loader.room_nbytes)
        sums, states = self._coder.loader.load(blocks, records, fines, private)
        done = []
        for block, record, fine, sum_, state in zip(
            blocks, records, fines, sums, states, strict=True
        ):
            if state is Loaded.LEFT:
                done.append(self._decode_other(block, record, fine, private))
                continue
            refined = None if fine is None else state is Loaded.REFINED
            done.append(Decoded(None if state is Loaded.WRONG else sum_, refined))
        return done

    def _decode_other(
        self,
        block: int,
        record: memoryview,
        fine: Fine | None,
        private: npt.NDArray[np.uint8],
    ) -> Decoded:
        """Decode a record that is neither L3 nor EP: a raw one, or none at all."""
        copied = private[: len(record)]
        copied.data[:] = record
        sum_ = self._checksum(copied.data)
        (error,) = self._coder.decode([block], [copied.data])
        return Decoded(sum_ if error is None else None, None if fine is None else False)
