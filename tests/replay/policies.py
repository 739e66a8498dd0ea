"""Replays recorded traces and the whole family of mixes with `lru` and `hz`, and says where `hz` is
worst: `make policies`, or `python -m tests.replay.policies --help`. Takes minutes to hours.

What is written holds each result as soon as it is known, so a run may be cut off. Exits with 1 if
`hz` hits less than `lru` by more than a thousandth of all prompt tokens anywhere.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from kvstore.replay import Setup, Workload, load_workload, replay, workload_of
from kvstore.replay.bounds import Bounds
from kvstore.replay.mixes import MIXES, synthesize_mix
from kvstore.replay.synth import BLOCK_TOKENS, KINDS, synthesize_trace

SHARES = "0.01,0.02,0.05,0.1,0.2"
LEAST = -0.001
"""What `hz` may hit less than `lru`, of all prompt tokens."""


def family(names: Sequence[str], requests: int, seed: int) -> Iterator[tuple[str, Workload]]:
    """Yield the made-up workloads of these names."""
    for name in names:
        if name in KINDS:
            asked = synthesize_trace(KINDS[name], requests=requests, seed=seed)
        else:
            asked = synthesize_mix(MIXES[name], requests=requests, seed=seed)
        rows = [each.to_row() for each in asked]
        yield name, workload_of(rows, name=name, block_tokens=BLOCK_TOKENS)


def compare(name: str, workload: Workload, shares: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Yield what both policies hit of a workload, at each share of its blocks."""
    bounds = Bounds(workload)
    for share in shares:
        blocks = int(share * workload.unique_blocks)
        if not blocks:
            continue
        lru, hz = (
            replay(workload, Setup(dram_blocks=blocks, dram_policy=policy), bounds)
            for policy in ("lru", "hz")
        )
        choice = hz.choices["dram"]
        yield {
            "trace": name,
            "share": share,
            "requests": lru.requests,
            "dram_blocks": blocks,
            "lru": round(lru.token_hit_ratio, 5),
            "hz": round(hz.token_hit_ratio, 5),
            "hz_minus_lru": round(hz.token_hit_ratio - lru.token_hit_ratio, 5),
            "optimum": round(hz.optimum, 5),
            "follows": choice.follows if choice is not None else None,
            "switches": choice.switches if choice is not None else 0,
            "blocks_per_s_lru": round(lru.blocks_per_s),
            "blocks_per_s_hz": round(hz.blocks_per_s),
        }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the worst row, and which are worse than LRU by more than a thousandth."""
    worst = min(rows, key=lambda row: row["hz_minus_lru"])
    return {
        "worst": {key: worst[key] for key in ("trace", "share", "hz_minus_lru")},
        "below": below(rows),
        "rows": list(rows),
    }


def below(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Name the rows that are below what may be."""
    return [
        f"{row['trace']} at {row['share']:g}: {row['hz_minus_lru']:+.5f}"
        for row in rows
        if row["hz_minus_lru"] < LEAST
    ]


@click.command()
@click.argument("traces", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--kinds", default=",".join([*KINDS, *MIXES]), help="Mixes to replay as well.")
@click.option("--requests", default=10_000, show_default=True, help="Of each mix.")
@click.option("--seed", default=1, show_default=True)
@click.option("--shares", default=SHARES, show_default=True, help="Of the blocks of each.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Where to write it all.")
def main(
    traces: Sequence[Path], *, kinds: str, requests: int, seed: int, shares: str, path: Path | None
) -> None:
    """Compare `lru` and `hz` on TRACES and on mixes."""
    rows: list[dict[str, Any]] = []
    parts = [float(share) for share in shares.split(",")]
    recorded = ((trace.name, load_workload(trace)) for trace in traces)
    made = family([kind for kind in kinds.split(",") if kind], requests, seed)
    for workloads in (recorded, made):
        for name, workload in workloads:
            for row in compare(name, workload, parts):
                rows.append(row)
                click.echo(json.dumps(row))
                if path is not None:
                    path.write_text(json.dumps(summary(rows), indent=1) + "\n", encoding="utf-8")
    for row in (found := below(rows)):
        click.echo(f"hz is worse than lru: {row}", err=True)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
