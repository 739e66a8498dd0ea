"""What a run measured, and the report made of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

from kvstore_bench.chat.load import ChatOptions
from kvstore_bench.chat.metrics import ServerCounts
from kvstore_bench.chat.reports import report
from kvstore_bench.chat.sample import Sample
from kvstore_bench.chat.workloads.workload import Dialogue, Workload, fingerprint


@dataclass(frozen=True, slots=True)
class Result:
    """A run, to its end or to where it was interrupted. requests are in the order they ended.

    skipped: turns never answered, because a turn before them failed, or the run was given up or
    interrupted. conversations: what was said, with the model's answers where they went into the
    history. started_unix_s: the wall clock at the run's start.
    """

    options: ChatOptions
    workload: Workload
    model: str
    started_unix_s: float
    duration_s: float
    requests: tuple[Sample, ...]
    skipped: int
    interrupted: bool
    server: ServerCounts
    conversations: tuple[Dialogue, ...]

    @property
    def measured(self) -> tuple[Sample, ...]:
        """The requests that count: those after the warm-up share, in the order they ended."""
        warmup = int(len(self.requests) * self.options.warmup_percent / 100)
        if not warmup:
            return self.requests
        starts = sorted(sample.started_s for sample in self.requests)
        return tuple(sample for sample in self.requests if sample.started_s >= starts[warmup])

    @property
    def measured_s(self) -> float:
        """The seconds in which the requests that count ran."""
        samples = self.measured
        if len(samples) == len(self.requests) or not samples:
            return self.duration_s
        ends = max(sample.started_s + sample.latency_s for sample in samples)
        return ends - min(sample.started_s for sample in samples)

    def summary(self) -> dict[str, Any]:
        """Return the numbers: see report.py for the keys."""
        slo = report.Slo(self.options.slo_ttft_s, self.options.slo_itl_s)
        numbers = report.summarize(
            self.measured, duration_s=self.measured_s, server=self.server, slo=slo
        )
        warmup = len(self.requests) - len(self.measured)
        return {**numbers, "skipped": self.skipped, "warmup_requests": warmup}

    def report(self, *, save_text: bool = False) -> dict[str, Any]:
        """Return everything as one JSON-ready dict. The API key is not in it."""
        options = asdict(replace(self.options, api_key=None))
        del options["api_key"], options["model"]
        dialogues = self.workload.dialogues
        measured = {id(sample) for sample in self.measured}
        date = datetime.fromtimestamp(self.started_unix_s, UTC).isoformat(timespec="seconds")
        return {
            "schema_version": report.SCHEMA_VERSION,
            "date": date,
            "model_id": self.model,
            "num_prompts": len(self.requests),
            "max_concurrency": self.options.concurrency
            or (None if self.options.starts_at_given_times(dialogues) else 1),
            "request_rate": self.options.request_rate,
            "interrupted": self.interrupted,
            "options": options,
            "workload": {
                **self.workload.source,
                "dialogues": len(dialogues),
                "turns": self.workload.turns,
                "sha256": fingerprint(dialogues),
            },
            **self.summary(),
            "requests": [
                {
                    **report.request_record(sample, save_text=save_text),
                    "warmup": id(sample) not in measured,
                }
                for sample in self.requests
            ],
        }
