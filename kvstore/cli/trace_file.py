"""Trace files as they are written: a JSON object a line, compressed if the name says so."""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import click
import msgspec


class TraceWriter:
    """Appends rows. nbytes: written so far, before compression."""

    def __init__(self, file: BinaryIO) -> None:
        self.rows = 0
        self.nbytes = 0
        self._file = file
        self._encoder = msgspec.json.Encoder()

    def write(self, row: Mapping[str, Any]) -> None:
        line = self._encoder.encode(row) + b"\n"
        self._file.write(line)
        self.rows += 1
        self.nbytes += len(line)


@contextmanager
def writing(path: Path) -> Iterator[TraceWriter]:
    """Open a trace for writing; what was written is readable however the context ends.

    The same rows make the same bytes. Raises ClickException if it cannot be written.
    """
    try:
        with ExitStack() as stack:
            file: BinaryIO = stack.enter_context(path.open("wb"))
            if path.suffix == ".gz":
                packed = gzip.GzipFile("", "wb", compresslevel=6, fileobj=file, mtime=0)
                stack.enter_context(packed)
                file = stack.enter_context(io.BufferedWriter(cast(io.RawIOBase, packed)))
            yield TraceWriter(file)
    except OSError as error:
        raise click.ClickException(f"{path}: cannot be written: {error.strerror}") from error
