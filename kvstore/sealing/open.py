"""Settings -> the root of one daemon."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

from kvstore.model.errors import ConfigError
from kvstore.sealing.aead import new_aead
from kvstore.sealing.root import CommandRoot, FileRoot, Root
from kvstore.sealing.secret import KEY_NBYTES
from kvstore.settings import Settings


def open_root(settings: Settings, *, apart: bool = True) -> Root | None:
    """Return the root that settings name, None for no encryption. Blocking.

    apart: a key file must not be on a disk of the data. Raises ConfigError for one that is, or that
    others may read.
    """
    security = settings.security
    if not security.encrypts:
        return None
    new_aead(bytes(KEY_NBYTES))  # says what to install
    if security.root_argv:
        return CommandRoot(security.root_argv)
    path = Path(security.root_key_file)
    root = FileRoot.read(path)
    for data in data_paths(settings) if apart else ():
        if same_disk(path, data):
            raise ConfigError(
                f"security.root_key_file={path} is on the disk of {data}: who takes the disk has "
                "the key. Put it on another one, on a tmpfs, or in a credential of the service "
                "manager (systemd's LoadCredential=)"
            )
    return root


def data_paths(settings: Settings) -> list[Path]:
    """Return the directories that hold what is encrypted."""
    paths = [Path(path) for path in settings.file.paths]
    url = urlsplit(settings.object.url)
    if url.scheme == "file":
        paths.append(Path("/", url.netloc, unquote(url.path).strip("/")))
    return paths


def same_disk(first: Path, second: Path) -> bool:
    """Say whether two paths, or what of them exists, are on one disk, as far as Linux tells."""
    return _disk_of(first) == _disk_of(second)


def _disk_of(path: Path) -> str:
    there = next((each for each in (path, *path.absolute().parents) if each.exists()), Path("/"))
    device = os.stat(there).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    found = Path(os.path.realpath(f"/sys/dev/block/{number}"))
    if (found / "partition").exists():  # two partitions of a disk are taken away together
        found = found.parent
    return str(found) if found.exists() else number
