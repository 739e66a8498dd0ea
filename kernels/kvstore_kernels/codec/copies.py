"""Coded records between an engine's memory and slots that others can write to.

A slot may change at any moment: its lease may end. So a record is copied to private memory, summed
up there and decoded from there; and it is encoded in private memory, before there is a slot,
because only then its size is known.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

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


class CodedCopies:
    """Copies of one group of layers. `decode` may run in several threads, `encode` in one."""

    def __init__(
        self, coder: Coder, checksum: Callable[[memoryview], int], scratch: Scratch
    ) -> None:
        self._coder = coder
        self._checksum = checksum
        self._scratch = scratch
        self.record_nbytes = coder.record_nbytes
        """The most a record has."""

    def encode(self, blocks: Sequence[int]) -> list[Encoded]:
        """Encode blocks; the records are valid until the scratch is asked for room again."""
        wanted = len(blocks) * self._coder.room_nbytes()
        return self._coder.encode_exact(blocks, self._scratch.room(wanted))

    def decode(self, blocks: Sequence[int], records: Sequence[memoryview]) -> list[int | None]:
        """Decode records into blocks.

        Returns the checksum of each as it was when it was copied; None for what is no record of
        this memory, whatever its checksum. A block whose checksum is wrong holds anything.
        """
        sums: list[int | None] = []
        private = self._scratch.private(self.record_nbytes)
        while len(sums) < len(blocks):
            begin, at, copied = len(sums), 0, list[memoryview]()
            for record in records[begin:]:
                end = at + len(record)
                if end > len(private) or len(record) > self.record_nbytes:
                    break
                private[at:end] = np.frombuffer(record, np.uint8)
                copied.append(private[at:end].data)
                sums.append(self._checksum(copied[-1]))
                at = -(-end // 64) * 64
            if not copied:
                sums.append(None)  # larger than any record of this memory
                continue
            wrong = self._coder.decode(blocks[begin : begin + len(copied)], copied)
            for index, error in enumerate(wrong, begin):
                if error is not None:
                    sums[index] = None
        return sums
