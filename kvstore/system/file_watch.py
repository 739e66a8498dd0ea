"""Notice that files were replaced or changed: by what `stat` says, so that links may be swapped."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

Stamp: TypeAlias = "tuple[tuple[int, ...] | None, ...]"


def stamp_of(paths: Sequence[Path]) -> Stamp:
    """Return what changes when one of the files does; None for one that is not there."""
    return tuple(map(_one, paths))


def _one(path: Path) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


class Watched:
    """Files that are looked at now and then."""

    def __init__(self, *paths: Path) -> None:
        self.paths = paths
        self._stamp: Stamp | None = None  # never what `stamp_of` returns

    def changed(self) -> bool:
        """Tell whether they are others than at the last call, or were never looked at."""
        stamp = stamp_of(self.paths)
        changed, self._stamp = stamp != self._stamp, stamp
        return changed

    def again(self) -> None:
        """Let the next `changed` say so, because what is there could not be taken."""
        self._stamp = None
