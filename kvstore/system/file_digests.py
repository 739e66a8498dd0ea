"""SHA-256 of whole files, remembered for as long as the files stay as they are.

What weights or adapters are is told by every byte of their files: one row of an embedding makes
another model. A digest is remembered by the file's device, inode, size and times, in a file that
the processes of one user share, so files are read once per host. Of a file that changed moments ago
nothing is remembered: within one tick of the clock it could change again and show the same times.

SHA-256 rather than a faster checksum: what has the same digest shares KV, in files and buckets, for
good, and here accidents are not the only danger. Processors hash about 2 GB/s with one core, and
pieces of a file are hashed side by side.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from kvstore.model.errors import Incompatible

logger = logging.getLogger(__name__)

PIECE_NBYTES = 64 << 20  # part of what a digest means: it is taken over those of the pieces
READ_NBYTES = 4 << 20
THREADS_MAX = 8
ENTRIES_MAX = 4096
MEMORY_NBYTES_MAX = 4 << 20
SETTLED_S = 2.0  # file systems tick as slowly as that
LOCK_WAIT_S = 300.0  # for another process that reads the same file
LOCK_STEP_S = 0.02
READS_MAX = 3  # of a file that changes while it is read
NICENESS = 5  # below engines: they need the cores more
_ENTRY = re.compile(r"\d+(:\d+){4}")
_DIGEST = re.compile(r"[0-9a-f]{64}")

Progress = Callable[[int, int], None]
"""Is told (bytes read, bytes in all), from one thread or another."""


class _Stamp(NamedTuple):
    """A file as it is now: if it is the same later, so are its bytes."""

    device: int
    inode: int
    nbytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> _Stamp:
        return cls(
            status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        )

    @property
    def name(self) -> str:
        return ":".join(map(str, self))

    @property
    def settled(self) -> bool:
        changed = max(self.mtime_ns, self.ctime_ns)
        return time.time_ns() - changed > SETTLED_S * 1e9


class Remembered:
    """The digests that were remembered at one moment."""

    def __init__(self, digests: Mapping[str, str]) -> None:
        self._digests = digests

    def known(self, paths: Sequence[Path]) -> str | None:
        """The same as `FileDigests.known`; looks at the files' times and nothing else."""
        digests = [self._digests.get(_Stamp.of(path.stat()).name) for path in paths]
        found = [digest for digest in digests if digest is not None]
        return _combined(paths, found) if len(found) == len(digests) else None


class FileDigests:
    """Hashes files. Any thread may call; calls for one file wait for each other, on the host."""

    def __init__(self, memory: Path | None = None) -> None:
        """memory: the file in which digests are remembered; None: nowhere. What it holds is only
        believed if this user, and nobody else, may write it."""
        self._memory = memory

    def known(self, paths: Sequence[Path]) -> str | None:
        """Return what `digest` would, if every file's digest is remembered; reads none of `paths`.

        Raises OSError for a file that is not there.
        """
        return self.remembered().known(paths)

    def remembered(self) -> Remembered:
        """Return what is remembered now, to ask it often: reading it takes up to 0.1 s."""
        return Remembered(self._recall())

    def digest(self, paths: Sequence[Path], progress: Progress | None = None) -> str:
        """Return the hex SHA-256 over the names of `paths`, in their order, and all their bytes.

        Blocks until they are read. Raises Incompatible for a file that does not stop changing, and
        OSError for one that cannot be read.
        """
        sizes = [path.stat().st_size for path in paths]
        total, before = sum(sizes), 0
        digests = []
        for path, nbytes in zip(paths, sizes, strict=True):
            told = partial(_add_up, progress, before, total)
            digests.append(self._one(path, told))
            before += nbytes
        return _combined(paths, digests)

    def _one(self, path: Path, progress: Callable[[int], None]) -> str:
        for _ in range(READS_MAX):
            with path.open("rb", buffering=0) as file:
                stamp = _Stamp.of(os.fstat(file.fileno()))
                with self._alone(stamp):
                    if (remembered := self._recall().get(stamp.name)) is not None:
                        return remembered
                    settled = stamp.settled
                    digest = _hashed(file.fileno(), stamp.nbytes, progress)
                    if stamp == _Stamp.of(os.fstat(file.fileno())) == _Stamp.of(path.stat()):
                        if settled:
                            self._remember(stamp, digest)
                        return digest
        raise Incompatible(f"{path} changes while it is read; try again when it is complete")

    # What is remembered ---------------------------------------------------------------------------

    def _recall(self) -> Mapping[str, str]:
        """Return digests by stamp. What is not as this class writes it is ignored."""
        if self._memory is None:
            return {}
        try:
            with self._memory.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_uid != os.getuid() or status.st_mode & 0o022:
                    return {}
                found = json.loads(file.read(MEMORY_NBYTES_MAX + 1))
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(found, dict):
            return {}
        return {
            stamp: digest
            for stamp, digest in found.items()
            if _ENTRY.fullmatch(stamp) and isinstance(digest, str) and _DIGEST.fullmatch(digest)
        }

    def _remember(self, stamp: _Stamp, digest: str) -> None:
        if self._memory is None:
            return
        new = self._memory.with_name(f"{self._memory.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            with self._locked(0, 1):
                entries = [*self._recall().items(), (stamp.name, digest)][-ENTRIES_MAX:]
                with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                    json.dump(dict(entries), file)
                new.replace(self._memory)
        except OSError as error:
            logger.warning("file_digests=not_remembered path=%s error=%r", self._memory, error)
            with contextlib.suppress(OSError):  # where it cannot be written, it was not made
                new.unlink()

    @contextlib.contextmanager
    def _alone(self, stamp: _Stamp) -> Iterator[None]:
        """Be the only one on this host who reads that file, as far as the memory can be locked."""
        name = hashlib.sha256(stamp.name.encode()).digest()
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                stack.enter_context(self._locked(1 + int.from_bytes(name[:6], "little"), 1))
            yield

    @contextlib.contextmanager
    def _locked(self, begin: int, nbytes: int) -> Iterator[None]:
        """Hold a part of the lock beside the memory. The kernel lets go of a dead holder's.

        Raises OSError, also where a living one keeps it for LOCK_WAIT_S.
        """
        if self._memory is None:
            yield
            return
        self._memory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(f"{self._memory}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            part = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, begin, nbytes, 0)
            _wait_for_lock(lock, part)
            yield
        finally:
            os.close(lock)


def _wait_for_lock(lock: int, part: bytes) -> None:
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.fcntl(lock, fcntl.F_OFD_SETLK, part)
        except OSError as error:
            held = error.errno in (errno.EAGAIN, errno.EACCES)
            if not held or time.monotonic() >= deadline:
                raise
            time.sleep(LOCK_STEP_S)
        else:
            return


def _add_up(progress: Progress | None, before: int, total: int, done: int) -> None:
    if progress is not None:
        progress(before + done, total)


def _combined(paths: Sequence[Path], digests: Sequence[str]) -> str:
    named = [f"{path.name}\0{digest}" for path, digest in zip(paths, digests, strict=True)]
    return hashlib.sha256("\0".join(named).encode()).hexdigest()


def _hashed(fd: int, nbytes: int, progress: Callable[[int], None]) -> str:
    """Return the hex SHA-256 over the SHA-256s of the file's pieces."""
    offsets = range(0, nbytes, PIECE_NBYTES)
    pieces = _Pieces(fd, offsets, nbytes, progress)
    threads = [
        threading.Thread(target=pieces.run, name="kvstore-digest", daemon=True)
        for _ in range(min(THREADS_MAX, os.cpu_count() or 1, len(offsets)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if pieces.error is not None:
        raise pieces.error
    return hashlib.sha256(b"".join(pieces.digests[each] for each in offsets)).hexdigest()


class _Pieces:
    """The pieces of one file, shared by the threads that hash them.

    The threads are daemons: a process that ends does not wait for them.
    """

    def __init__(
        self, fd: int, offsets: Sequence[int], nbytes: int, progress: Callable[[int], None]
    ) -> None:
        self._fd = fd
        self._left = iter(offsets)
        self._nbytes = nbytes
        self._progress = progress
        self._done = 0
        self._lock = threading.Lock()
        self.digests: dict[int, bytes] = {}
        self.error: Exception | None = None

    def run(self) -> None:
        with contextlib.suppress(OSError):  # a container may forbid it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        buffer = memoryview(bytearray(READ_NBYTES))
        try:
            while (offset := self._next()) is not None:
                digest = self._hash(offset, min(offset + PIECE_NBYTES, self._nbytes), buffer)
                with self._lock:
                    self.digests[offset] = digest
        except Exception as error:  # whoever waits for the digest raises it
            self.error = error

    def _next(self) -> int | None:
        with self._lock:
            return next(self._left, None) if self.error is None else None

    def _hash(self, at: int, end: int, buffer: memoryview) -> bytes:
        digest = hashlib.sha256()
        while at < end:
            count = os.preadv(self._fd, [buffer[: end - at]], at)
            if not count:
                break  # it has shrunk: the caller sees that it changed
            digest.update(buffer[:count])
            at += count
            with self._lock:
                self._done += count
                self._progress(self._done)
        return digest.digest()
