"""The numbers: statistics, the JSON's shape, and counters read from Prometheus pages."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_bench.chat.metrics import (
    ServerCounts,
    difference,
    kvstore_counts,
    parse_counters,
    server_counts,
)
from kvstore_bench.chat.reports.report import Slo, distribution, request_record, summarize
from kvstore_bench.chat.sample import Failure, Sample

STATISTICS = ("mean", "median", "p50", "p90", "p99", "std", "min", "max")
LATENCIES = {f"{name}_{what}_ms" for what in ("ttft", "itl", "tpot", "e2el") for name in STATISTICS}


def sample(turn: int = 1, ttft_s: float | None = 0.1, failure: Failure | None = None) -> Sample:
    return Sample(
        conversation_id="a",
        turn=turn,
        messages=2 * turn - 1,
        started_s=0.0,
        queued_s=0.0,
        ttft_s=ttft_s,
        itl_s=(0.02, 0.04),
        latency_s=0.2,
        input_tokens=100,
        output_tokens=3,
        cached_tokens=None,
        output_text="x",
        failure=failure,
    )


def percentile(values: list[float], percent: float) -> float:
    """Interpolate linearly between the two values around the rank, written out."""
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low, high = math.floor(rank), math.ceil(rank)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
def test_statistics_agree_with_their_definitions(values: list[float]) -> None:
    found = distribution(values)
    assert found is not None
    assert found.count == len(values)
    for percent, value in ((50, found.p50), (90, found.p90), (99, found.p99)):
        assert value == pytest.approx(percentile(values, percent), abs=1e-6)
    assert found.mean == pytest.approx(statistics.fmean(values), abs=1e-6)
    assert found.std == pytest.approx(statistics.pstdev(values), rel=1e-6, abs=1e-6)
    assert (found.min, found.max) == (min(values), max(values))


def test_nothing_measured_is_null_not_zero() -> None:
    assert distribution([]) is None
    summary = summarize([], duration_s=1.0, server=ServerCounts())
    assert all(summary[key] is None for key in LATENCIES)
    assert summary["total_cached_tokens"] is None
    assert summary["completed"] == 0


def test_the_json_has_these_keys() -> None:
    samples = [sample(), sample(turn=2, ttft_s=0.3), sample(failure=Failure("timeout", "late"))]
    summary = summarize(samples, duration_s=2.0, server=ServerCounts())
    part = {"completed", "total_input_tokens", "total_cached_tokens"} | LATENCIES
    assert set(summary) == part | {
        "duration",
        "failed",
        "total_output_tokens",
        "request_throughput",
        "input_throughput",
        "output_throughput",
        "total_token_throughput",
        "request_goodput",
        "slo_attainment",
        "tokens_per_chunk",
        "first_turns",
        "resumed_turns",
        "without_usage",
        "without_text",
        "errors",
        "http_statuses",
        "first_errors",
        "server",
    }
    assert set(summary["first_turns"]) == set(summary["resumed_turns"]) == part
    assert set(request_record(sample(), save_text=True)) == {
        "conversation_id",
        "turn",
        "start_time_ms",
        "queue_ms",
        "ttft_ms",
        "latency_ms",
        "tpot_ms",
        "itl_ms",
        "input_num_turns",
        "input_num_tokens",
        "output_num_tokens",
        "output_num_chunks",
        "cached_tokens",
        "output_sha256",
        "output_text",
        "error",
    }
    assert "output_text" not in request_record(sample(), save_text=False)
    assert msgspec.json.decode(msgspec.json.encode(summary)) == summary


def test_first_and_resumed_turns_are_apart_and_failures_in_neither() -> None:
    samples = [sample(), sample(turn=2, ttft_s=0.3), sample(failure=Failure("timeout", "late"))]
    summary = summarize(samples, duration_s=2.0, server=ServerCounts())
    assert summary["first_turns"]["mean_ttft_ms"] == pytest.approx(100)
    assert summary["resumed_turns"]["mean_ttft_ms"] == pytest.approx(300)
    assert summary["mean_tpot_ms"] == pytest.approx(30)
    assert (summary["completed"], summary["failed"]) == (2, 1)
    assert summary["request_throughput"] == pytest.approx(1.0)
    assert summary["output_throughput"] == pytest.approx(3.0)
    assert summary["errors"] == {"timeout": 1}
    assert summary["first_errors"] == ["timeout: late"]


def test_a_request_is_good_if_it_keeps_every_objective() -> None:
    one = sample(ttft_s=0.1)  # 30 ms a token after the first
    assert Slo().holds(one)
    assert Slo(ttft_s=0.1, itl_s=0.031).holds(one)
    assert not Slo(ttft_s=0.09).holds(one)
    assert not Slo(itl_s=0.029).holds(one)
    assert not Slo(ttft_s=9.0).holds(sample(ttft_s=None))
    # A single token has no time per further token; unknown counts take pieces for tokens.
    assert Slo(itl_s=1e-9).holds(replace(one, itl_s=(), output_tokens=1))
    assert not Slo(itl_s=0.029).holds(replace(one, output_tokens=None))


def test_tokens_per_chunk_shows_what_itl_does_not_count() -> None:
    packed = replace(sample(), output_tokens=9)  # in three pieces
    summary = summarize([sample(), packed], duration_s=1.0, server=ServerCounts())
    assert summary["tokens_per_chunk"] == 2.0
    assert packed.tpot_s == pytest.approx(0.06 / 8)


PAGE = """\
# HELP vllm:prompt_tokens_by_source_total Number of prompt tokens by source.
# TYPE vllm:prompt_tokens_by_source_total counter
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_compute"} 10.0
vllm:prompt_tokens_by_source_total{engine="1",model_name="m",source="local_compute"} 5.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="external_kv_transfer"} 2.0
# TYPE vllm:prompt_tokens_by_source_created gauge
vllm:prompt_tokens_by_source_created{engine="0",source="local_compute"} 1.7e9
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 3.0
# TYPE kvstore_reads_total counter
kvstore_reads_total{tier="file"} 4
kvstore_reads_total{tier="dram"} 1
"""


def counters(page: str = PAGE) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    found = parse_counters(page)
    assert found is not None
    return dict(found)


def test_counters_are_summed_over_engines_and_told_apart_by_source() -> None:
    counts = server_counts({}, counters())
    assert counts.prompt_tokens_by_source == {"local_compute": 15, "external_kv_transfer": 2}
    assert counts.cached_tokens_by_source is None
    assert counts.preemptions is None
    assert len(counters()) == 5


def test_a_daemons_counters_are_shown_where_they_moved() -> None:
    before = counters(PAGE.replace('"file"} 4', '"file"} 1'))
    assert kvstore_counts(before, counters()) == {'kvstore_reads_total{tier="file"}': 3}


def test_counters_that_go_backwards_are_not_compared() -> None:
    before = counters(PAGE.replace("10.0", "11.0"))
    assert difference(before, counters()) is None
    (note,) = server_counts(before, counters()).notes
    assert "went backwards" in note


def test_a_page_of_something_else_is_no_metrics_page() -> None:
    assert parse_counters("<html>hello</html>") is None
    assert server_counts({}, {}).notes[0].startswith("server metrics: no vllm:prompt_tokens")
