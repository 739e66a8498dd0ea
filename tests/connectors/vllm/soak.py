"""Wear an engine and a daemon out together, and print what is wrong, lost or leaks, as JSON.

    python -m tests.connectors.vllm.soak                  ten minutes
    python -m tests.connectors.vllm.soak --seconds 7200

Two hundred requests at once with shared prefixes, on too few device blocks (so the engine preempts)
and a daemon with small caps (so it evicts from both tiers); three in ten are aborted at a random
moment. In the second half daemon and engine are killed (SIGKILL) in turns, every three minutes, or
more often in a run of less than an hour. Each quarter of the time ends with a report: memory,
descriptors, threads, slots, hit ratio, p99. Before each kill of the daemon a prefix is stored
durably: `lost` counts its blocks that are not there afterwards.

Exits with 1 if an answer was wrong, a block lost, a request hung, anything still held at the end,
or if memory, descriptors or threads grew from the second quarter to the last.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvstore import Client, Group, Namespace
from kvstore.model.keys import KeyChain, root_key
from kvstore.testing.daemon import Daemon
from kvstore.testing.wait import until
from tests.connectors.vllm.engines import EngineProcess, kvstore_transfer, make_models
from tests.connectors.vllm.soak_verdict import (
    QUARTERS,
    Sample,
    failures,
    growth_in_life,
    growth_of,
    line_of,
    reports_of,
)

SEED = 11
CONCURRENCY = 200
ABORT_SHARE = 0.3
ANSWER_TOKENS = 48
SAMPLES_MIN = 32
SAMPLE_S = 5.0  # memory goes up and down by a tenth: medians of a few say nothing
KILL_EVERY_S = 180.0
KILLS_MIN = 4  # of short runs
END_WITHIN_S = 90.0
FREE_WITHIN_S = 30.0
KEPT_WITHIN_S = 20.0
KEPT_BLOCKS = 8
KEPT_NBYTES = 4096
KEPT = Namespace(16, (Group("all", KEPT_NBYTES),), (("soak", "kept"),))
DAEMON = ("dram.capacity=8MiB", "dram.extent=4MiB", "file.capacity=12MiB", "file.segment=2MiB")
ENGINE = {
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 32,
    "num_gpu_blocks_override": 160,
}
HITS, ASKED = "vllm:external_prefix_cache_hits", "vllm:external_prefix_cache_queries"
COUNTERS = ("preemptions", "loads", "loads_failed", "corrupt_blocks", "saved_blocks")

Say = Callable[[str], None]


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


def soak(seconds: float, models: Path, logs: Path, say: Say = print) -> dict[str, Any]:
    """Return what happened: reports of each quarter, counts, growth, and what is held at the end.

    say: is told each report as one line.
    """
    model = str(models / "llama")
    plain = EngineProcess(logs / "plain.log")
    try:
        plain("start", model=model, transfer=None, dtype="float32", max_model_len=1024)
        turns = make_turns(plain)
    finally:
        plain.close()
    with Daemon(*DAEMON) as daemon:
        run = Soak(daemon.start(), model, turns, logs)
        try:
            run.wear_out(seconds, say)
            return run.ended(seconds)
        finally:
            run.close()


class Soak:
    """One daemon, one engine after the other, and what was seen of them."""

    def __init__(self, daemon: Daemon, model: str, turns: list[Any], logs: Path) -> None:
        self._daemon = daemon
        self._model = model
        self._turns = turns
        self._logs = logs
        self._began = time.monotonic()
        self._samples: list[Sample] = []
        self._kills = {"daemon": 0, "engine": 0}
        self._dead: list[str] = []
        self._lost = 0
        self._kept = 0
        self._wrong_kept = 0
        self._ended: list[dict[str, float]] = []  # counts of engines that were killed
        self._evicted = {"dram": 0, "file": 0}
        self._evicted_before = dict(self._evicted)
        self._lives = 0
        self._draw = random.Random(SEED)
        self._start_engine()

    def wear_out(self, seconds: float, say: Say) -> None:
        """Keep both busy for so long, and kill them in turns in the second half."""
        self._began = time.monotonic()
        slice_s = seconds / max(SAMPLES_MIN, round(seconds / SAMPLE_S))
        every_s = min(KILL_EVERY_S, seconds / 2 / KILLS_MIN)
        kill_at, told = seconds / 2 + every_s / 2, 0
        while (at := time.monotonic() - self._began) < seconds:
            if at >= kill_at:
                victim = min(self._kills, key=lambda name: self._kills[name])
                self._kill(victim, slice_s)
                kill_at += every_s
            else:
                self._work(slice_s)
            now = time.monotonic() - self._began
            for report in reports_of(self._samples, seconds)[told:]:
                if now >= report["until_s"]:
                    say(line_of(report))
                    told += 1
        for report in reports_of(self._samples, seconds)[told:]:
            say(line_of(report))

    def ended(self, seconds: float) -> dict[str, Any]:
        """Let what runs finish; return what was found."""
        self._counts |= self._engine("end_traffic", wait_s=END_WITHIN_S)
        self._engine("settle")
        self._count_engine()
        with Client(self._daemon.target) as client:

            def free() -> bool:
                stats = client.admin.stats()
                return not stats["leases"] and not stats["dram"]["limbo_bytes"]

            try:
                until(free, FREE_WITHIN_S)
            except TimeoutError:
                pass  # it is in the report
            stats = client.admin.stats()
        self._count_evicted(stats)
        lives = [*self._ended, self._counts]
        names = ("finished", "aborted", "wrong", "ties", *COUNTERS)
        counts = {name: int(sum(life.get(name, 0) for life in lives)) for name in names}
        reports = reports_of(self._samples, seconds)
        report = {
            "seconds": round(time.monotonic() - self._began, 1),
            **counts,
            "wrong": counts["wrong"] + self._wrong_kept,
            "lost": self._lost,
            "kept": self._kept,
            "hung": int(self._counts["stuck"]),
            "engine_dead": len(self._dead),
            "dead_found": self._dead,
            "kills": self._kills,
            "evicted_blocks": self._evicted,
            "reports": reports,
            "growth": growth_of(reports) if len(reports) == QUARTERS else {},
            "growth_in_life": growth_in_life(self._samples, seconds),
            "rss_anon_mib": {
                name: [getattr(each, name)["rss_anon_bytes"] >> 20 for each in self._samples]
                for name in ("engine", "daemon")
            },
            "held": self._engine("held"),
            "leases": stats["leases"],
            "limbo_bytes": stats["dram"]["limbo_bytes"],
            "leased_bytes": stats["dram"]["leased_bytes"],
        }
        return {**report, "failures": failures(report)}

    def close(self) -> None:
        self._engine.close()

    # ---- what happens ----------------------------------------------------------------------------

    def _work(self, seconds: float) -> None:
        self._engine.send("traffic", seconds=seconds)
        if self._worked():
            self._look()

    def _worked(self) -> bool:
        """Await the end of what the engine was told to do; replace an engine that died of it."""
        try:
            self._counts |= self._engine.receive()
        except RuntimeError as error:  # or it does not answer
            self._dead.append(str(error)[-500:])
            self._engine.kill()
            self._replace_engine()
            return False
        return True

    def _kill(self, victim: str, seconds: float) -> None:
        """Kill in the middle of traffic."""
        self._kills[victim] += 1
        self._engine.send("traffic", seconds=seconds)
        time.sleep(self._draw.uniform(0.2, 0.8) * seconds)
        if victim == "engine":
            self._engine.kill()
            self._replace_engine()
            return
        records = [self._draw.randbytes(KEPT_NBYTES) for _ in range(KEPT_BLOCKS)]
        keys = KeyChain(root_key(KEPT.id), 16).update(
            [self._draw.randrange(1000) for _ in range(16 * KEPT_BLOCKS)]
        )
        with Client(self._daemon.target, timeout_s=KEPT_WITHIN_S, arena=False) as client:
            client.register(KEPT)
            self._count_evicted(client.admin.stats())
            done = client.put(KEPT.id, keys, records, durable=True, wait_s=KEPT_WITHIN_S)
            self._daemon.kill()
        self._evicted_before = dict.fromkeys(self._evicted, 0)
        self._worked()  # the rest without a daemon
        self._daemon.start()
        if done.committed == KEPT_BLOCKS:
            self._check_kept(keys, records)

    def _check_kept(self, keys: Any, records: list[bytes]) -> None:
        """The engine does not step meanwhile, so nothing evicts what was stored last."""
        found: list[bytes | None] = []
        with Client(self._daemon.target, arena=False) as client:
            client.register(KEPT)

            def there() -> bool:
                found[:] = client.get(KEPT.id, keys)
                return all(each is not None for each in found)

            try:
                until(there, KEPT_WITHIN_S)
            except TimeoutError:
                self._lost += sum(each is None for each in found)
        self._kept += sum(each is not None for each in found)
        self._wrong_kept += sum(
            each is not None and each != record for each, record in zip(found, records, strict=True)
        )

    # ---- processes -------------------------------------------------------------------------------

    def _start_engine(self) -> None:
        self._counts: dict[str, float] = {}
        self._hits_before = (0.0, 0.0)
        self._engine = EngineProcess(self._logs / f"engine-{self._lives}.log")
        transfer = kvstore_transfer(self._daemon)
        self._engine("start", model=self._model, transfer=transfer, **ENGINE)
        self._engine(
            "begin_traffic",
            turns=self._turns,
            seed=SEED + self._lives,
            concurrency=CONCURRENCY,
            abort_share=ABORT_SHARE,
        )
        self._lives += 1

    def _replace_engine(self) -> None:
        self._ended.append(self._counts)
        self._engine.close()
        self._start_engine()

    # ---- looks -----------------------------------------------------------------------------------

    def _look(self) -> None:
        engine, daemon = self._engine, self._daemon
        footprints = _footprint(engine.pid), _footprint(daemon.pid)
        self._count_engine()
        hits, asked = float(engine("metric", name=HITS)), float(engine("metric", name=ASKED))
        with Client(daemon.target, arena=False) as client:
            stats = client.admin.stats()
        self._count_evicted(stats)
        dram = {name: stats["dram"][name] for name in ("used_bytes", "leased_bytes", "limbo_bytes")}
        self._samples.append(
            Sample(
                time.monotonic() - self._began,
                *footprints,
                {**dram, "leases": stats["leases"]},
                hits - self._hits_before[0],
                asked - self._hits_before[1],
                tuple(engine("answer_times")),
            )
        )
        self._hits_before = hits, asked

    def _count_engine(self) -> None:
        counters = self._engine("counters")
        self._counts |= {name: counters.get(name, 0) for name in COUNTERS}

    def _count_evicted(self, stats: dict[str, Any]) -> None:
        for tier, before in self._evicted_before.items():
            now = stats[tier]["evicted_blocks"]
            self._evicted[tier] += now - before
            self._evicted_before[tier] = now


def _footprint(pid: int) -> dict[str, int]:
    """Return a process's own memory, its threads, its share of arena extents, its descriptors.

    Without those of segments, of which there are as many as the file tier's cap has room for.
    """
    status = Path(f"/proc/{pid}/status").read_text().split("\n")
    fields = dict(line.split(":", 1) for line in status if ":" in line)
    maps = Path(f"/proc/{pid}/maps").read_text()
    return {
        "rss_anon_bytes": int(fields["RssAnon"].split()[0]) * 1024,
        "descriptors": sum(not _is_segment(each) for each in Path(f"/proc/{pid}/fd").iterdir()),
        "extents": sum("memfd:" in line for line in maps.split("\n")),
        "threads": int(fields["Threads"]),
    }


def _is_segment(descriptor: Path) -> bool:
    try:
        return ".segment" in descriptor.readlink().name
    except FileNotFoundError:  # closed meanwhile
        return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="how long (default: 600)")
    seconds = parser.parse_args().seconds

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="kv-soak-") as directory:
        make_models(Path(directory))
        report = soak(seconds, Path(directory), Path(directory), say)
    print(json.dumps(report, indent=2))
    for failure in report["failures"]:
        say(failure)
    sys.exit(1 if report["failures"] else 0)


if __name__ == "__main__":
    main()
