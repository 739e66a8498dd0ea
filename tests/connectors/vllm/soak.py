"""Wear an engine and a daemon out together, and print what is wrong or leaks, as JSON.

    python -m tests.connectors.vllm.soak                  ten minutes
    python -m tests.connectors.vllm.soak --seconds 60

Two hundred requests at once with shared prefixes, on too few device blocks (so the engine preempts)
and a daemon with small caps (so it evicts from both tiers); three in ten are aborted at a random
moment. Exits with 1 if an answer was wrong, a request stuck, or anything still held at the end.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from kvstore import Client
from kvstore.testing.daemon import Daemon
from tests.connectors.vllm.engines import EngineProcess, kvstore_transfer, make_models

SEED = 11
CONCURRENCY = 200
ABORT_SHARE = 0.3
ANSWER_TOKENS = 48
SAMPLES_MIN = 30
SAMPLE_S = 5.0  # memory goes up and down by a tenth: medians of a few say nothing
END_WITHIN_S = 90.0
DAEMON = ("dram.capacity=8MiB", "dram.extent=4MiB", "file.capacity=12MiB", "file.segment=2MiB")
ENGINE = {
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 32,
    "num_gpu_blocks_override": 160,
}


def make_turns(engine: EngineProcess, count: int = 48) -> list[dict[str, Any]]:
    """Return first turns that share prefixes, and second turns that contain their answers."""
    dice = random.Random(SEED)

    def text(tokens: int) -> list[int]:
        return [dice.randrange(4, 1000) for _ in range(tokens)]

    roots = [text(dice.randrange(40, 200)) for _ in range(8)]
    prompts = [dice.choice(roots) + text(dice.randrange(1, 200)) for _ in range(count)]
    first = engine("reference", prompts=prompts, max_tokens=ANSWER_TOKENS)
    prompts = [turn["prompt"] + turn["answer"] + text(dice.randrange(1, 100)) for turn in first]
    return first + engine("reference", prompts=prompts, max_tokens=ANSWER_TOKENS)


def soak(seconds: float, models: Path, logs: Path) -> dict[str, Any]:
    """Return what happened: counts, growth since the warm-up, and what is held at the end."""
    model = str(models / "llama")
    plain = EngineProcess(logs / "plain.log")
    try:
        plain("start", model=model, transfer=None, dtype="float32", max_model_len=1024)
        turns = make_turns(plain)
    finally:
        plain.close()
    engine = EngineProcess(logs / "engine.log")
    try:
        with Daemon(*DAEMON) as daemon:
            daemon.start()
            engine("start", model=model, transfer=kvstore_transfer(daemon), **ENGINE)
            engine(
                "begin_traffic",
                turns=turns,
                seed=SEED,
                concurrency=CONCURRENCY,
                abort_share=ABORT_SHARE,
            )
            return _measure(engine, daemon, seconds)
    finally:
        engine.close()


def _measure(engine: EngineProcess, daemon: Daemon, seconds: float) -> dict[str, Any]:
    began = time.monotonic()
    samples = []
    count = max(SAMPLES_MIN, round(seconds / SAMPLE_S))
    for _ in range(count):
        engine("traffic", seconds=seconds / count)
        samples.append({"engine": _footprint(engine.pid), "daemon": _footprint(daemon.pid)})
    counts = engine("end_traffic", wait_s=END_WITHIN_S)
    engine("settle")
    with Client(daemon.target) as client:
        stats = client.admin.stats()
    counters = engine("counters")
    names = ("preemptions", "loads", "loads_failed", "corrupt_blocks", "saved_blocks")
    return {
        "seconds": round(time.monotonic() - began, 1),
        **counts,
        **{name: counters.get(name, 0) for name in names},
        "evicted_blocks": {tier: stats[tier]["evicted_blocks"] for tier in ("dram", "file")},
        "growth": {name: _growth([sample[name] for sample in samples]) for name in samples[0]},
        "footprint": samples[-1],
        "rss_anon_mib": {
            name: [sample[name]["rss_anon_bytes"] >> 20 for sample in samples]
            for name in samples[0]
        },
        "held": engine("held"),
        "leases": stats["leases"],
        "limbo_bytes": stats["dram"]["limbo_bytes"],
        "leased_bytes": stats["dram"]["leased_bytes"],
    }


def _growth(samples: list[dict[str, int]]) -> dict[str, int]:
    """Return by how much the last third lies above the middle one; the first is warm-up.

    Medians: memory of an engine that preempts and evicts goes up and down all the time.
    """
    third = len(samples) // 3
    middle, last = samples[third : 2 * third], samples[2 * third :]
    return {
        what: int(median(each[what] for each in last) - median(each[what] for each in middle))
        for what in samples[0]
    }


def _footprint(pid: int) -> dict[str, int]:
    """Return a process's own memory, its descriptors, and its share of arena extents."""
    status = Path(f"/proc/{pid}/status").read_text().split("\n")
    fields = dict(line.split(":", 1) for line in status if ":" in line)
    links = list(Path(f"/proc/{pid}/fd").iterdir())
    maps = Path(f"/proc/{pid}/maps").read_text()
    return {
        "rss_anon_bytes": int(fields["RssAnon"].split()[0]) * 1024,
        "descriptors": len(links),
        "extents": sum("memfd:" in line for line in maps.split("\n")),
        "threads": int(fields["Threads"]),
    }


def passed(report: dict[str, Any]) -> bool:
    """Whether the cache was used, and nothing was wrong, stuck or left behind."""
    nothing = ("wrong", "stuck", "held", "leases", "limbo_bytes", "leased_bytes", "corrupt_blocks")
    return not any(report[name] for name in nothing) and not unused(report)


def unused(report: dict[str, Any]) -> list[str]:
    """Return what there was none of. Without it the run says nothing about the cache."""
    return [name for name in ("finished", "saved_blocks", "loads") if not report[name]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="how long (default: 600)")
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory(prefix="kv-soak-") as directory:
        make_models(Path(directory))
        report = soak(seconds, Path(directory), Path(directory))
    print(json.dumps(report, indent=2))
    if missing := unused(report):
        print(f"no {', no '.join(missing)}: the cache was not used", file=sys.stderr)
    sys.exit(0 if passed(report) else 1)


if __name__ == "__main__":
    main()
