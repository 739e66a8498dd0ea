"""Attack real daemons in every way that is known, and count what must not happen.

    python -m tests.hostile.run --json hostile.json
    python -m tests.hostile.run --case probing_for_prefixes
    python -m tests.hostile.run --list

`read_other`: answers to callers about what is not theirs; `wrote_other`: what they changed of it;
`wrong_served`: bytes that nobody honest put; `hung`: calls that did not end in 2 s, of a neighbour
that calls all the time during each attack on tenants, and after it; `daemon_died`;
`calls_allowed`: without a valid credential; `methods_without_right`: that no role is needed for;
`forged_served`: records whose checksum holds and whose bytes do not; `charged`: bytes of memory
that a client left the daemon to pay for; `canaries_found`: secrets on the wire, on disk, in a
bucket, in logs, `/proc` and core dumps; `rotation_failed_calls`: while certificates were replaced.
All have to be 0. `probe_auc`: how well time and answers tell whether a prefix is stored; 0.5 is not
at all. `revoked_s`: until a revoked token is refused. Each case has a positive control: the same
attack where it has to succeed. It takes root, or a user namespace, to be several users; without, it
says that it is skipped, and ends well.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from tests.hostile import cases_arena as arena
from tests.hostile import cases_callers as callers
from tests.hostile import cases_neighbours as neighbours
from tests.hostile import cases_rest as rest
from tests.hostile.scene import COUNTS, Scene, may_be_several_users

CASES: dict[str, Callable[[Scene], None]] = {
    case.__name__: case
    for case in (
        callers.calls_without_a_right,
        callers.revoked_credentials,
        callers.rotations_of_certificates,
        callers.listeners_on_the_wire,
        callers.a_man_in_the_middle,
        callers.tokens_left_behind,
        neighbours.other_users_at_the_sockets,
        neighbours.ids_of_another_tenant,
        neighbours.probing_for_prefixes,
        neighbours.floods_of_another_tenant,
        arena.scribbling_on_the_arena,
        arena.holes_in_the_arena,
        arena.memory_that_others_pay_for,
        arena.memory_kept_past_its_end,
        arena.a_client_that_stands_still,
        rest.forged_files,
        rest.forged_objects,
        rest.erased_and_put_back,
        rest.canaries_at_rest,
    )
}

SKIPPED = "skipped: needs root or a user namespace, to be several users"


def run_case(name: str, *, quick: bool) -> dict[str, Any]:
    """Run one case; return its counts, controls and details."""
    scene = Scene(quick=quick)
    began = time.monotonic()
    failed = ""
    try:
        CASES[name](scene)
    except Exception:
        failed = traceback.format_exc(limit=6)
    return {
        "name": name,
        "ok": scene.ok and not failed,
        "seconds": round(time.monotonic() - began, 2),
        "counts": scene.counts,
        "controls": scene.controls,
        "details": scene.details | ({"error": failed} if failed else {}),
    }


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--case", "names", multiple=True, type=click.Choice(list(CASES)), help="Only this.")
@click.option("--quick", is_flag=True, help="Fewer rounds, as the tests run them.")
@click.option("--list", "listing", is_flag=True, help="List the cases and end.")
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write the result here too.")
def main(names: tuple[str, ...], quick: bool, listing: bool, file: Path | None) -> None:
    if listing:
        for name, case in CASES.items():
            click.echo(f"{name}: {(case.__doc__ or '').splitlines()[0]}")
        return
    if not may_be_several_users():
        click.echo(SKIPPED, err=True)
        _write(json.dumps({"skipped": SKIPPED}), file)
        return
    results = []
    for name in names or CASES:
        results.append(run_case(name, quick=quick))
        last = results[-1]
        state = "ok" if last["ok"] else "FAILED"
        click.echo(f"{state:6} {last['seconds']:7.1f} s  {name}", err=True)
    totals = {count: sum(each["counts"][count] for each in results) for count in COUNTS}
    measured = {key: value for each in results for key, value in each["details"].items()}
    _write(json.dumps(totals | _shown(measured) | {"cases": results}, indent=2), file)
    sys.exit(0 if all(each["ok"] for each in results) else 1)


def _write(text: str, file: Path | None) -> None:
    click.echo(text)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")


def _shown(measured: dict[str, Any]) -> dict[str, Any]:
    """Return what is shown at the top of the result, of all that was measured."""
    shown = ("probe_auc", "revoked_s")
    return {key: measured[key] for key in shown if key in measured}


if __name__ == "__main__":
    main()
