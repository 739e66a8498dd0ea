"""How the frames of a segment are stored: in clear, or sealed with which key."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from kvstore.format.frame import (
    ClearTrailer,
    SegmentKey,
    SegmentTag,
    WrappedKey,
    clear_trailer,
    parse_segment_header,
    segment_keys,
)
from kvstore.model.block import PAGE_NBYTES
from kvstore.model.errors import ConfigError
from kvstore.sealing import Keyring
from kvstore.tier.file.disk import Disk, Sizes
from kvstore.tier.file.keys import KEYS
from kvstore.tier.file.pages import aligned_buffer
from kvstore.tier.file.segment_file import SegmentFiles, segment_name, transfer

_log = logging.getLogger(__name__)


class Reader:
    """Reads that return None on an I/O error and beyond the end of the file.

    ahead_nbytes: what is read at once, for whoever reads a file from its start to its end in small
    parts: each read lets other threads run, and then waits until they let it go on. After the first
    I/O error, what is asked for is read and no more, so that only what is damaged is missing.
    turn: held by this thread, if any; others have it while the disk is waited for, which may hang.
    """

    def __init__(self, disk: Disk, fd: int) -> None:
        self.disk = disk
        self.fd = fd
        self.refused = 0
        self.ahead_nbytes = 0
        self.turn: threading.Lock | None = None
        self._buffer = aligned_buffer(PAGE_NBYTES)
        self._offset, self._nbytes = 0, 0  # of what the buffer has

    def read(self, offset: int, nbytes: int) -> memoryview | None:
        """Return bytes that stay valid until the next call."""
        begin = offset - self._offset
        if not self.ahead_nbytes or begin < 0 or begin + nbytes > self._nbytes:
            begin = 0
            if not self._fill(offset, nbytes):
                return None
        return self._buffer[begin : begin + nbytes]

    def forget(self) -> None:
        """Read everything again: what was returned may have been decrypted where it lay."""
        self._nbytes = 0

    @contextmanager
    def others_turn(self) -> Iterator[None]:
        """Let others go on meanwhile."""
        if self.turn is None:
            yield
            return
        self.turn.release()
        try:
            yield
        finally:
            self.turn.acquire()

    def _fill(self, offset: int, nbytes: int) -> bool:
        """Read `nbytes` into the buffer, and more if it reads ahead; say whether they are there."""
        most = max(nbytes, self.ahead_nbytes)
        if len(self._buffer) < most:
            self._buffer = aligned_buffer(most)
        self._offset, self._nbytes = offset, 0
        try:
            target = self._buffer[:most]
            with self.others_turn():
                self._nbytes = transfer(self.disk.preadv, self.fd, [target], offset)
        except OSError as error:
            if most > nbytes:
                self.ahead_nbytes = 0
                return self._fill(offset, nbytes)
            self.refused += 1
            _log.warning("unreadable offset=%d nbytes=%d error=%s", offset, nbytes, error)
        return self._nbytes >= nbytes


class Form(NamedTuple):
    """How a segment's frames are stored. lost: no key is known that opens them."""

    encrypted: bool
    key: SegmentKey | None = None
    epoch: int | None = None

    @property
    def lost(self) -> bool:
        return self.encrypted and self.key is None


def find_form(
    reader: Reader,
    tag: SegmentTag,
    files: SegmentFiles,
    sizes: Sizes,
    page: bytes,
    *,
    write: bool,
) -> Form:
    """Find a segment's key: in its first page, else in its last. Raises ConfigError if a daemon
    could only throw it away."""
    keys, wrapped = files.keys, segment_keys(page)
    is_plain = not wrapped and parse_segment_header(page) is not None
    if not is_plain and (clear := clear_trailer_of(reader, tag, sizes)) is not None:
        wrapped.append(clear.key)
    if not wrapped:
        return _plain_form(files, tag, is_whole=is_plain, write=write)
    if keys is None:
        if write:
            raise ConfigError(
                f"{files.path(tag)} is encrypted: set security.root_key_file or "
                "security.root_command to the root that it was written with"
            )
        return Form(encrypted=True, epoch=wrapped[0].epoch)
    key = next((key for each in wrapped if (key := keys.open(each)) is not None), None)
    if key is not None:
        return Form(encrypted=True, key=key, epoch=key.wrapped.epoch)
    if write:
        _check_retired(files.path(tag), keys.ring, _intact_keys(page, wrapped))
    _log.warning("segment=locked name=%s: none of the keys here opens it", segment_name(tag))
    return Form(encrypted=True)


def _intact_keys(page: bytes, wrapped: Sequence[WrappedKey]) -> list[WrappedKey]:
    """Return the keys that are as they were written: of a first page that is, or found twice."""
    if parse_segment_header(page) is not None:
        return segment_keys(page)
    return [each for each in wrapped if wrapped.count(each) > 1]


def _check_retired(path: Path, ring: Keyring, wrapped: Sequence[WrappedKey]) -> None:
    """Raise ConfigError if the keys of another time or directory may open a segment.

    An epoch that is not here, and older than the newest here, was retired: no keys open it.
    """
    names = " and ".join(KEYS.names)
    for epoch in (each.epoch for each in wrapped if each.tenant == ring.tenant):
        if epoch > ring.current:
            needs = f"epoch {epoch} of the tenant's keys, and the newest known is {ring.current}"
            remedy = f"put the newer {names} back"
        elif epoch in ring.epochs:
            needs = f"another key of epoch {epoch} than the one in {names}"
            remedy = "put those back that it was written with"
        else:
            continue
        raise ConfigError(
            f"{path} needs {needs}: {remedy}. If they are lost for good, move this file away: its "
            "blocks are then lost, and blocks that it deletes may be served again; to rule that "
            "out, remove all *.segment files to start with an empty tier"
        )


def _plain_form(files: SegmentFiles, tag: SegmentTag, *, is_whole: bool, write: bool) -> Form:
    """Say whether a segment that names no key is taken as one of format 1."""
    keys = files.keys
    if keys is None or keys.sealing.accept_plain:
        return Form(encrypted=False)
    if is_whole and write:
        raise ConfigError(
            f"{files.path(tag)} is not encrypted, and whoever can write to the disk can forge it. "
            f"Encrypt it: kvstore gc --seal {files.directory}. Or serve it as it is: "
            "security.accept_plain=true"
        )
    # A damaged first page of a segment without a footer: its key is gone.
    return Form(encrypted=not is_whole)


def clear_trailer_of(reader: Reader, tag: SegmentTag, sizes: Sizes) -> ClearTrailer | None:
    size = sizes.nbytes
    if size % PAGE_NBYTES or size < 2 * PAGE_NBYTES:
        return None
    page = reader.read(size - PAGE_NBYTES, PAGE_NBYTES)
    return clear_trailer(page, tag) if page is not None else None
