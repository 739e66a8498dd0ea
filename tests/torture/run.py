"""Kill a daemon again and again, spoil its disk, and count the promises it broke.

    python -m tests.torture.run --kills 100 --seed 1 --json build/torture.json

Clients put (durable and not), get, delete, clear and flush, and keep a journal of every answer. The
daemon dies by SIGKILL: at any time, or in the middle of a call to its disk (writing, sealing,
punching a hole, recovering, scrubbing, `kvstore gc`). Its disk fills up, fails, hangs; last writes
are torn, bits flip. After each death everything is asked for: `durable_lost` counts records that
were answered as durable and are gone although neither evicted nor damaged, `resurrected` what came
back after a delete was answered, `wrong` bytes nobody put, `hung` calls past their deadlines.
All have to be 0, and `cap_overshoot_bytes`, the worst moment, at most one segment.

Records have one size, sizes that vary, or are lossy with fine parts, of which nothing is owed. A
fine part beside the base of another put, or a block without its fine part for who insists on it, is
`wrong`.

`encrypted` is the same with a root key; `nonce_reused` counts nonces that a key used twice: 0.
`tenants` is that with two tenants, who write the same keys and ask for each other's; `foreign`
counts what one is served, or shown, that only the other has put: 0.

`bucket` is the same with an S3 server behind it, which fails, answers wrongly and is killed;
`directories` the same on three of them, of which some are missing, fail, hang or fill up.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from kvstore.testing.root_key import root_key_in_memory
from tests.torture import several, shared
from tests.torture.amplification import amplification
from tests.torture.bucket import Bucket
from tests.torture.findings import KINDS, Findings
from tests.torture.plan import Life, plan
from tests.torture.process import nonces
from tests.torture.several import SeveralWorld
from tests.torture.shared import SharedWorld
from tests.torture.tenants import TenantsWorld
from tests.torture.volume import Volume
from tests.torture.world import SEGMENT_NBYTES, World

EXT4_SHARE = 10  # one life of so many more is lived there, if this is root
BUCKET_SHARE = 5  # and one of so many with a bucket behind it
SEVERAL_SHARE = 4  # and one of so many on several directories
ENCRYPTED_SHARE = 4  # and one of so many encrypted
TENANTS_SHARE = 4  # and one of so many encrypted, with two tenants
DIRECTORIES = 3
EXT4_DEATHS = ("power", "timer", "write", "seal")
SHOWN_MAX = 5
VIOLATIONS_MAX = 100


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--kills", default=100, show_default=True, help="Lives of the daemon.")
@click.option("--seed", default=1, show_default=True, help="Draws what happens in each.")
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write the result here too.")
def main(kills: int, seed: int, file: Path | None) -> None:
    logging.disable(logging.WARNING)  # every client loses its daemon, again and again
    began = time.monotonic()
    again = f"python -m tests.torture.run --kills {kills} --seed {seed}"
    click.echo(f"again: {again}", err=True)
    result = torture(plan(kills, seed), World(), progress=True) | amplification()
    result |= {"seed": seed, "ext4": _on_ext4(kills // EXT4_SHARE, seed)}
    result["bucket"] = _with_bucket(kills // BUCKET_SHARE, seed)
    result["directories"] = _on_several(kills // SEVERAL_SHARE, seed)
    result["encrypted"] = _encrypted(kills // ENCRYPTED_SHARE, seed)
    result["tenants"] = _of_tenants(kills // TENANTS_SHARE, seed)
    result["seconds"] = round(time.monotonic() - began, 1)
    text = json.dumps(result, indent=2)
    click.echo(text)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    parts = ("ext4", "bucket", "directories", "encrypted", "tenants")
    worlds = (result, *(result[part] for part in parts))
    sys.exit(not all(map(good, worlds)))


def _on_ext4(kills: int, seed: int) -> dict[str, Any]:
    """The same on a small file system of its own, which fills up and whose power is cut."""
    lives = plan(kills, seed, EXT4_DEATHS, lives_per_cap=kills)
    if not lives or not Volume.possible():
        return summary(Findings())
    with Volume() as volume:
        return torture(lives, World(volume), progress=True)


def _with_bucket(kills: int, seed: int) -> dict[str, Any]:
    """The same with a real S3 server, which fails, answers wrongly and is killed."""
    lives = plan(kills, seed, shared.DEATHS, lives_per_cap=max(1, kills), troubles=shared.TROUBLES)
    return torture_shared(lives, progress=True) if lives else summary(Findings())


def torture_shared(lives: list[Life], *, progress: bool = False) -> dict[str, Any]:
    """Live these lives with a bucket and return what was found."""
    with Bucket() as bucket:
        world = SharedWorld(bucket)
        result = torture(lives, world, progress=progress)
        return result | {
            "bucket_requests": bucket.requests,
            "bucket_faults": dict(bucket.met),
            "fetched_blocks": world.fetched_blocks,
        }


def _on_several(kills: int, seed: int) -> dict[str, Any]:
    """The same on several directories, of which some are missing, fail, hang or fill up."""
    lives = plan(kills, seed, troubles=tuple(several.TROUBLES))
    return torture_several(lives, progress=True) if lives else summary(Findings())


def _encrypted(kills: int, seed: int) -> dict[str, Any]:
    """The same with a root key, which is in memory alone."""
    lives = plan(kills, seed)
    return torture_encrypted(lives, progress=True) if lives else summary(Findings())


def _of_tenants(kills: int, seed: int) -> dict[str, Any]:
    """The same with two tenants, encrypted."""
    lives = plan(kills, seed)
    return torture_tenants(lives, progress=True) if lives else summary(Findings())


def torture_tenants(lives: list[Life], *, progress: bool = False) -> dict[str, Any]:
    """Live these lives encrypted, with two tenants, and return what was found."""
    return torture_encrypted(lives, TenantsWorld, progress=progress)


def torture_encrypted(
    lives: list[Life],
    make: Callable[[Path], World] = lambda key: World(root_key=key),
    *,
    progress: bool = False,
) -> dict[str, Any]:
    """Live these lives encrypted and return what was found. make: the world, of a root key."""
    with root_key_in_memory() as root_key:
        world, used = make(root_key), (0, 0)

        def count() -> None:
            nonlocal used
            used = nonces(world.daemon.directory)

        result = torture(lives, world, progress=progress, at_end=count)
        return result | {"nonces": used[0], "nonce_reused": used[1]}


def torture_several(lives: list[Life], *, progress: bool = False) -> dict[str, Any]:
    """Live these lives on several directories and return what was found."""
    world = SeveralWorld(DIRECTORIES)
    return torture(lives, world, progress=progress) | {"away": world.away, "back": world.back}


def torture(
    lives: list[Life],
    world: World,
    *,
    progress: bool = False,
    at_end: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Live these lives and return what was found. at_end: called while the world's files are there
    still."""
    with (
        world,
        click.progressbar(
            length=len(lives), label="lives", file=sys.stderr, hidden=not progress
        ) as bar,
    ):

        def told(life: Life) -> None:
            bar.update(1)
            mine = [text for text in world.findings.violations if f"life {life.number}: " in text]
            for text in mine[:SHOWN_MAX]:
                click.echo(f"\n{text}\n  {life}", err=True)

        world.run(lives, told)
        at_end()
        durable = sum((party.journal.durable for party in world.parties), Counter[str]())
        calls = sum((party.traffic.calls for party in world.parties), Counter[str]())
        return summary(world.findings) | {
            "durable_records": durable.total(),
            "durable_records_of": dict(sorted(durable.items())),
            "calls": dict(calls),
        }


def summary(findings: Findings) -> dict[str, Any]:
    counts = {kind: findings.count(kind) for kind in KINDS}
    return {
        "kills": findings.kills,
        "durable_lost": counts.pop("lost"),
        **counts,
        "cap_overshoot_bytes": findings.cap_overshoot_bytes,
        "cap_looks": findings.cap_looks,
        "evicted_records": findings.evicted,
        "checked_blocks": findings.checked,
        "start_s_max": round(findings.start_s_max, 2),
        "deaths": dict(findings.deaths),
        "faults": dict(findings.faults),
        "wounds": dict(findings.wounds),
        "violations": findings.violations[:VIOLATIONS_MAX],
    }


def good(result: dict[str, Any]) -> bool:
    """Whether every promise was kept."""
    if result.get("nonce_reused"):
        return False
    return not result["violations"] and result["cap_overshoot_bytes"] <= SEGMENT_NBYTES


if __name__ == "__main__":
    main()
