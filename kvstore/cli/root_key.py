"""Options that name a root key, for commands that work on directories."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvstore.model.errors import ConfigError
from kvstore.model.tenant import NO_TENANT_ID, TENANT_ID_NBYTES, TenantId
from kvstore.sealing import Sealing
from kvstore.settings import Settings, load_settings
from kvstore.tier.file import DirectoryKeys, RealDisk
from kvstore.tier.file.keys import KEYS
from kvstore.tier.file.twin_files import read_twins

if TYPE_CHECKING:
    from kvstore.sealing import Root

Command = TypeVar("Command", bound=Callable[..., Any])
TENANTS = "tenants"  # the folder of a tier that has a directory for each tenant


def root_options(command: Command) -> Command:
    """Add --root-key-file and --config."""
    for option in (
        click.option(
            "--config",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            help="The daemon's TOML file: its root key, also from a command.",
        ),
        click.option(
            "--root-key-file",
            type=click.Path(dir_okay=False, path_type=Path),
            help="File of the root key of encrypted directories.",
        ),
    ):
        command = option(command)
    return command


def root_of(root_key_file: Path | None, config: Path | None) -> Root | None:
    """Return the root that the options name, None for none. Raises ConfigError."""
    from kvstore.sealing import FileRoot, open_root

    if root_key_file is not None:
        return FileRoot.read(root_key_file)
    return open_root(load_settings(config), apart=False) if config is not None else None


def needed_root(root_key_file: Path | None, config: Path | None) -> Root:
    """Return the root that the options name. Raises ConfigError for none."""
    root = root_of(root_key_file, config)
    if root is None:
        raise ConfigError("name the root key: --root-key-file FILE, or --config FILE that sets it")
    return root


def keys_of(path: Path, root: Root | None) -> DirectoryKeys | None:
    """Return the keys of a directory, None if it has none or without a root. Raises ConfigError."""
    if root is None or not has_keys(path):
        return None
    keys = DirectoryKeys(RealDisk(), path, Sealing(root, tenant_of(path)))
    keys.load(create=False)
    return keys


def has_keys(path: Path) -> bool:
    """Say whether a directory has keys, whoever opens them. Raises DiskFailed."""
    return bool(read_twins(RealDisk(), path, KEYS).number)


def tenant_of(path: Path) -> TenantId:
    """Return whose directory this is: what its keys say, else its name."""
    from kvstore.sealing.keyring import stored_tenant

    found = read_twins(RealDisk(), path, KEYS)
    tenant = stored_tenant(found.data) if found.number else None
    if tenant is not None:
        return TenantId(tenant)
    name = path.absolute().name
    if path.absolute().parent.name == TENANTS and len(name) == 2 * TENANT_ID_NBYTES:
        return TenantId(bytes.fromhex(name))
    return NO_TENANT_ID


def directories_of(settings: Settings) -> list[Path]:
    """Return the directories of a daemon's file tier, those of its tenants included."""
    roots = [Path(path) for path in settings.file.paths]
    return [each for root in roots for each in (root, *_tenants_in(root)) if each.is_dir()]


def _tenants_in(root: Path) -> Sequence[Path]:
    return sorted(each for each in (root / TENANTS).glob("*") if each.is_dir())
