"""Records read from the daemon's files into the caller's memory, past the arena.

One thread reads a whole record, and hashes its bytes while the processor's cache has them. There
are many threads, because a device is fast only with many reads at once. If a record cannot be read,
or has a wrong checksum, the daemon is asked to promote it, and decides whether it is corrupt. No
file is read for a while then: the files may be another daemon's, under the same path.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import logging
import os
import stat
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

from kvstore.model.block import PAGE_NBYTES, FilePlace
from kvstore.model.checksum import PiecewiseChecksum
from kvstore.model.errors import CorruptBlock, Unavailable
from kvstore.system.threads import Threads, ended, outlive

logger = logging.getLogger(__name__)

READ_THREADS = 16
READ_NBYTES = 1 << 20
RETRY_S = 60.0  # how long no file is read after one could not be
HANG_S = 10.0


class FileRead(NamedTuple):
    """A record to be read. checksum: None to accept any."""

    place: FilePlace
    checksum: int | None
    target: memoryview


_Outcome = bool | Exception
"""Whether the target has the record that was put, or why files cannot be trusted."""


class FileReads:
    """The reads of one client. Lives on one event loop."""

    def __init__(self) -> None:
        self._threads = Threads(READ_THREADS, thread_name_prefix="kvstore-files")
        self._off_until = 0.0
        # Both may write to targets.
        self._late: list[Future[_Outcome]] = []  # no caller waits for them
        self._ending: list[Future[_Outcome]] = []  # a caller that was cancelled still does

    @property
    def usable(self) -> bool:
        """False for a while after something could not be read, and while a device holds a read."""
        self._late = [job for job in self._late if not job.done()]
        return not self._late and time.monotonic() >= self._off_until

    async def read(self, wanted: Sequence[FileRead], deadline: float) -> list[bool]:
        """Fill targets, from the first on; say which of them have the record that was put.

        deadline: a time.monotonic(); no read starts after it. Raises Unavailable if a read hangs:
        it may still write to its target at any time.
        """
        files = {path: _File(path) for path in {each.place.path for each in wanted}}
        jobs: list[Future[_Outcome]] = []
        try:
            for each in wanted:
                file = files[each.place.path]
                jobs.append(self._threads.submit(_read, file, each, deadline))
            ends = [asyncio.wrap_future(job) for job in jobs]
            await ended(ends, max(0.0, deadline - time.monotonic()) + HANG_S)
        except BaseException:
            await self._give_up(jobs)
            raise
        self._check_ended(jobs)
        return [self._is_good(job) for job in jobs]

    async def settled(self) -> None:
        """Wait until no read that was given up can write to its target any more: as long as the
        device holds it."""
        await outlive([asyncio.wrap_future(job) for job in (*self._ending, *self._late)])

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _give_up(self, jobs: Sequence[Future[_Outcome]]) -> None:
        """Wait until no thread touches a target any more, or one hangs."""
        for job in jobs:
            job.cancel()  # what has not begun; the memory is the caller's only after the rest
        self._ending += jobs
        await outlive([asyncio.wrap_future(job) for job in jobs], HANG_S)
        self._late += [job for job in jobs if not job.done()]
        self._ending = [job for job in self._ending if not job.done()]

    def _check_ended(self, jobs: Sequence[Future[_Outcome]]) -> None:
        """Raise Unavailable if a read hangs."""
        for job in jobs:
            job.cancel()
        late = [job for job in jobs if not job.done()]
        if late:
            self._late += late
            raise Unavailable(
                f"{len(late)} reads of files hang, and may fill their targets at any time",
                reason="disk",
            )

    def _is_good(self, job: Future[_Outcome]) -> bool:
        if job.cancelled():
            return False
        outcome = job.result()
        if isinstance(outcome, Exception):
            self._rest(outcome)
        return outcome is True

    def _rest(self, error: Exception) -> None:
        """Read no files for a while."""
        if time.monotonic() >= self._off_until:
            logger.warning("file_reads=off s=%.0f reason=%r", RETRY_S, error)
        self._off_until = time.monotonic() + RETRY_S


def are_pages(view: memoryview) -> bool:
    """Say whether memory that can be written to is of whole pages, as direct reads need it."""
    if len(view) % PAGE_NBYTES:
        return False
    return not view or ctypes.addressof(ctypes.c_char.from_buffer(view)) % PAGE_NBYTES == 0


class _File:
    """A file, open from its first read until nobody refers to it any more: a read that hangs may
    use it for long. Threads open it: that can hang as well."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._fd: int | None = None

    def read(self, target: memoryview, offset: int) -> int:
        """Read what fills `target`, past the page cache where the file system can; return how many
        bytes there were. Raises OSError."""
        with self._lock:
            if self._fd is None:
                self._fd = _opened(self._path)
        return os.preadv(self._fd, [target], offset)

    def __del__(self) -> None:
        if self._fd is not None:
            os.close(self._fd)


def _opened(path: str) -> int:
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # which a pipe would block without
    try:
        fd = os.open(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fd = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(f"{path} is not a file")
    return fd


def _read(file: _File, wanted: FileRead, deadline: float) -> _Outcome:
    """Fill the target."""
    if time.monotonic() >= deadline:
        return False
    found = PiecewiseChecksum()
    for start in range(0, len(wanted.target), READ_NBYTES):
        piece = wanted.target[start : start + READ_NBYTES]
        try:
            nbytes = file.read(piece, wanted.place.offset + start)
        except OSError as error:
            return error
        if nbytes != len(piece):
            return EOFError(f"{wanted.place.path} ends early")
        if wanted.checksum is not None:
            found.add(piece)
    if wanted.checksum not in (None, found.value):
        return CorruptBlock(f"{wanted.place.path} does not hold what was put")
    return True
