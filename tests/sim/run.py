"""Simulate seeds: the store's own code on a virtual clock, through power cuts and a lossy wire.

    python -m tests.sim.run --seeds 1000 --json sim.json
    python -m tests.sim.run --seed 4711        one seed again, with what it found
    python -m tests.sim.run --stores 8         with so many stores that borrow from each other

Two seeds in five have 3 to 8 stores on a network that loses, doubles, delays, reorders, parts, cuts
and flips (tests/sim/fleet). The others have one store. Who is away while a delete of the fleet is
answered has to learn of it from etcd: `kept_applied` counts such deletes, `dropped_all` the starts
that could not tell which they had missed.

`lost` counts broken promises about what was answered as durable, `wrong` bytes that nobody put,
`resurrected` what came back after a delete was answered, `leaked` leases, slots or bytes over a cap
that stayed behind, `hung` calls that took longer than they may, and hosts that do not find together
when all is quiet, `bug` everything else that must not happen. All have to be 0.

`seeds_of` says how many seeds had records of one size, of sizes that vary, and lossy ones with fine
parts. Of these, planes of two writers together, or a block without its fine part for who insists on
it, are `wrong`, too.

One seed in four has an encrypted file tier. `nonce_reused` counts nonces that a key used twice; it
has to be 0. Half of these have two tenants, who write the same keys; `foreign` counts what one
tenant is served that only the other one wrote, and has to be 0. `lent` says how often one was seen
to hold more than it is guaranteed.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import click

from tests.sim.fleet.world import run_fleet_seed
from tests.sim.outcome import Outcome
from tests.sim.world import run_seed

AGAIN = "python -m tests.sim.run"
KINDS = ("lost", "wrong", "resurrected", "foreign", "leaked", "bug", "hung")
FLEET_STORES = range(3, 9)
FLEETS = 2  # of five seeds
SEED_S = 300  # of real time; one takes 1 to 10
COUNTS = (
    "calls",
    "loads",
    "files_read",
    "lives",
    "durable",
    "faults",
    "rotten",
    "evicted",
    "away",
    "taken_out",
    "fine_served",
    "thinned",
    "encrypted",
    "tenants",
    "lent",
    "nonces",
    "nonce_reused",
    "messages",
    "copies",
    "cuts",
    "flips",
    "partitions",
    "twins",
    "quarantined",
    "fleet_deletes",
    "fleet_refused",
    "kept_applied",
    "dropped_all",
)


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--seeds", default=1000, show_default=True, help="How many.")
@click.option("--start", default=0, show_default=True, help="The first of them.")
@click.option("--seed", type=int, help="Only this one, and show what it found.")
@click.option(
    "--stores",
    type=click.IntRange(1, max(FLEET_STORES)),
    help="How many stores each seed has.  [default: 1, or 3 to 8, by the seed]",
)
@click.option("--jobs", default=2, show_default=True, help="Processes to use.")
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write the result here too.")
def main(
    *, seeds: int, start: int, seed: int | None, stores: int | None, jobs: int, file: Path | None
) -> None:
    chosen = range(start, start + seeds) if seed is None else range(seed, seed + 1)
    began = time.monotonic()
    outcomes = _run(chosen, stores, min(jobs, len(chosen)))
    result = summary(outcomes) | {"seconds": round(time.monotonic() - began, 1)}
    text = json.dumps(result)
    click.echo(text)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    sys.exit(1 if result["failed"] else 0)


def summary(outcomes: list[Outcome]) -> dict[str, Any]:
    """Add the outcomes up."""
    result: dict[str, Any] = {"seeds": len(outcomes)}
    result |= {kind: sum(outcome.count(kind) for outcome in outcomes) for kind in KINDS}
    result |= {name: sum(getattr(outcome, name) for outcome in outcomes) for name in COUNTS}
    kinds = Counter(outcome.kind for outcome in outcomes)
    result |= {"seeds_of": dict(sorted(kinds.items()))}
    stores = Counter(outcome.stores for outcome in outcomes)
    result |= {"stores_of": {str(count): stores[count] for count in sorted(stores)}}
    failed = [outcome for outcome in outcomes if outcome.violations]
    return result | {"failed": [outcome.as_dict() for outcome in failed]}


def stores_of(seed: int) -> int:
    """Return how many stores a seed has, if nobody says so."""
    draw = Random(f"stores {seed}")
    return draw.choice(FLEET_STORES) if draw.randrange(5) < FLEETS else 1


def run_any(seed: int, stores: int | None = None) -> Outcome:
    """Simulate one seed. stores: None: by the seed."""
    count = stores or stores_of(seed)
    draw = Random(f"keys and nonces {seed}")  # how sealed bytes are torn depends on them
    with (
        patch("kvstore.sealing.aead.os", SimpleNamespace(urandom=draw.randbytes)),
        patch("kvstore.sealing.keyring.secrets", SimpleNamespace(token_bytes=draw.randbytes)),
    ):
        return run_seed(seed) if count == 1 else run_fleet_seed(seed, count)


def _run(seeds: range, stores: int | None, jobs: int) -> list[Outcome]:
    # Bytes are hashed with a salt, which would give each process its own order of some sets.
    os.environ["PYTHONHASHSEED"] = "0"
    with (
        multiprocessing.get_context("spawn").Pool(jobs, logging.disable) as pool,
        click.progressbar(length=len(seeds), label="seeds", file=sys.stderr) as bar,
    ):
        outcomes: list[Outcome] = []
        ended = pool.imap_unordered(partial(run_any, stores=stores), seeds)
        for _ in seeds:
            try:
                outcome = ended.next(SEED_S)
            except multiprocessing.TimeoutError:
                left = sorted(set(seeds) - {each.seed for each in outcomes})[:jobs]
                sys.exit(f"\nno seed has ended for {SEED_S} s: look at {left}")
            outcomes.append(outcome)
            bar.update(1)
            if outcome.violations:
                click.echo(f"\nseed {outcome.seed}: {outcome.violations[:3]}", err=True)
                again = f"{AGAIN} --seed {outcome.seed} --stores {outcome.stores}"
                click.echo(f"  again: {again}", err=True)
    return sorted(outcomes, key=lambda outcome: outcome.seed)


if __name__ == "__main__":
    main()
