"""Which directories have been one tier: marked by empty files in each directory.

`DEVICE` says that this directory was taken into use. `<hash of a path>.peer` says that the other
directory is part of the same tier, `.left` that it was and is no longer configured. So a directory
that is not mounted differs from a new one. A directory that missed answered deletes differs from
one that was only away, because a delete needs every configured directory and no other.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from kvstore.tier.file.disk import Disk
from kvstore.tier.file.failure import disk_errors

OWN_NAME = "DEVICE"
_PEER, _LEFT = ".peer", ".left"


def names_in(disk: Disk, path: Path) -> list[str]:
    """Return the names in a directory, none if there is no directory. Raises DiskFailed."""
    with disk_errors(f"look into {path}"):
        try:
            return disk.names(path)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return []  # taking it into use meets the same error, and says what to do


def missing(names: Mapping[Path, Sequence[str]]) -> list[Path]:
    """Return the directories that others list as peers and that are missing or not mounted."""
    known = {name for found in names.values() for name in found if name.endswith((_PEER, _LEFT))}
    return [
        path
        for path, found in names.items()
        if OWN_NAME not in found and known & {_name(path, _PEER), _name(path, _LEFT)}
    ]


def strangers(names: Mapping[Path, Sequence[str]]) -> list[Path]:
    """Return the directories that the tier was used without."""
    known = {name for found in names.values() for name in found}
    return [path for path in names if _name(path, _LEFT) in known]


def enlist(disk: Disk, path: Path) -> None:
    """Mark a directory as in use. Mark all before the first call of `note_peers`."""
    _change(disk, path, make={OWN_NAME}, remove=set())


def note_peers(disk: Disk, path: Path, peers: Collection[Path]) -> None:
    """Mark in a directory which others make one tier with it."""
    wanted = {_name(peer, _PEER) for peer in peers}
    with disk_errors(f"look into {path}"):
        found = {name for name in disk.names(path) if name.endswith((_PEER, _LEFT))}
    gone = {name for name in found if name.endswith(_PEER)} - wanted
    left = {name.removesuffix(_PEER) + _LEFT for name in gone}
    back = {name.removesuffix(_PEER) + _LEFT for name in wanted}
    _change(disk, path, make=wanted | left, remove=gone | back)


def _name(path: Path, suffix: str) -> str:
    return hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:16] + suffix


def _change(disk: Disk, path: Path, *, make: set[str], remove: set[str]) -> None:
    with disk_errors(f"note the directories of the tier in {path}"):
        found = set(disk.names(path))
        for name in sorted(make - found):
            disk.close(disk.open(path / name, write=True, create=True))
        if make - found:
            disk.sync_directory(path)
        for name in sorted(remove & found):
            disk.unlink(path / name)
        if remove & found:
            disk.sync_directory(path)
