"""How exact the client's times are: its TTFT and ITL against those of a stub that knows its own.

    python -m kvstore_bench.chat.overhead --rate 200 --seconds 10

A run is repeated; of each error the median over the runs is told, and its least and most. The
machine is shared, and one pause of it spoils the p99 of a run.

The stub (`pacer`) runs in a process of its own and writes into each piece of an answer when it
wrote it; what the client measures beyond that is its error: sending, the loopback, the server's
socket, reading, and waiting for a processor in between. Requests arrive as in `kvstore bench chat
--request-rate`, through the same code. Prints JSON, errors in milliseconds. Other work on the
machine is measured with it: `other_load` is how many processors' worth of it there was, and
`stolen_cpus` how many a hypervisor gave to somebody else.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import uvloop

from kvstore.model.errors import Unavailable
from kvstore_bench.chat.reports.report import distribution
from kvstore_bench.chat.runner import ChatOptions, Result, run_chat
from kvstore_bench.chat.workloads.generator import Shape, SizeRange, generate
from kvstore_bench.chat.workloads.workload import Conversation

TURNS = 4
ERRORS = ("ttft_error_ms", "itl_error_ms", "late_start_ms")
STOP_TIMEOUT_S = 10.0


@contextlib.contextmanager
def paced(first_ms: float, itl_ms: float, tokens: int) -> Iterator[tuple[str, int]]:
    """Run the stub; yield its URL and process id."""
    command = [sys.executable, "-m", "kvstore_bench.chat.pacer", "--first-ms", str(first_ms)]
    command += ["--itl-ms", str(itl_ms), "--tokens", str(tokens)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            if not url:
                raise Unavailable("the stub did not start")
            yield url, process.pid
        finally:
            process.stdin.close()
            process.wait(STOP_TIMEOUT_S)


def measure(
    *,
    rounds: int,
    rate: float,
    seconds: float,
    first_ms: float,
    itl_ms: float,
    tokens: int,
    prompt_tokens: int,
) -> dict[str, Any]:
    """Run the load `rounds` times and return the errors, JSON-ready."""
    conversations = max(1, round(rate * seconds / TURNS))
    size = SizeRange(prompt_tokens, prompt_tokens)
    workload = generate(Shape(conversations=conversations, turns=TURNS, first_tokens=size))
    runs = []
    with paced(first_ms, itl_ms, tokens) as (url, pid):
        options = ChatOptions(url=url, request_rate=rate, answers="file", max_tokens=tokens)
        for _ in range(rounds):
            runs.append(_run(options, workload, pid))
    last = runs[-1]
    return {
        "rate": rate,
        "requests": sum(run["requests"] for run in runs),
        "failed": sum(run["failed"] for run in runs),
        "answer_tokens": tokens,
        **{name: _over_runs([run[name] for run in runs]) for name in last if name in ERRORS},
        "cpus": os.cpu_count(),
        "rounds": runs,
    }


def _run(options: ChatOptions, workload: Sequence[Conversation], pid: int) -> dict[str, Any]:
    before = _busy_s(pid)
    started = time.process_time(), time.perf_counter()
    result = uvloop.run(run_chat(options, workload))
    client_s, wall_s = time.process_time() - started[0], time.perf_counter() - started[1]
    after = _busy_s(pid)
    stub_s, machine_s, stolen_s = (late - early for late, early in zip(after, before, strict=True))
    return {
        "achieved_rate": len(result.requests) / result.duration_s,
        "requests": len(result.requests),
        "failed": sum(sample.failure is not None for sample in result.requests),
        **errors(result),
        "client_cpus": client_s / wall_s,
        "stub_cpus": stub_s / wall_s,
        "other_load": max(0.0, machine_s - client_s - stub_s) / wall_s,
        "stolen_cpus": stolen_s / wall_s,
    }


def _over_runs(runs: Sequence[dict[str, float] | None]) -> dict[str, Any]:
    """Return the median of each figure over the runs, and its least and most."""
    done = [run for run in runs if run is not None]
    names = done[0] if done else ()
    return {
        name: {
            "median": statistics.median(run[name] for run in done),
            "min": min(run[name] for run in done),
            "max": max(run[name] for run in done),
        }
        for name in names
    }


def errors(result: Result) -> dict[str, Any]:
    """Return the client's times less those the stub wrote into the answers."""
    ttft, itl = [], []
    done = [sample for sample in result.requests if sample.failure is None]
    for sample in done:
        written = [float(piece) for piece in sample.output_text.split()]
        assert sample.ttft_s is not None
        ttft.append(sample.ttft_s - written[0])
        gaps = [late - early for early, late in pairwise(written)]
        itl += [abs(ours - its) for ours, its in zip(sample.itl_s, gaps, strict=True)]
    queues = [sample.queued_s for sample in done]
    return {
        "ttft_error_ms": _described(ttft),
        "itl_error_ms": _described(itl),
        "late_start_ms": _described(queues),
    }


def _described(values: Sequence[float]) -> dict[str, float] | None:
    found = distribution(values)
    if found is None:
        return None
    names = ("mean", "p50", "p90", "p99", "max")
    return {name: round(1e3 * getattr(found, name), 3) for name in names}


def _busy_s(pid: int) -> tuple[float, float, float]:
    """Return the processor seconds that a process, and the whole machine, have used, and those
    that the hypervisor gave to others."""
    tick = 1 / os.sysconf("SC_CLK_TCK")
    with open(f"/proc/{pid}/stat") as file:
        # Counted from behind the command's name, which may hold anything.
        fields = file.read().rpartition(")")[2].split()
    with open("/proc/stat") as file:
        user, nice, system, _, _, interrupts, soft, stolen = file.readline().split()[1:9]
    machine = sum(map(int, (user, nice, system, interrupts, soft)))
    return (int(fields[11]) + int(fields[12])) * tick, machine * tick, int(stolen) * tick


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description="Measure the error of the benchmark client's times against a stub endpoint.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=5, help="how often to repeat the run")
    parser.add_argument("--rate", type=float, default=200.0, help="requests/s, Poisson")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long a run is")
    parser.add_argument("--first-ms", type=float, default=50.0, help="the stub's TTFT")
    parser.add_argument("--itl-ms", type=float, default=10.0, help="the stub's ITL")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--prompt-tokens", type=int, default=1000, help="words of a first prompt")
    found = measure(**vars(parser.parse_args()))
    print(msgspec.json.format(msgspec.json.encode(found), indent=1).decode())


if __name__ == "__main__":
    main()
