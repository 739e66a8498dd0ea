"""`kvstore inspect`, `verify` and `gc`: a file tier's directories, with or without their daemon."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from kvstore.cli.progress import progress
from kvstore.cli.root_key import keys_of, needed_root, root_of, root_options, tenant_of
from kvstore.model.block import NamespaceId
from kvstore.model.errors import ConfigError
from kvstore.model.words import SHORT_CHARS, size
from kvstore.sealing import Sealing
from kvstore.tier.file import (
    Audit,
    Damage,
    FileTier,
    RealDisk,
    SegmentReport,
)
from kvstore.tier.file.devices.roster import OWN_NAME
from kvstore.tier.file.directory import LOCK_NAME
from kvstore.tier.file.reseal import Resealed, reseal, reseal_notes
from kvstore.tier.file.segment_file import parse_segment_name
from kvstore.tier.file.spec_files import named, remove_spec_files, spec_files_in

GC_CAPACITY_BYTES = 1 << 60  # no cap: nothing is evicted
MODELS_SHOWN = 10


def _tiers(ctx: click.Context, param: click.Parameter, paths: tuple[Path, ...]) -> tuple[Path, ...]:
    """Return the directories, and those of tenants in them. Raise ConfigError for the first that no
    daemon has used, as one not mounted is."""
    found: list[Path] = []
    for path in paths:
        names = os.listdir(path)
        tenants = _tenants_in(path)
        found += [path, *tenants] if _is_tier(names) else tenants
        if _is_tier(names) or tenants:
            continue
        if (inner := _tier_in(path, names)) is not None:
            raise ConfigError(f"{path} is no directory of a file tier; did you mean {inner}?")
        state = "holds no blocks of kvstore" if names else "is empty: not mounted, or not used yet"
        raise ConfigError(
            f"{path} {state}; name a directory of the daemon's file.path (one in use has a file "
            f"{OWN_NAME})"
        )
    return tuple(found)


def _tenants_in(path: Path) -> list[Path]:
    """Return the directories of tenants in one of file.path."""
    with suppress(OSError):
        return [each for each in sorted((path / "tenants").iterdir()) if _is_tier(os.listdir(each))]
    return []


def _is_tier(names: list[str]) -> bool:
    return OWN_NAME in names or any(map(parse_segment_name, names))


def _tier_in(path: Path, names: list[str]) -> Path | None:
    for inner in (path / name for name in sorted(names)):
        with suppress(OSError):
            if _is_tier(os.listdir(inner)):
                return inner
    return None


directories = click.argument(
    "paths",
    metavar="DIR...",
    nargs=-1,
    required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    callback=_tiers,
)
as_json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON, one line per DIR."
)


@click.command()
@directories
@root_options
@as_json_option
def inspect(
    paths: tuple[Path, ...], root_key_file: Path | None, config: Path | None, as_json: bool
) -> None:
    """Show what file tier directories contain: segments, frames, namespaces.

    It reads headers only and changes nothing; a daemon may be using DIR. A record is one part of
    one block. Dead bytes belong to frames without a live record; `kvstore gc` frees them. Each
    directory is examined alone: a newer copy in another directory of the tier does not count. Of
    encrypted segments, only files are counted unless the root key is named.

    \b
    Examples:
      kvstore inspect /var/lib/kvstore
      kvstore inspect /var/lib/kvstore --root-key-file /mnt/keys/kvstore.key
      kvstore inspect /var/lib/kvstore --json | jq .totals.physical_nbytes
    """
    root = root_of(root_key_file, config)
    for path in paths:
        audit = Audit(path, keys=keys_of(path, root))
        found = _inventory(path, audit)
        if as_json:
            click.echo(json.dumps(found))
            continue
        click.echo(f"{path}: {_used_by(found['daemon_pid'])}")
        click.echo(f"{'segment':<33} {'':<6} {'file':>9} {'on disk':>9} {'runs':>6} {'live':>14}")
        for segment in audit.segments:
            click.echo(_segment_line(segment))
        for each, report in audit.namespaces.items():
            model = f" ({report.model})" if report.model else ""
            click.echo(
                f"namespace {each.hex()[:SHORT_CHARS]}{model}: {report.blocks} blocks, "
                f"{report.records} records, {size(report.nbytes)}"
            )
        totals = found["totals"]
        click.echo(
            f"in all: {totals['live_records']} live records, {size(totals['physical_nbytes'])} on "
            f"disk, {size(totals['dead_nbytes'])} dead"
        )


@click.command()
@directories
@root_options
@as_json_option
@click.pass_context
def verify(
    ctx: click.Context,
    paths: tuple[Path, ...],
    root_key_file: Path | None,
    config: Path | None,
    as_json: bool,
) -> None:
    """Read and check every frame of file tier directories; exit code 1 if one is damaged.

    Exit code 2 if DIR is not a file tier directory, or is not mounted. It changes nothing; a daemon
    may be using DIR. Every read verifies the checksum, so a damaged record is a miss, never served.
    Damage is a sign that the disk is failing. Encrypted segments are verified with the root key;
    without it, only whether their frames and footers are where they say.

    \b
    Examples:
      kvstore verify /var/lib/kvstore
      kvstore verify /var/lib/kvstore --root-key-file /mnt/keys/kvstore.key
      kvstore verify /mnt/nvme0/kv /mnt/nvme1/kv --json | jq -c .damaged[]
    """
    damaged = False
    root = root_of(root_key_file, config)
    for path in paths:
        started = time.perf_counter()
        audit = Audit(path, keys=keys_of(path, root))
        with progress(f"verify {path}", audit.nbytes, shown=not as_json) as advance:
            damages = list(audit.verify(advance))
        seconds = time.perf_counter() - started
        damaged = damaged or bool(damages)
        if as_json:
            click.echo(json.dumps(_verdict(path, audit, damages, seconds)))
            continue
        for damage in damages:
            click.echo(_damage_line(damage, audit))
        speed = f"{size(audit.nbytes / seconds)}/s" if seconds else "-"
        torn = sum(segment.dropped for segment in audit.segments)
        click.echo(
            f"{path}: {'DAMAGED' if damages else 'good'}. {size(audit.nbytes)} read at {speed}, "
            f"{len(damages)} damaged places" + (f", {torn} torn frames, never served" * bool(torn))
        )
        _tell_locked(audit)
        _tell_models(audit)
    ctx.exit(1 if damaged else 0)


@click.command()
@directories
@root_options
@as_json_option
@click.option("--dry-run", is_flag=True, help="Only print how much would be freed.")
@click.option("--seal", is_flag=True, help="Encrypt what is stored in clear.")
def gc(
    *,
    paths: tuple[Path, ...],
    root_key_file: Path | None,
    config: Path | None,
    as_json: bool,
    dry_run: bool,
    seal: bool,
) -> None:
    """Free the space of dead frames: superseded, deleted, torn. No daemon may be using DIR.

    A daemon does the same at its start and while it runs; this command is for a directory without a
    daemon. Live records are not touched. With --dry-run a daemon may be using DIR. With --seal,
    every segment in clear is rewritten encrypted, one by one; that takes room for one more segment.
    What was in clear stays in the disk's free blocks until these are written again.

    \b
    Examples:
      kvstore gc --dry-run /var/lib/kvstore
      kvstore gc /var/lib/kvstore --json
      kvstore gc --seal /var/lib/kvstore --root-key-file /mnt/keys/kvstore.key
    """
    root = needed_root(root_key_file, config) if seal else root_of(root_key_file, config)
    for path in paths:
        keys = keys_of(path, root)
        audit = Audit(path, keys=keys)
        before = _inventory(path, audit)["totals"]
        won, sealed = before["dead_nbytes"], Resealed(0, 0)
        if not dry_run:
            sealing = None
            if root is not None and (seal or keys is not None):
                sealing = Sealing(root, tenant_of(path), accept_plain=True)
            sealed = asyncio.run(_collect(path, audit.namespaces, sealing, seal=seal))
            audit = Audit(path, keys=keys_of(path, root))
            after = _inventory(path, audit)["totals"]
            won = before["physical_nbytes"] - after["physical_nbytes"]
        if as_json:
            values = {"path": str(path), "dry_run": dry_run, "bytes": won, "models": audit.models}
            values |= {"sealed_frames": sealed.frames, "damaged_frames": sealed.damaged}
            click.echo(json.dumps({**values, "physical_nbytes_before": before["physical_nbytes"]}))
        else:
            what = "would be won back" if dry_run else "won back"
            click.echo(f"{path}: {size(won)} of {size(before['physical_nbytes'])} {what}")
            if seal and not dry_run:
                click.echo(f"  {sealed.frames} frames encrypted, {sealed.damaged} damaged, dropped")
            _tell_locked(audit)
            _tell_models(audit)


async def _collect(
    path: Path, live: Collection[NamespaceId], sealing: Sealing | None, *, seal: bool
) -> Resealed:
    """Open the directory as a daemon does, free what is dead, and close it again. live: the
    namespaces that have something that is not. seal: encrypt what is in clear."""
    tier, sealed = FileTier(path, capacity_bytes=GC_CAPACITY_BYTES, sealing=sealing), Resealed(0, 0)
    await tier.open()
    try:
        records = tier.recall.take_all()
        await tier.upkeep.settle()
        disk = RealDisk()
        if seal and tier.keys is not None:
            sealed = await reseal(tier, records)
            reseal_notes(disk, path, tier.keys, list(live))
        kept = {named(each, tier.keys) for each in live}
        remove_spec_files(disk, path, set(spec_files_in(disk, path)) - kept)
    finally:
        await tier.close()
    return sealed


def _inventory(path: Path, audit: Audit) -> dict[str, Any]:
    segments = [asdict(segment) for segment in audit.segments]
    summed = ("physical_nbytes", "runs", "tombstones", "records", "live_records", "dead_nbytes")
    return {
        "path": str(path),
        "daemon_pid": _holder(path),
        "segments": segments,
        "namespaces": {each.hex(): asdict(report) for each, report in audit.namespaces.items()},
        "totals": {name: sum(segment[name] for segment in segments) for name in summed},
    }


def _verdict(path: Path, audit: Audit, damages: list[Damage], seconds: float) -> dict[str, Any]:
    damaged = [
        {
            **asdict(damage),
            "key": damage.key.hex() if damage.key else None,
            "namespace_id": damage.namespace_id.hex(),
        }
        for damage in damages
    ]
    segments = audit.segments
    return {
        "path": str(path),
        "good": not damages,
        "records": sum(segment.records for segment in segments),
        "nbytes": audit.nbytes,
        "dropped": sum(segment.dropped for segment in segments),
        "models": audit.models,
        "damaged": damaged,
        "seconds": seconds,
    }


def _holder(path: Path) -> int | None:
    """Return the process that has locked a directory, as /proc/locks tells; 0: one that has no
    number here; None: nobody."""
    try:
        status = os.stat(path / LOCK_NAME)
        locks = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    for line in locks:
        fields = line.split()
        if len(fields) > 5 and fields[1] == "FLOCK" and fields[5] == place:
            return int(fields[4])
    return None


def _used_by(pid: int | None) -> str:
    if pid is None:
        return "not in use"
    return f"in use by process {pid}" if pid else "in use by a process of another container"


def _segment_line(segment: SegmentReport) -> str:
    live = f"{segment.live_records} of {segment.records}"
    return (
        f"{segment.name.partition('.')[0]} {'sealed' if segment.sealed else 'open':<6} "
        f"{size(segment.nbytes):>9} {size(segment.physical_nbytes):>9} {segment.runs:>6} {live:>14}"
    )


def _tell_locked(audit: Audit) -> None:
    locked = [segment for segment in audit.segments if segment.locked]
    if locked:
        unread = sum(segment.unread for segment in locked)
        click.echo(
            f"  {len(locked)} encrypted segments with {unread} frames were not read: name their "
            "root key with --root-key-file"
        )


def _tell_models(audit: Audit) -> None:
    found = sorted(audit.models.items(), key=lambda item: -item[1])
    for model, blocks in found[:MODELS_SHOWN]:
        click.echo(f"  {blocks} blocks of {model or 'a model that no file names'}")
    if len(found) > MODELS_SHOWN:
        click.echo(f"  and {len(found) - MODELS_SHOWN} more models: kvstore inspect")


def _damage_line(damage: Damage, audit: Audit) -> str:
    where = f"{damage.segment} offset {damage.offset}"
    what = f"block {damage.key.hex()[:SHORT_CHARS]}" if damage.key else "frame header"
    report = audit.namespaces.get(damage.namespace_id)
    if report is not None and report.model:
        what += f" of {report.model}"
    return f"{where}: {what}: {damage.problem}{'' if damage.live else ' (dead)'}"
