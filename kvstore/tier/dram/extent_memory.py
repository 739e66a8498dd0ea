"""The memory of an extent: a memfd whose pages are reserved, touched, and must stay.

Clients get the same open file. Seals keep them from shrinking it, but not from punching holes into
it. The daemon would read zeros there, and the kernel could give the pages to any process. The only
seal against holes (F_SEAL_FUTURE_WRITE) also forbids writable mappings. A sealed arena has it, and
clients write elsewhere; its extents come back whole only. Other clients write into the arena. An
immutable inode forbids only holes, but takes CAP_LINUX_IMMUTABLE. Without that capability, holes
are detected: the extent has fewer pages than were reserved.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator, Sequence, Set

from kvstore.model.errors import ConfigError
from kvstore.system.numa import on_cpus
from kvstore.system.shared_mapping import HUGE_NBYTES, SharedMapping

logger = logging.getLogger(__name__)

TOUCH_STEP_NBYTES = 32 << 20
COLLAPSE_FAILURES_MAX = 3  # one after another: an older kernel, or no memory in one piece
PUNCHES_MAX, PUNCH_AGAIN_S = 20, 0.01  # while I/O beside a hole holds the huge page that it is in
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; not in the fcntl module
_MFD_NOEXEC_SEAL = 8  # Linux 6.3; older kernels refuse it
_FS_IOC_GETFLAGS = 0x80086601
_FS_IOC_SETFLAGS = 0x40086602
_FS_IMMUTABLE_FL = 0x10
_STAT_BLOCK_NBYTES = 512
_MADV_POPULATE_WRITE = 23  # Linux 5.14; older kernels refuse it, and pages fault in on first use
_MADV_COLLAPSE = 25  # Linux 6.1; needs no setting, but `shmem_enabled` may deny it
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_FALLOC_PUNCH_HOLE = 3  # with FALLOC_FL_KEEP_SIZE, without which the kernel refuses it


def make_extent(
    nbytes: int, cpus: Set[int], *, sealed: bool = False, huge: bool = False
) -> tuple[int, SharedMapping]:
    """Make an extent with its pages near `cpus`: the kernel allocates on the node of the caller.

    sealed: no mapping but the one that is returned can ever be written to, by anybody. huge: make
    huge pages at once, which clears them. `collapse` alone copies the small ones: a third as fast.
    """
    fd = _memfd()
    try:
        os.fchmod(fd, 0o600)  # others could open it anew through /proc
        os.ftruncate(fd, nbytes)
        mapped = SharedMapping(fd, nbytes)
        with on_cpus(cpus):
            if huge:
                # The kernel makes no huge page where there is not one small page yet.
                for offset in range(0, nbytes - HUGE_NBYTES + 1, HUGE_NBYTES):
                    os.posix_fallocate(fd, offset, mmap.PAGESIZE)
                collapse(mapped)
            os.posix_fallocate(fd, 0, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS | (_F_SEAL_FUTURE_WRITE if sealed else 0))
    except OSError as error:
        os.close(fd)
        raise ConfigError(
            f"cannot reserve {nbytes} bytes of shared memory ({error.strerror}): "
            "lower dram.capacity, or raise the container's memory limit"
        ) from error
    _forbid_holes(fd)
    return fd, mapped


def make_touched_extent(
    nbytes: int, cpus: Set[int], *, sealed: bool = False
) -> tuple[int, SharedMapping]:
    fd, mapped = make_extent(nbytes, cpus, sealed=sealed, huge=True)
    _populate(mapped)
    return fd, mapped


def touch(mapped: SharedMapping) -> None:
    """Make the pages of an extent huge, and fill its page tables, as far as the kernel can."""
    collapse(mapped)
    _populate(mapped)


def _populate(mapped: SharedMapping) -> None:
    """Fill the page tables of an extent, as far as the kernel can."""
    with _address(mapped) as (address, all_nbytes):
        for offset in range(0, all_nbytes, TOUCH_STEP_NBYTES):
            nbytes = min(TOUCH_STEP_NBYTES, all_nbytes - offset)
            if _libc.madvise(address + offset, nbytes, _MADV_POPULATE_WRITE):
                logger.debug("touch=refused errno=%d", ctypes.get_errno())
                return


@contextlib.contextmanager
def _address(mapped: SharedMapping) -> Iterator[tuple[int, int]]:
    """Yield where a mapping begins and how many bytes it has: none, if it was closed by now. It is
    for calls through ctypes, because mmap.madvise would hold the interpreter lock."""
    try:
        anchor = ctypes.c_char.from_buffer(mapped.view())  # while it lives, nobody can unmap it
    except ValueError:
        yield 0, 0
        return
    yield ctypes.addressof(anchor), mapped.nbytes


def collapse(mapped: SharedMapping) -> bool:
    """Make the pages of an extent huge, as far as the kernel can; return whether it made some.

    A disk reads into huge pages by a few large requests: up to a third faster, for a quarter of the
    processor's time. Small pages that are there are copied. Others may use the extent meanwhile;
    what they hold to is left as it is.
    """
    with _address(mapped) as (address, nbytes):
        return _collapse_steps(address, nbytes // HUGE_NBYTES * HUGE_NBYTES)


def _collapse_steps(address: int, nbytes: int) -> bool:
    made, failed = False, 0
    for offset in range(0, nbytes, TOUCH_STEP_NBYTES):
        step = min(TOUCH_STEP_NBYTES, nbytes - offset)
        if _libc.madvise(address + offset, step, _MADV_COLLAPSE):
            failed += 1
            logger.debug("huge_pages=missing errno=%d", ctypes.get_errno())
            if failed == COLLAPSE_FAILURES_MAX:
                break
        else:
            made, failed = True, 0
    return made


def makes_huge_pages() -> bool:
    """Try whether the kernel makes the pages of an extent huge."""
    try:
        fd, mapped = make_extent(HUGE_NBYTES, frozenset())
    except ConfigError:
        return False
    try:
        return collapse(mapped)
    finally:
        mapped.close()
        os.close(fd)


def present_nbytes(fd: int) -> int:
    """Return how many bytes of an extent there are: less than all, if holes were punched."""
    return os.fstat(fd).st_blocks * _STAT_BLOCK_NBYTES


def refill(fd: int, runs: Sequence[tuple[int, int]], lock: threading.Lock) -> None:
    """Reserve the pages that are missing in some runs, and close `fd`. Raises OSError if no memory
    is left. lock: the extent's, because its inode has one flag for all threads."""
    try:
        with _holes_allowed(fd, lock):  # an immutable inode takes no fallocate of any kind
            for begin, end in runs:
                os.posix_fallocate(fd, begin, end - begin)
    finally:
        os.close(fd)


def punch(fd: int, runs: Sequence[tuple[int, int]], lock: threading.Lock) -> None:
    """Give some runs of an extent back to the system. Raises OSError. lock: as for `refill`."""
    with lock:  # another thread would forbid holes meanwhile
        _allow_holes(fd)
        try:
            for again in range(PUNCHES_MAX):
                for begin, end in runs:
                    if _libc.fallocate(fd, _FALLOC_PUNCH_HOLE, begin, end - begin):
                        number = ctypes.get_errno()
                        raise OSError(number, os.strerror(number))
                # A huge page that somebody holds is not split: its part is zeros, and stays.
                runs = [run for run in runs if _has_pages(fd, *run)]
                if not runs or again == PUNCHES_MAX - 1:
                    break
                time.sleep(PUNCH_AGAIN_S)
        finally:
            _forbid_holes(fd)


def _has_pages(fd: int, begin: int, end: int) -> bool:
    try:
        return os.lseek(fd, begin, os.SEEK_DATA) < end
    except OSError:  # there are none up to the extent's end
        return False


@contextlib.contextmanager
def _holes_allowed(fd: int, lock: threading.Lock) -> Iterator[None]:
    """Allow holes for the moment. Holes that clients punch meanwhile are detected."""
    with lock:  # another thread would forbid holes meanwhile
        immutable = _flags(fd) & _FS_IMMUTABLE_FL
        if immutable:
            _set_flags(fd, 0)
        try:
            yield
        finally:
            if immutable:
                _set_flags(fd, _FS_IMMUTABLE_FL)


def _memfd() -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create("kvstore-arena", flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create("kvstore-arena", flags)


def _forbid_holes(fd: int) -> None:
    _set_flags(fd, _FS_IMMUTABLE_FL)


def _allow_holes(fd: int) -> None:
    """Allow holes for the moment. Holes that clients punch meanwhile are detected."""
    _set_flags(fd, 0)


def _flags(fd: int) -> int:
    """Return the flags of an extent's inode; 0 where the kernel has none."""
    try:
        (flags,) = struct.unpack("l", fcntl.ioctl(fd, _FS_IOC_GETFLAGS, struct.pack("l", 0)))
    except OSError:
        return 0
    return int(flags)


def _set_flags(fd: int, flags: int) -> None:
    try:
        fcntl.ioctl(fd, _FS_IOC_SETFLAGS, struct.pack("l", flags))
    except OSError as error:  # no such capability, or an older kernel
        logger.debug("holes=possible reason=%r", error.strerror)
