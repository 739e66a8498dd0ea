"""Errors of a disk, as types that callers can tell apart."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvstore.model.errors import Unavailable

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})


class DiskFull(Unavailable):
    """The file system has no room, whatever the cap says. Free frames, or write later."""


class DiskFailed(Unavailable):
    """The device or file system refused: an I/O error. The bytes asked for cannot be read."""


class DiskUnreadable(DiskFailed):
    """Parts of a directory cannot be read now."""


class DiskHung(DiskFailed):
    """A call has not come back in time. Until `call` is done, a thread may touch its buffers."""

    def __init__(self, call: asyncio.Future[Any]) -> None:
        super().__init__("the device does not answer")
        self.call = call


@contextmanager
def disk_errors(doing: str) -> Iterator[None]:
    """Translate OSError of the block into DiskFull or DiskFailed, with what was being done."""
    try:
        yield
    except OSError as error:
        reason = f"{doing}: {error.strerror or error}"
        if error.errno in NO_SPACE:
            raise DiskFull(reason) from error
        raise DiskFailed(reason) from error
