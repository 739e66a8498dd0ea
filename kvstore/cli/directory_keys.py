"""The tenants' keys in directories, for `kvstore key rotate`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvstore.cli.root_key import directories_of, has_keys, keys_of
from kvstore.model.errors import ConfigError
from kvstore.model.tenant import DEFAULT_TENANT
from kvstore.settings import Settings
from kvstore.tier.file import DirectoryKeys

if TYPE_CHECKING:
    from kvstore.sealing import Root


class KeyedDirectory(NamedTuple):
    """A directory whose keys open. is_new: the new root opens them already."""

    path: Path
    keys: DirectoryKeys
    is_new: bool

    def rotate(self, root: Root, new_root: Root | None) -> str:
        """Begin a new epoch, or wrap the keys by another root; return what was done.

        Raises ConfigError, DiskFull, DiskFailed.
        """
        if new_root is None:
            self.keys.change(lambda ring: ring.rotated(root))
            return f"epoch {self.keys.ring.current} for new segments"
        # Also if that is so already: an earlier try may have replaced one of the two copies alone.
        self.keys.change(lambda ring: ring.rewrapped(new_root))
        return f"wrapped by the new root{' already' if self.is_new else ''}"


def configured_directories(settings: Settings) -> list[Path]:
    """Return the directories that have keys if a daemon with these settings has run, whether they
    are there or not, and others of its file tier that have some."""
    from kvstore.store.tenants import directories_of as directories_of_tenant

    names = [each.name for each in settings.tenants] or [DEFAULT_TENANT]
    configured = [path for name in names for path in directories_of_tenant(settings, name)]
    return list(dict.fromkeys([*configured, *filter(has_keys, directories_of(settings))]))


def open_all(
    paths: Sequence[Path], root: Root, new_root: Root | None
) -> tuple[list[KeyedDirectory], list[str]]:
    """Return the directories that have keys, and what is wrong with each of the others. Changes
    nothing. Raises ConfigError if neither root opens the keys of one; DiskFailed."""
    found, lacking = [], []
    for path in paths:
        opened = _open(path, root, new_root)
        if opened is not None:
            found.append(opened)
        else:
            lacking.append(f"{path} {'has no keys' if path.is_dir() else 'is not there'}")
    return found, lacking


def _open(path: Path, root: Root, new_root: Root | None) -> KeyedDirectory | None:
    if not has_keys(path):
        return None
    for candidate in (new_root, root):
        try:
            keys = keys_of(path, candidate)
        except ConfigError:
            if candidate is root:
                raise
            continue
        if keys is not None:
            return KeyedDirectory(path, keys, candidate is not root)
    return None
