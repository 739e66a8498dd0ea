"""Blocking I/O on one segment file, for a thread.

Files are opened for each read and closed again (4 microseconds here), so that thousands of segments
need no descriptor cache; unsealed ones keep theirs, because an I/O error is reported by fdatasync
only to those who had the file open when it happened.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from kvstore.format.frame import SegmentKey, SegmentTag, encode_footer, encode_segment_header
from kvstore.model.errors import CorruptBlock, InvalidRequest
from kvstore.tier.file.disk import Disk
from kvstore.tier.file.failure import DiskFailed, disk_errors
from kvstore.tier.file.keys import DirectoryKeys
from kvstore.tier.file.pages import aligned_copy
from kvstore.tier.file.segment import Hole, Measured

IOV_MAX = os.sysconf("SC_IOV_MAX")
_NAME = re.compile(r"([0-9a-f]{16})-([0-9a-f]{16})\.segment")


def segment_name(tag: SegmentTag) -> str:
    """Return the file name of a segment."""
    return f"{tag.number:016x}-{tag.nonce:016x}.segment"


def parse_segment_name(name: str) -> SegmentTag | None:
    """Return the tag a file name holds, None if it is not the name of a segment."""
    match = _NAME.fullmatch(name)
    return SegmentTag(int(match[1], 16), int(match[2], 16)) if match else None


def holds_blocks(path: Path) -> bool:
    """Say whether a directory has segments."""
    try:
        return any(map(parse_segment_name, os.listdir(path)))
    except OSError:
        return False


def transfer(
    call: Callable[[int, Sequence[memoryview], int], int],
    fd: int,
    buffers: Sequence[memoryview],
    offset: int,
) -> int:
    """Repeat a vectored read or write until all is moved or nothing moves; return the bytes."""
    pending = [buffer for buffer in (b.cast("B") for b in buffers) if len(buffer)]
    pending.reverse()
    moved = 0
    while pending:
        batch = pending[: -IOV_MAX - 1 : -1]
        count = step = call(fd, batch, offset + moved)
        if count <= 0:
            break
        moved += count
        while step and step >= len(pending[-1]):
            step -= len(pending.pop())
        if step:
            pending[-1] = pending[-1][step:]
    return moved


class SegmentFiles:
    """The segments of one directory. Raises DiskFull and DiskFailed.

    keys: seal new segments, and open those that are sealed.
    """

    def __init__(
        self, disk: Disk, directory: Path, *, direct: bool, keys: DirectoryKeys | None = None
    ) -> None:
        self.disk = disk
        self.directory = directory
        self.direct = direct
        self.keys = keys
        self._measurements = count()  # `next` is atomic
        self._half_made: set[SegmentTag] = set()

    def path(self, tag: SegmentTag) -> Path:
        return self.directory / segment_name(tag)

    def create(self, tag: SegmentTag) -> tuple[int, SegmentKey | None]:
        """Make the file with its header page; return a descriptor for writing, and the key that
        seals its frames. All or nothing: if the disk refuses to remove a half-made file, the next
        attempt removes it."""
        path = self.path(tag)
        key = self.keys.new_key() if self.keys is not None else None
        with disk_errors(f"create {path.name}"):
            if tag in self._half_made:
                with suppress(FileNotFoundError):
                    self.disk.unlink(path)
            self._half_made.add(tag)
            fd = self.disk.open(path, write=True, create=True, direct=self.direct)
            try:
                self._write_all(fd, [aligned_copy(encode_segment_header(tag, key))], 0)
            except BaseException:
                self.disk.close(fd)
                self.disk.unlink(path)
                raise
            self._half_made.discard(tag)
        return fd, key

    def write(
        self, tag: SegmentTag, fd: int, buffers: Sequence[memoryview], offset: int
    ) -> Measured:
        """Write a frame; return what the file then takes."""
        with disk_errors("write a frame"), _alignment_errors():
            self._write_all(fd, buffers, offset)
        return self.measure(tag)

    def read(self, tag: SegmentTag, targets: Sequence[memoryview], offset: int) -> None:
        """Fill `targets`. Raises CorruptBlock if the file is gone or ends before."""
        nbytes = sum(target.nbytes for target in targets)
        try:
            with (
                disk_errors("read a frame"),
                _alignment_errors(),
                self._opened(tag, direct=self.direct) as fd,
            ):
                moved = transfer(self.disk.preadv, fd, targets, offset)
        except DiskFailed as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise CorruptBlock(f"{segment_name(tag)} has vanished") from error
            raise
        if moved != nbytes:
            raise CorruptBlock(f"{segment_name(tag)} ends at {offset + moved}, inside a frame")

    def sync(self, fd: int) -> None:
        """Make all writes to a file durable."""
        with disk_errors("fdatasync"):
            self.disk.fdatasync(fd)

    def seal(
        self,
        tag: SegmentTag,
        end: int,
        packed_headers: Sequence[bytes],
        run_sequence_min: int,
        key: SegmentKey | None = None,
    ) -> None:
        """Append the footer, durably. The frames must be durable: a footer vouches for them."""
        footer = aligned_copy(encode_footer(tag, end, packed_headers, run_sequence_min, key=key))
        with (
            disk_errors(f"seal {segment_name(tag)}"),
            self._opened(tag, write=True, direct=self.direct) as fd,
        ):
            self._write_all(fd, [footer], end)
            self.disk.fdatasync(fd)

    def measure(self, tag: SegmentTag) -> Measured:
        """Return what the file takes now."""
        order = next(self._measurements)  # before it begins, so that a higher order saw no less
        with disk_errors("measure"), self._opened(tag) as fd:
            return Measured(self.disk.sizes(fd).physical_nbytes, order)

    def punch(self, tag: SegmentTag, holes: Sequence[Hole]) -> bool:
        """Give the blocks of `holes` back; False if this file system cannot."""
        with disk_errors("punch"), self._opened(tag, write=True) as fd:
            try:
                for hole in holes:
                    self.disk.punch(fd, hole.offset, hole.nbytes)
            except OSError as error:
                if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS):
                    return False
                raise
        return True

    def sync_closed(self, tag: SegmentTag) -> None:
        """Make holes punched into a closed segment durable."""
        with disk_errors("fdatasync"), self._opened(tag, write=True) as fd:
            self.disk.fdatasync(fd)

    def unlink(self, tags: Sequence[SegmentTag]) -> None:
        """Remove files, durably."""
        with disk_errors("unlink"):
            for tag in tags:
                try:
                    self.disk.unlink(self.path(tag))
                except FileNotFoundError:
                    pass  # it was never created, or an operator removed it
            self.disk.sync_directory(self.directory)

    def sync_directory(self) -> None:
        """Make new files durable."""
        with disk_errors("sync the directory"):
            self.disk.sync_directory(self.directory)

    def _write_all(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        nbytes = sum(buffer.nbytes for buffer in buffers)
        moved = transfer(self.disk.pwritev, fd, buffers, offset)
        if moved != nbytes:
            raise OSError(errno.EIO, f"only {moved} of {nbytes} bytes were written")

    @contextmanager
    def _opened(
        self, tag: SegmentTag, *, write: bool = False, direct: bool = False
    ) -> Iterator[int]:
        fd = self.disk.open(self.path(tag), write=write, direct=direct)
        try:
            yield fd
        finally:
            self.disk.close(fd)


@contextmanager
def _alignment_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise InvalidRequest("O_DIRECT needs page-aligned buffers of whole pages") from error
        raise
