"""Trace files as they are written: a JSON object a line, compressed if the name says so."""

from __future__ import annotations

import errno
import gzip
import io
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import click
import msgspec


class TraceWriter:
    """Appends rows to a file that is opened for the first. nbytes: written so far, before
    compression."""

    def __init__(self, opened: Callable[[], BinaryIO]) -> None:
        self.rows = 0
        self.nbytes = 0
        self._opened = opened
        self._file: BinaryIO | None = None
        self._encoder = msgspec.json.Encoder()

    def open(self) -> BinaryIO:
        """Open the file, unless it is: what it held is gone."""
        if self._file is None:
            self._file = self._opened()
        return self._file

    def write(self, row: Mapping[str, Any]) -> None:
        line = self._encoder.encode(row) + b"\n"
        self.open().write(line)
        self.rows += 1
        self.nbytes += len(line)


@contextmanager
def writing(path: Path) -> Iterator[TraceWriter]:
    """Write a trace; what was written is readable however the context ends. An older file stays as
    it is until the first row comes, or the context ends well.

    The same rows make the same bytes. Raises ClickException if it cannot be written.
    """
    try:
        _check_writable(path)
        with ExitStack() as stack:
            writer = TraceWriter(lambda: _opened(path, stack))
            yield writer
            writer.open()
    except OSError as error:
        raise click.ClickException(f"{path}: cannot be written: {error.strerror}") from error


def _opened(path: Path, stack: ExitStack) -> BinaryIO:
    file: BinaryIO = stack.enter_context(path.open("wb"))
    if path.suffix != ".gz":
        return file
    packed = gzip.GzipFile("", "wb", compresslevel=6, fileobj=file, mtime=0)
    stack.enter_context(packed)
    return stack.enter_context(io.BufferedWriter(cast(io.RawIOBase, packed)))


def _check_writable(path: Path) -> None:
    """Raise OSError now for what would only be found out at the first row."""
    there = path if path.exists() else path.parent
    there.stat()
    if not os.access(there, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
