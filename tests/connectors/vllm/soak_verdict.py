"""What a soak saw, by quarters of its time, and what of it is wrong, lost or leaked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

QUARTERS = 4
PROCESSES = ("engine", "daemon")
MEMORY = "rss_anon_bytes"
GROWTH_SHARE_MAX = 0.02
LONG_S = 7200.0
"""From here on memory may grow by that share. In shorter runs allocators still warm up: up to 84
MiB where two engines share two cores."""
GROWTH_SHORT_BYTES_MAX = 96 << 20
THREADS_SHORT_MAX = 4
"""Pools start a thread when they first need it."""
THREADS_MAX = 1
"""A process that came later may have needed one more."""
NONE_MAY_BE = (
    "wrong",
    "lost",
    "hung",
    "engine_dead",
    "held",
    "leases",
    "limbo_bytes",
    "leased_bytes",
    "corrupt_blocks",
)
NEEDED = ("finished", "saved_blocks", "loads", "kept")


@dataclass(frozen=True, slots=True)
class Sample:
    """One look. at_s: since the beginning. engine, daemon: footprints of the processes that run
    then. dram: bytes and leases of the daemon. hit_tokens, asked_tokens: looked up since the look
    before, and found. answer_s: of each request that ended since then, from its submission on."""

    at_s: float
    engine: dict[str, int]
    daemon: dict[str, int]
    dram: dict[str, int]
    hit_tokens: float
    asked_tokens: float
    answer_s: tuple[float, ...]


def report_of(samples: Sequence[Sample], until_s: float) -> dict[str, Any]:
    """Sum up the looks of one quarter, which ended at `until_s`: medians of what processes hold,
    share of the tokens that were found (None: none were asked for), 99th percentile of the time to
    an answer (None: nothing was answered)."""
    asked = sum(each.asked_tokens for each in samples)
    answers = sorted(s for each in samples for s in each.answer_s)
    return {
        "until_s": round(until_s, 1),
        **{name: _medians([getattr(each, name) for each in samples]) for name in PROCESSES},
        "slots": _medians([each.dram for each in samples]),
        "hit_ratio": sum(each.hit_tokens for each in samples) / asked if asked else None,
        "answers": len(answers),
        "p99_s": answers[math.ceil(0.99 * len(answers)) - 1] if answers else None,
    }


def reports_of(samples: Sequence[Sample], seconds: float) -> list[dict[str, Any]]:
    """Return a report for each quarter in which there was a look."""
    quarter_s = seconds / QUARTERS
    quarters: list[list[Sample]] = [[] for _ in range(QUARTERS)]
    for each in samples:
        quarters[min(QUARTERS - 1, int(each.at_s / quarter_s))].append(each)
    return [
        report_of(each, (number + 1) * quarter_s) for number, each in enumerate(quarters) if each
    ]


def growth_of(reports: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return by how much the last quarter lies above the second one; the first is warm-up.

    Of what is counted, above the highest of the two: medians of descriptors and threads vary by
    one. memory_share: of the second one's memory."""
    return _growth(reports[:2], reports[-1])


def growth_in_life(samples: Sequence[Sample], seconds: float) -> dict[str, dict[str, float]]:
    """Return the same from the first half of the second quarter to the other: nobody was killed
    before. Processes of the last quarter are young, and have leaked little. Nothing, if there was
    no look in one of them.

    Memory is the least of each half: an engine's goes up and down by a tenth within a minute."""
    eighths = [
        [each for each in samples if at <= 8 * each.at_s / seconds < at + 1] for at in range(4)
    ]
    if not (eighths[2] and eighths[3]):
        return {}
    *earlier, late = (_with_least_memory(each) for each in eighths if each)
    return _growth(earlier, late)


def _with_least_memory(samples: Sequence[Sample]) -> dict[str, Any]:
    report = report_of(samples, 0.0)
    for name in PROCESSES:
        report[name][MEMORY] = min(getattr(each, name)[MEMORY] for each in samples)
    return report


def _growth(
    earlier: Sequence[dict[str, Any]], later: dict[str, Any]
) -> dict[str, dict[str, float]]:
    growth: dict[str, dict[str, float]] = {}
    for name in PROCESSES:
        after, memory = later[name], earlier[-1][name][MEMORY]
        growth[name] = {what: after[what] - max(e[name][what] for e in earlier) for what in after}
        growth[name][MEMORY] = after[MEMORY] - memory
        growth[name]["memory_share"] = after[MEMORY] / memory - 1
    return growth


def failures(report: dict[str, Any]) -> list[str]:
    """Return what is wrong, left behind or leaked, or was not tried at all. Nothing: it passed."""
    found = [f"{name}: {report[name]}" for name in NONE_MAY_BE if report[name]]
    found += [f"no {name}: it was not tried" for name in NEEDED if not report[name]]
    found += [f"{name} was never killed" for name in PROCESSES if not report["kills"][name]]
    if len(report["reports"]) < QUARTERS:
        found.append(f"only {len(report['reports'])} of {QUARTERS} quarters were seen")
        return found
    if not report["growth_in_life"]:
        found.append("no process was seen twice before the first kill")
    lives = [(*each, THREADS_MAX) for each in growth_of(report["reports"]).items()]
    lives += [(*each, 0) for each in report["growth_in_life"].items()]
    for name, growth, others in lives:
        long = report["seconds"] >= LONG_S
        threads = others if long else THREADS_SHORT_MAX
        most = {"descriptors": 0, "extents": 0, "threads": threads}
        found += [
            f"{name} leaks {what}: {growth[what]:g}"
            for what, limit in most.items()
            if growth[what] > limit
        ]
        if growth["memory_share"] > GROWTH_SHARE_MAX and (
            long or growth[MEMORY] > GROWTH_SHORT_BYTES_MAX
        ):
            found.append(f"{name} grew by {100 * growth['memory_share']:.1f} %")
    return found


def line_of(report: dict[str, Any]) -> str:
    """Return a report as one line to read."""
    processes = "; ".join(
        f"{name} {report[name][MEMORY] / 2**20:.0f} MiB, {report[name]['descriptors']:g} "
        f"descriptors, {report[name]['threads']:g} threads"
        for name in PROCESSES
    )
    hits = "-" if report["hit_ratio"] is None else f"{report['hit_ratio']:.3f}"
    p99 = "-" if report["p99_s"] is None else f"{report['p99_s']:.2f} s"
    return (
        f"{report['until_s']:.0f} s: {processes}; "
        f"slots {report['slots']['used_bytes'] / 2**20:.1f} MiB, {report['slots']['leases']:g} "
        f"leases; hit ratio {hits}; p99 {p99} of {report['answers']} answers"
    )


def _medians(looks: Sequence[dict[str, int]]) -> dict[str, float]:
    return {what: median(each[what] for each in looks) for what in looks[0]}
