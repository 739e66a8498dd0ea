"""Host memory that a rank fills and the other ranks of its host read: what a load brings.

TensorRT-LLM has no way to say that a load failed: once a connector has named a number of tokens,
the engine goes on behind them. So a prefix is copied out of the daemon's memory and verified
*before* it is named, on the rank that schedules, into memory that no daemon can take away. Ranks in
other processes open it by /proc: it is a memfd, so it is gone when the last of them lets go of it.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

from kvstore.model.errors import Unavailable


class Staged:
    """Bytes that may be pickled for another process of this user on this host.

    The process that made it has to live until the others have opened it.
    """

    _fd = -1

    def __init__(self, nbytes: int) -> None:
        """Raise Unavailable if there is no memory for it."""
        self.nbytes = nbytes
        try:
            self._fd = os.memfd_create("kvstore-staged", os.MFD_CLOEXEC)
            os.posix_fallocate(self._fd, 0, nbytes)  # else a full host is found out by SIGBUS
            self._map = mmap.mmap(self._fd, nbytes)
        except (OSError, ValueError) as error:
            raise Unavailable(f"no memory for a load of {nbytes} bytes: {error}") from error

    @classmethod
    def open(cls, path: str, nbytes: int) -> Staged:
        """Map what another process has staged. Raises OSError if that cannot be seen from here."""
        staged = cls.__new__(cls)
        staged.nbytes = nbytes
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            staged._map = mmap.mmap(fd, nbytes)
        finally:
            os.close(fd)
        return staged

    @property
    def path(self) -> str:
        """Where other processes of this user find it."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    @property
    def view(self) -> memoryview:
        """The bytes. They live as long as any view of them does."""
        return memoryview(self._map)

    def __reduce__(self) -> tuple[Any, ...]:
        return Staged.open, (self.path, self.nbytes)

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
