"""Which directories have been one tier: empty files whose names say it, in each directory.

`DEVICE` says that this directory was taken into use; `<hash of a path>.peer` that the other one was
part of the same tier; `.left` that it was, and then was not configured any more. So a directory
that is not mounted is told from a new one, and one that comes back after deletes it knows nothing
of is told from one that was only away: a delete waits for what is configured, and for nothing else.
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
            return []  # who takes it into use finds out, and says what to do


def missing(names: Mapping[Path, Sequence[str]]) -> list[Path]:
    """Return the directories that others know, and that are not there or not what was mounted."""
    known = {name for found in names.values() for name in found if name.endswith((_PEER, _LEFT))}
    return [
        path
        for path, found in names.items()
        if OWN_NAME not in found and known & {_name(path, _PEER), _name(path, _LEFT)}
    ]


def strangers(names: Mapping[Path, Sequence[str]]) -> list[Path]:
    """Return the directories that others were served without meanwhile."""
    known = {name for found in names.values() for name in found}
    return [path for path in names if _name(path, _LEFT) in known]


def enlist(disk: Disk, path: Path) -> None:
    """Note that a directory is in use. Of several, all before `note_peers` of the first."""
    _change(disk, path, make={OWN_NAME}, remove=set())


def note_peers(disk: Disk, path: Path, peers: Collection[Path]) -> None:
    """Note with which others a directory makes one tier."""
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
