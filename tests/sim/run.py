"""Simulate seeds: the store's own code on a virtual clock, through power cuts and a lossy wire.

    python -m tests.sim.run --seeds 1000 --json sim.json
    python -m tests.sim.run --seed 4711        one seed again, with what it found

`lost` counts broken promises about what was answered as durable, `wrong` bytes that nobody put,
`resurrected` what came back after a delete was answered, `leaked` leases, slots or bytes over a cap
that stayed behind, `bug` everything else that must not happen. All have to be 0.

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
from pathlib import Path
from typing import Any

import click

from tests.sim.world import Outcome, run_seed

AGAIN = "python -m tests.sim.run --seed"
KINDS = ("lost", "wrong", "resurrected", "foreign", "leaked", "bug")
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
)


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--seeds", default=1000, show_default=True, help="How many.")
@click.option("--start", default=0, show_default=True, help="The first of them.")
@click.option("--seed", type=int, help="Only this one, and show what it found.")
@click.option("--jobs", default=2, show_default=True, help="Processes to use.")
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write the result here too.")
def main(seeds: int, start: int, seed: int | None, jobs: int, file: Path | None) -> None:
    chosen = range(start, start + seeds) if seed is None else range(seed, seed + 1)
    began = time.monotonic()
    outcomes = _run(chosen, min(jobs, len(chosen)))
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
    failed = [outcome for outcome in outcomes if outcome.violations]
    return result | {"failed": [outcome.as_dict() for outcome in failed]}


def _run(seeds: range, jobs: int) -> list[Outcome]:
    # Bytes are hashed with a salt, which would give each process its own order of some sets.
    os.environ["PYTHONHASHSEED"] = "0"
    with (
        multiprocessing.get_context("spawn").Pool(jobs, logging.disable) as pool,
        click.progressbar(length=len(seeds), label="seeds", file=sys.stderr) as bar,
    ):
        outcomes = []
        for outcome in pool.imap_unordered(run_seed, seeds):
            outcomes.append(outcome)
            bar.update(1)
            if outcome.violations:
                click.echo(f"\nseed {outcome.seed}: {outcome.violations[:3]}", err=True)
                click.echo(f"  again: {AGAIN} {outcome.seed}", err=True)
    return sorted(outcomes, key=lambda outcome: outcome.seed)


if __name__ == "__main__":
    main()
