"""The staging memory of one session: a memfd that its client writes to at any time.

Whoever touches a page first pays for it, by its control group. So the daemon must not touch a page
that the client has not: a read through a mapping makes the page that is missing. It copies through
its mapping what is there, which is fast, and by preadv, which makes no page, where some is not.

A client can still take a page away between the look and the copy. What the daemon then has made is
given back when the session ends, whether or not the client keeps its mapping.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import threading
from collections.abc import Sequence

import numpy as np

from kvstore.model.block import Slot, padded
from kvstore.model.checksum import checksums
from kvstore.model.errors import ConfigError, CorruptBlock
from kvstore.system.shared_mapping import SharedMapping
from kvstore.tier.dram import ExtentHandle
from kvstore.tier.dram.allocator import ExtentAllocator
from kvstore.tier.dram.extent_memory import punch

logger = logging.getLogger(__name__)

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


class StagingArea:
    """One memfd of `nbytes`. handle: what the client maps. space: which of it is reserved. users:
    copies that are under way."""

    def __init__(self, extent: int, nbytes: int) -> None:
        """Raises ConfigError without a descriptor or address space."""
        fd = os.memfd_create("kvstore-staging", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(fd, 0o600)  # others could open it anew through /proc
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            self._view = SharedMapping(fd, nbytes).view()
        except OSError as error:
            os.close(fd)
            raise ConfigError(f"no staging memory: {error.strerror}") from error
        self.handle = ExtentHandle(extent, fd, nbytes)
        self.space = ExtentAllocator(nbytes)
        self.users = 0

    @property
    def nbytes(self) -> int:
        return self.handle.nbytes

    def allocate(self, nbytes: int) -> Slot | None:
        """Take a slot of so many bytes, or return None."""
        offset = self.space.allocate(nbytes)
        return None if offset is None else Slot(self.handle.id, offset, nbytes)

    def free(self, slot: Slot) -> None:
        """Take a slot back. One of another area is left alone."""
        if slot.extent == self.handle.id:
            self.space.free(slot.offset, slot.nbytes)

    def view(self, slot: Slot) -> memoryview:
        """Return the bytes of a slot. To read them makes the pages that are missing."""
        return self._view[slot.offset : slot.offset + slot.nbytes]

    def is_there(self, slots: Sequence[Slot]) -> bool:
        """Say whether all pages of some slots are in memory: one look for slots side by side.

        It waits for no lock of the file, which a client could hold. Blocking for microseconds.
        """
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._view))
        for begin, end in _runs(slots):
            first = begin // mmap.PAGESIZE * mmap.PAGESIZE
            pages = np.zeros(-(-(end - first) // mmap.PAGESIZE), np.uint8)
            refused = _libc.mincore(address + first, end - first, pages.ctypes.data)
            if refused or not (pages & 1).all():
                return False
        return True

    def read(self, slots: Sequence[Slot], targets: Sequence[memoryview]) -> list[int]:
        """Copy slots to targets as long, and make no page; return the checksums of what has
        arrived. Blocking. Raises CorruptBlock for what cannot be read."""
        for slot, target in zip(slots, targets, strict=True):
            done = 0
            while done < slot.nbytes:
                try:
                    got = os.preadv(self.handle.fd, [target[done:]], slot.offset + done)
                except OSError as error:
                    raise CorruptBlock(f"staged bytes cannot be read: {error.strerror}") from error
                done += got or slot.nbytes  # it ends before the slot does: sealed, so never
        return checksums(targets)

    def give_back(self) -> None:
        """Give its pages back to the system, and close it. Blocking.

        A client that keeps its mapping may touch them again, and pays for them then.
        """
        try:
            punch(self.handle.fd, [(0, self.nbytes)], threading.Lock())
        except OSError as error:
            logger.warning("staging=not_given_back bytes=%d reason=%r", self.nbytes, str(error))
        finally:
            os.close(self.handle.fd)


def _runs(slots: Sequence[Slot]) -> list[tuple[int, int]]:
    """Return the pages of slots as (begin, end), those side by side as one."""
    runs: list[tuple[int, int]] = []
    for slot in sorted(slots, key=lambda each: each.offset):
        end = slot.offset + padded(slot.nbytes)
        if runs and runs[-1][1] == slot.offset:
            runs[-1] = (runs[-1][0], end)
        else:
            runs.append((slot.offset, end))
    return runs
