"""What was measured: every answer, and what engines and daemon counted meanwhile."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kvstore_bench.chat.metrics import difference, kvstore_counts, server_counts
from kvstore_bench.demo.daemon import Daemon
from kvstore_bench.demo.engine import Engine, Reply
from kvstore_bench.demo.workload import Tokens, Turn

RESUMED = 2  # the first turn that has a history


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer within a phase."""

    phase: str
    turn: Turn
    reply: Reply


@dataclass(slots=True)
class Book:
    """answers: the recorded ones, that every history is made of. counts: by phase. disk_s: times of
    plain direct reads of as many bytes as a resumed turn loads, after each pass off the disk."""

    answers: dict[Turn, Tokens] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    counts: dict[str, dict[str, Any]] = field(default_factory=dict)
    disk_s: list[float] = field(default_factory=list)

    def add(self, phase: str, turn: Turn, reply: Reply) -> None:
        """Write down one answer."""
        self.samples.append(Sample(phase, turn, reply))

    def phase(self, name: str, *, first: int = RESUMED) -> dict[Turn, Reply]:
        """Return the answers of a phase from one turn on; of repeated turns, the first ones."""
        answers: dict[Turn, Reply] = {}
        for sample in self.samples:
            if sample.phase == name and sample.turn.number >= first:
                answers.setdefault(sample.turn, sample.reply)
        return answers

    def ttfts(self, phase: str) -> dict[Turn, float]:
        """Return the TTFT of each resumed turn, in seconds: the median of its repeats."""
        repeats: dict[Turn, list[float]] = {}
        for sample in self.samples:
            if sample.phase == phase and sample.turn.number >= RESUMED:
                repeats.setdefault(sample.turn, []).append(sample.reply.ttft_s)
        return {turn: statistics.median(values) for turn, values in repeats.items()}

    @contextmanager
    def counting(self, phase: str, engine: Engine, daemon: Daemon | None = None) -> Iterator[None]:
        """Note what both counted while the block ran."""
        engine_before = engine.counters()
        daemon_before = daemon.counters() if daemon else {}
        yield
        engine_after = engine.counters()
        changes = difference(engine_before, engine_after) or {}
        counts: dict[str, Any] = {
            "prompt_tokens_by_source": server_counts(
                engine_before, engine_after
            ).prompt_tokens_by_source,
            "connector": {
                name.removeprefix("vllm:kvstore_").removesuffix("_total"): value
                for (name, _), value in changes.items()
                if name.startswith("vllm:kvstore_") and value
            },
        }
        if daemon:
            counts["daemon"] = kvstore_counts(daemon_before, daemon.counters())
        self.counts[phase] = counts


def share(counts: Mapping[str, Any], source: str) -> float | None:
    """Return which part of the prompt tokens came from one source; None if that was not counted."""
    by_source = counts.get("prompt_tokens_by_source")
    if not by_source or not sum(by_source.values()):
        return None
    return float(by_source.get(source, 0.0) / sum(by_source.values()))
