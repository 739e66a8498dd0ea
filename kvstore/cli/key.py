"""`kvstore key`: root keys, and the tenants' keys that they wrap."""

from __future__ import annotations

import json
import os
import secrets
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvstore.cli.root_key import directories_of, keys_of, needed_root, root_of, root_options
from kvstore.model.errors import ConfigError
from kvstore.settings import load_settings
from kvstore.tier.file import Audit
from kvstore.tier.file.keys import KEYS

if TYPE_CHECKING:
    from kvstore.sealing import Root


@click.group("key")
def key() -> None:
    """Make root keys; show and rotate the keys that they wrap.

    A root key wraps the random key of each tenant, which wraps the keys of segments and objects. So
    a rotation rewrites a few keys and no data.

    `list` prints JSON with --json.

    \b
    Examples:
      kvstore key create /mnt/keys/kvstore.key
      kvstore key list --config kvstore.toml
      kvstore key rotate --config kvstore.toml
    """


@key.command(short_help="Make a root key.")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def create(file: Path) -> None:
    """Write 32 random bytes to a new FILE of mode 0400.

    Keep a copy somewhere else: without it, nothing that was stored can be read. Put FILE on another
    disk than the daemon's directories, and name it in security.root_key_file.

    \b
    Example:
      kvstore key create /mnt/keys/kvstore.key
    """
    try:
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400)
    except FileExistsError:
        raise ConfigError(f"{file} is there: a root key is never overwritten") from None
    try:
        os.write(fd, secrets.token_bytes(32))
        os.fsync(fd)
    finally:
        os.close(fd)
    click.echo(f"{file}: a new root key. Keep a copy elsewhere: without it nothing can be read")


directories = click.argument(
    "paths",
    metavar="[DIR]...",
    nargs=-1,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
)


@key.command("list", short_help="Show the keys of directories.")
@directories
@root_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one line per key.")
def list_keys(
    paths: tuple[Path, ...], root_key_file: Path | None, config: Path | None, as_json: bool
) -> None:
    """Show the tenant's keys in each DIR: epochs, their age, and how many segments need them.

    Without DIR, the directories of --config. No key itself is shown. With the root it is checked
    that it opens them. A daemon may be using DIR.

    \b
    Examples:
      kvstore key list /var/lib/kvstore
      kvstore key list --config kvstore.toml --json
    """
    root = root_of(root_key_file, config)
    for path in _paths(paths, config):
        rows = _rows(path, root)
        if as_json:
            for row in rows:
                click.echo(json.dumps(row))
            continue
        if not rows:
            click.echo(f"{path}: no keys: not encrypted")
        for row in rows:
            made = datetime.fromtimestamp(row["created_s"], UTC).strftime("%Y-%m-%d")
            current = ", for new segments" if row["current"] else ""
            opened = ", opens with this root" if row["opens"] else ""
            click.echo(
                f"{path}: tenant {row['tenant']} epoch {row['epoch']}, made {made}: "
                f"{row['segments']} segments{current}{opened}"
            )


@key.command(short_help="Begin a new epoch, or take another root key.")
@directories
@root_options
@click.option(
    "--new-root-key-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Wrap the keys by this root instead; start the daemon with it from then on.",
)
def rotate(
    paths: tuple[Path, ...],
    root_key_file: Path | None,
    config: Path | None,
    new_root_key_file: Path | None,
) -> None:
    """Begin a new epoch of the tenant's key in each DIR: new segments are sealed with it.

    Old segments keep theirs, and an old key leaves with the last of them. A daemon that is using
    DIR takes the new key for its next segment. With --new-root-key-file the keys are wrapped anew
    instead, and no epoch begins; what the new root opens already counts as done, so the command can
    be repeated. Without DIR, the directories and the bucket of --config.

    Nothing is changed before all of them have answered and opened. Exit code 1 if a directory of
    --config is not there or has no keys: keep the old root key until it is done.

    \b
    Examples:
      kvstore key rotate /var/lib/kvstore --root-key-file /mnt/keys/kvstore.key
      kvstore key rotate --config kvstore.toml --new-root-key-file /mnt/keys/new.key
    """
    from kvstore.cli.bucket_keys import roots_in_bucket, rotate_in_bucket
    from kvstore.cli.directory_keys import configured_directories, open_all
    from kvstore.sealing import FileRoot

    root = needed_root(root_key_file, config)
    new_root = FileRoot.read(new_root_key_file) if new_root_key_file is not None else None
    settings = load_settings(config) if config is not None and not paths else None
    named = configured_directories(settings) if settings is not None else _paths(paths, config)
    found, lacking = open_all(named, root, new_root)
    roots = roots_in_bucket(settings, root, new_root) if settings is not None else {}
    if not found and not roots:
        raise ConfigError(
            f"{', '.join(lacking) or 'nothing there has keys'}: the daemon makes them at its first "
            "start; mount what is missing"
        )
    for each in found:
        click.echo(f"{each.path}: {each.rotate(root, new_root)}")
    if settings is not None:
        rotate_in_bucket(settings, roots, new_root, click.echo)
    if lacking:
        keep = " Keep the old root key until then." if new_root is not None else ""
        raise click.ClickException(
            f"{', '.join(lacking)}: nothing was changed there. Mount what is missing and rotate it "
            f"by name.{keep} A directory that no daemon has used yet needs nothing"
        )


def _paths(paths: tuple[Path, ...], config: Path | None) -> list[Path]:
    if not paths and config is None:
        raise click.UsageError("name a DIR, or --config FILE")
    return list(paths) if paths or config is None else directories_of(load_settings(config))


def _rows(path: Path, root: Root | None) -> list[dict[str, Any]]:
    """Return what may be told of each key: everything but itself."""
    from kvstore.sealing.keyring import stored_keys
    from kvstore.tier.file import RealDisk
    from kvstore.tier.file.twin_files import read_twins

    stored = stored_keys(read_twins(RealDisk(), path, KEYS).data)
    if stored is None:
        return []
    segments = Counter(each.needs_epoch for each in Audit(path).segments)
    opens = keys_of(path, root) is not None
    return [
        {
            "path": str(path),
            "tenant": stored.tenant.hex(),
            "epoch": epoch,
            "created_s": created_s,
            "segments": segments[epoch],
            "current": epoch == max(stored.epochs),
            "opens": opens,
        }
        for epoch, created_s in sorted(stored.epochs.items())
    ]
