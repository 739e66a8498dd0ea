"""A page of a file, mapped: what one process counts there, another one reads."""

from __future__ import annotations

import mmap
from pathlib import Path
from types import TracebackType
from typing import Self


class MappedFile:
    """A context manager. The file is made if it is not there."""

    def __init__(self, path: Path) -> None:
        with path.open("a+b") as file:
            file.truncate(mmap.PAGESIZE)
            self._shared = mmap.mmap(file.fileno(), mmap.PAGESIZE)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._shared.close()
