"""Run every fault case on real processes and count what must not happen.

    python -m tests.faults.run --json faults.json
    python -m tests.faults.run --case daemon_stopped
    python -m tests.faults.run --list

`wrong`: bytes or answers that break a promise; `hung`: processes that did not answer in time;
`engine_dead`: engines that ended although nobody killed them; `leaked`: leases, reservations or
limbo that nobody holds any more and that were not freed within five seconds; `resurrected`: blocks
that came back after a delete was answered; `hits_lost`, `members_lost`: of a fleet while its etcd
was away. All have to be 0. `whole_again_s`: after an etcd came back empty; 15 at most.
Cases take turns with records of one size, of sizes that vary, and lossy ones with fine parts.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from tests.cluster.namespaces import why_not
from tests.faults import cases_daemon as of_daemon
from tests.faults import cases_etcd as of_etcd
from tests.faults import cases_liars as of_liars
from tests.faults import cases_network as of_network
from tests.faults import cases_peers as of_peers
from tests.faults import cases_processes as of_processes
from tests.faults import cases_races as of_races
from tests.faults.clocks import wall_clock_reads
from tests.faults.fleet import FleetScene
from tests.faults.records import KINDS
from tests.faults.scene import ROOT, Dead, Hung, Scene, Skipped

COUNTS = ("wrong", "hung", "engine_dead", "leaked", "resurrected")
OF_ETCD = ("hits_lost", "members_lost")
SMALL_ARENA = ("dram.capacity=16MiB", "dram.extent=8MiB")


def no_wall_clock(scene: Scene) -> None:
    """A clock that jumps changes nothing: no decision reads one that can."""
    found = wall_clock_reads(ROOT)
    scene.expect(not found, f"the wall clock is read at {found}")


class Case(NamedTuple):
    """run: is given the scene. overrides: of its daemons."""

    run: Callable[[Any], None]
    overrides: tuple[str, ...]
    scene: type[Scene] = Scene


OF_ONE_DAEMON = {
    case.__name__: Case(case, tuple(overrides))
    for case, *overrides in (
        (of_processes.one_session_for_all_workers,),
        (of_processes.reader_stopped_past_its_lease, of_processes.SHORT_LEASE, *SMALL_ARENA),
        (of_processes.writer_stopped_past_its_lease, of_processes.SHORT_LEASE, *SMALL_ARENA),
        (of_processes.scheduler_killed, of_processes.SHORT_LEASE),
        (of_processes.worker_killed, of_processes.SHORT_LEASE),
        (of_processes.process_killed_while_another_is_stopped, of_processes.SHORT_LEASE),
        (of_processes.leases_under_half_the_arena,),
        (of_daemon.daemon_killed_under_load,),
        (of_daemon.daemon_stopped,),
        (of_daemon.calls_are_refused_in_microseconds,),
        (of_daemon.restarted_with_another_arena,),
        (of_daemon.another_format_version,),
        (of_daemon.clients_reconnect_and_map_again,),
        (of_daemon.deleted_stays_deleted,),
        (no_wall_clock,),
    )
}
OF_FLEETS = {
    case.__name__: Case(case, tuple(overrides), scene)
    for case, scene, *overrides in (
        (of_peers.peers_killed_under_load, FleetScene),
        (of_peers.lender_stopped, FleetScene),
        (of_peers.lender_killed_while_it_lends, FleetScene),
        (of_peers.lender_stopped_while_it_lends, FleetScene),
        (of_peers.borrower_stopped_while_it_reads, FleetScene),
        (of_peers.lender_drains, FleetScene),
        (of_peers.partitioned_both_ways, FleetScene),
        (of_peers.partitioned_from_the_lender, FleetScene),
        (of_peers.partitioned_towards_the_lender, FleetScene),
        (of_peers.full_arena_at_the_borrower, FleetScene, *SMALL_ARENA),
        (of_peers.another_fleet, of_peers.OtherFleet),
        (of_peers.two_daemons_with_one_id, of_peers.ThreeHosts),
        (of_network.link_fifty_times_slower, FleetScene),
        (of_network.link_that_flips_bits, of_network.Relayed),
        (of_network.link_that_stalls, of_network.Relayed),
        (of_network.clocks_a_day_apart, of_network.ShiftedClock),
        (of_liars.lying_peers, of_liars.LiarsScene),
        (of_races.delete_races_fetch, FleetScene),
        (of_races.delete_while_a_daemon_is_dead, FleetScene),
        (of_races.fetch_races_eviction, of_races.DramOnly, *SMALL_ARENA),
        (of_etcd.etcd_stopped, of_etcd.EtcdScene),
        (of_etcd.etcd_killed, of_etcd.EtcdScene),
        (of_etcd.etcd_emptied, of_etcd.EtcdScene),
        (of_etcd.etcd_leader_stopped, of_etcd.ThreeEtcds),
        (of_etcd.two_daemons_with_one_id_by_etcd, of_etcd.EtcdScene),
    )
}
CASES: dict[str, Case] = OF_ONE_DAEMON | OF_FLEETS


def kind_of(name: str) -> str:
    """Return what kind of records the engines of a case have: cases take turns."""
    return KINDS[list(CASES).index(name) % len(KINDS)]


def run_case(name: str, *, quick: bool, kind: str = "") -> dict[str, Any]:
    """Run one case and return its counts and details. kind: of its records, "": its own."""
    case = CASES[name]
    began = time.monotonic()
    scene = case.scene(*case.overrides, quick=quick, kind=kind or kind_of(name))
    skipped = ""
    try:
        with scene:
            case.run(scene)
    except Skipped as error:
        skipped = str(error)
    except Hung:
        scene.hung += 1
        scene.details["error"] = traceback.format_exc(limit=4)
    except Dead:
        scene.details["error"] = traceback.format_exc(limit=4)  # counted when the scene closed
        scene.engine_dead += not scene.engine_dead
    except Exception:
        scene.wrong += 1
        scene.details["error"] = traceback.format_exc(limit=6)
    counts = {count: getattr(scene, count) for count in COUNTS}
    bad = any(counts.values()) or any(scene.details.get(each) for each in OF_ETCD)
    seconds = round(time.monotonic() - began, 2)
    return (
        {"name": name, "kind": scene.kind, "ok": not bad, "skipped": skipped, "seconds": seconds}
        | counts
        | {"details": scene.details}
    )


def summary(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what all cases counted together."""
    result: dict[str, Any] = {count: sum(each[count] for each in results) for count in COUNTS}
    details = [each["details"] for each in results]
    for name in OF_ETCD:
        found = [each[name] for each in details if name in each]
        result |= {name: sum(found)} if found else {}
    whole = [each["whole_again_s"] for each in details if "whole_again_s" in each]
    return result | ({"whole_again_s": max(whole)} if whole else {})


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--case", "names", multiple=True, type=click.Choice(list(CASES)), help="Only this.")
@click.option("--kind", type=click.Choice(KINDS), help="Of records, in every case.")
@click.option("--quick", is_flag=True, help="Fewer rounds, as the tests run them.")
@click.option("--list", "listing", is_flag=True, help="List the cases and end.")
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write the result here too.")
def main(
    names: tuple[str, ...], kind: str | None, quick: bool, listing: bool, file: Path | None
) -> None:
    if listing:
        for name, case in CASES.items():
            click.echo(f"{name}: {(case.run.__doc__ or '').splitlines()[0]}")
        return
    if why_not():
        click.echo(f"hosts are addresses of loopback, with relays: {why_not()}", err=True)
    results = []
    for name in names or CASES:
        results.append(run_case(name, quick=quick, kind=kind or ""))
        last = results[-1]
        state = "skip" if last["skipped"] else "ok" if last["ok"] else "FAILED"
        line = f"{state:6} {last['seconds']:7.1f} s  {name} ({last['kind']})"
        click.echo(f"{line}: {last['skipped']}" if last["skipped"] else line, err=True)
    result = summary(results)
    text = json.dumps(result | {"cases": results}, indent=2)
    click.echo(text)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    sys.exit(not all(each["ok"] for each in results))


if __name__ == "__main__":
    main()
