"""`kvstore status`: one screen about one daemon."""

from __future__ import annotations

import json
import time
from typing import Any

import click

from kvstore.cli.conversations import (
    conversation_lines,
    conversations_json,
    conversations_of,
)
from kvstore.cli.reach import reach
from kvstore.cli.target import connect, daemon_options
from kvstore.model.words import (
    bar,
    duration,
    fidelity_lines,
    percent,
    printable,
    share_lines,
    size,
)
from kvstore.store.findings import Finding, daemon_health, is_wrong, note, ok

ROUNDS = 5
SLOW_S = 0.1  # a client gives a daemon up after some seconds; this is an early sign
CLIENTS_SHOWN = 10
MODELS_SHOWN = 10


@click.command()
@daemon_options
@click.pass_context
def status(ctx: click.Context, target: str, as_json: bool) -> None:
    """Show a daemon's state; exit code 1 if something is wrong.

    \b
    Examples:
      kvstore status
      kvstore status --target unix:/run/kvstore/kvstore.sock
      kvstore status --json | jq -r '.findings[] | select(.level == "wrong") | .found'
    """
    with connect(target) as client:
        client.connect()
        times = []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            stats = client.admin.stats()
            times.append(time.perf_counter() - began)
        known = conversations_of(client)
    findings = [_answers(stats, sorted(times)[ROUNDS // 2]), *daemon_health(stats), *reach(stats)]
    bad = is_wrong(findings)
    if as_json:
        about = {"target": target, "healthy": not bad}
        told = {"findings": [finding.to_json() for finding in findings]}
        click.echo(json.dumps(about | told | stats | conversations_json(known)))
    else:
        lines = _screen(target, stats, findings, bad=bad)
        click.echo("\n".join([*lines, *conversation_lines(known)]))
    ctx.exit(1 if bad else 0)


def _answers(stats: dict[str, Any], answer_s: float) -> Finding:
    """Judge what makes clients give a daemon up: that it does not answer, or refuses."""
    errors = stats["totals"].get("rpc_errors", {})
    classes: dict[str, float] = {}
    for name, count in errors.items():
        _, error, reason = name.split("/")
        error += f" ({reason})" if reason else ""
        classes[error] = classes.get(error, 0) + count
    text = f"in {duration(answer_s)}"
    if classes:
        refused = ", ".join(f"{count:.0f} {error}" for error, count in sorted(classes.items()))
        text += f"; calls refused since the start: {refused}"
    if answer_s > SLOW_S:
        return note("answers", f"{text}: slow", "is this machine short of CPU?")
    return ok("answers", text)


def _screen(target: str, stats: dict[str, Any], findings: list[Finding], *, bad: bool) -> list[str]:
    state = "something is wrong" if bad else "healthy"
    dram, file = stats["dram"], stats["file"]
    lines = [
        f"kvstore {stats['version']} at {target}: {state}",
        f"up {duration(stats['uptime_s'])}, pid {stats['pid']}, {stats['blocks']} blocks in "
        f"{stats['namespaces']} namespaces",
        "",
        *(line for finding in findings for line in finding.lines()),
        "",
        f"dram  {bar(dram['used_bytes'], dram['capacity_bytes'])} {size(dram['used_bytes'])} of "
        f"{size(dram['capacity_bytes'])}, {dram['blocks']} blocks, "
        f"{dram['evicted_blocks']} evicted",
    ]
    lines += _policy(stats, "dram")
    if file["capacity_bytes"]:
        lines.append(
            f"file  {bar(file['physical_bytes'], file['capacity_bytes'])} "
            f"{size(file['physical_bytes'])} of {size(file['capacity_bytes'])}, "
            f"{file['blocks']} blocks, {file['evicted_blocks']} evicted"
        )
    if left := stats["queues"].get("recall"):
        lines.append(f"      {left} runs found on disk are served, but not counted yet")
    devices = file.get("devices", ())
    if len(devices) > 1:
        lines += [f"      {d['path']}: {d['state']}, {size(d['physical_bytes'])}" for d in devices]
    if "object" in stats:
        objects = stats["object"]
        lines.append(
            f"object {bar(objects['physical_bytes'], objects['capacity_bytes'])} "
            f"{size(objects['physical_bytes'])} of {size(objects['capacity_bytes'])}, "
            f"{objects['objects']} objects, {objects['state']}, "
            f"{objects['uploads_waiting']} prefixes to upload"
        )
    if "pool" in stats:
        pool = stats["pool"]
        given = f", {size(pool['segment_bytes'])} of it from here" * bool(pool["segment_bytes"])
        lines.append(
            f"pool  {pool['url']}: {pool['state']}{given}, {pool['put_records']} records put, "
            f"{pool['puts_waiting']} blocks to put"
        )
    return [
        *lines,
        *_events(stats),
        *_fidelities(stats),
        *_hits(stats["totals"]),
        *_models(stats),
        *_tenants(stats),
        *_clients(stats),
    ]


def _policy(stats: dict[str, Any], tier: str) -> list[str]:
    """Say which order a tier follows, if its policy has a choice, or that its policy has failed."""
    policy = stats.get("policies", {}).get(tier, {})
    if policy.get("failures"):
        return ["      its eviction policy has failed, and lru goes on; see the log"]
    if not policy.get("shadow_hit_ratios"):
        return []
    ratios = ", ".join(f"{k} {100 * v:.1f} %" for k, v in policy["shadow_hit_ratios"].items())
    return [f"      evicts by {policy['follows']}; models of it hit lately: {ratios}"]


def _events(stats: dict[str, Any]) -> list[str]:
    if "events" not in stats:
        return []
    events = stats["events"]
    topics = f", topics {', '.join(events['topics'])}" if any(events["topics"]) else ""
    return [
        f"events {events['publish']}, {events['subscribers']} subscribers, {events['blocks']} "
        f"blocks announced in {size(events['nbytes'])}{topics}"
    ]


def _fidelities(stats: dict[str, Any]) -> list[str]:
    return [f"{'' if at else 'kept':6}{line}" for at, line in enumerate(fidelity_lines(stats))]


def _hits(totals: dict[str, Any]) -> list[str]:
    asked, hits = totals["lookup_blocks"], {"dram": 0, "file": 0} | totals.get("hit_blocks", {})
    hits = {tier: count for tier, count in hits.items() if count or tier in ("dram", "file")}
    shares = ", ".join(f"{percent(count, asked)} from {tier}" for tier, count in hits.items())
    lines = [
        f"hits  {percent(sum(hits.values()), asked)} of {asked:.0f} blocks asked for since the "
        f"start: {shares}"
    ]
    ended = {reason: count for reason, count in totals.get("requests", {}).items() if count}
    if ended:
        order = sorted(ended.items(), key=lambda item: -item[1])
        lines.append(
            "      hits ended by "
            + ", ".join(f"{reason} {count:.0f}" for reason, count in order)
            + "; see `kvstore explain --last`"
        )
    return lines


def _models(stats: dict[str, Any]) -> list[str]:
    models = sorted(stats.get("models", ()), key=lambda model: -model["blocks"])
    lines = [
        f"      {model['model']}: {model['blocks']} blocks in {model['namespaces']} namespaces, "
        f"{size(model['dram_bytes'])} dram, {size(model['file_bytes'])} file, "
        f"{percent(model['hit_blocks'], model['asked_blocks'])} hits"
        for model in models[:MODELS_SHOWN]
    ]
    if lines:
        lines[0] = f"of    {lines[0].lstrip()}"
    if len(models) > MODELS_SHOWN:
        lines.append(f"      and {len(models) - MODELS_SHOWN} more models")
    return lines


def _tenants(stats: dict[str, Any]) -> list[str]:
    lines = [f"      {line}" for line in share_lines(stats.get("tenants", {}))]
    if lines:
        lines[0] = f"for   {lines[0].lstrip()}"
    return lines


def _clients(stats: dict[str, Any]) -> list[str]:
    lines = []
    for client in stats["clients"][:CLIENTS_SHOWN]:
        limbo = f", {size(client['limbo_bytes'])} in limbo" if client["limbo_bytes"] else ""
        lines.append(
            f"      {printable(client['name']) or 'unnamed'}: {client['processes']} processes, "
            f"{client['leases']} leases{limbo}"
        )
    if lines:
        lines[0] = f"from  {lines[0].lstrip()}"
    if stats["sessions"] > CLIENTS_SHOWN:
        lines.append(f"      and {stats['sessions'] - CLIENTS_SHOWN} more")
    return lines
