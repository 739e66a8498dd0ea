"""Comparison of two results: intervals that hold what they promise, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from click.testing import Result as Invoked

from kvstore.model.errors import InvalidRequest
from kvstore_bench.chat.reports.bootstrap import clustered, draw_counts, rate_draws
from kvstore_bench.chat.reports.compare import Request, Run, Settings, compare, differences, load
from kvstore_bench.cli import bench
from tests.bench.stub import Script, StubServer

QUICK = Settings(resamples=300)


def requests(ttfts_ms: Any, *, turns: int = 4) -> list[Request]:
    """Lay TTFTs out as turns of conversations, one after the other in time."""
    return [
        Request(
            conversation_id=f"c{number // turns}",
            start_time_ms=100.0 * number,
            latency_ms=float(ttft) + 40.0,
            ttft_ms=float(ttft),
            tpot_ms=20.0,
            itl_ms=[20.0, 20.0],
            output_num_tokens=3,
        )
        for number, ttft in enumerate(ttfts_ms)
    ]


def result(ttfts_ms: Any, **changes: Any) -> Run:
    fields: dict[str, Any] = {
        "model_id": "m", "options": {"concurrency": 2}, "workload": {"sha256": "a", "turns": 4},
    }  # fmt: skip
    return Run(**{**fields, "requests": requests(ttfts_ms), **changes})


def metric(document: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = (one for one in document["points"][0]["metrics"] if one["metric"] == name)
    return dict(found)


def test_a_known_ratio_lies_in_its_interval() -> None:
    random = np.random.default_rng(0)
    slow = random.lognormal(5, 0.3, 200)
    fast = slow * 0.5 * random.normal(1, 0.02, 200)
    document = compare([result(slow)], [result(fast)], settings=QUICK)
    assert document["points"][0]["paired"]
    for name in ("mean_ttft_ms", "median_ttft_ms", "p90_ttft_ms"):
        found = metric(document, name)
        low, high = found["ratio_ci"]
        assert low <= found["ratio"] <= high
        assert 0.45 < low < 0.5 < high < 0.55
        assert found["difference"] == pytest.approx(found["b"] - found["a"])
        assert found["difference_ci"][1] < 0
    assert metric(document, "mean_itl_ms")["ratio_ci"] == [1.0, 1.0]


def test_equal_runs_show_no_difference_and_equal_seeds_equal_intervals() -> None:
    random = np.random.default_rng(1)
    runs = [result(random.lognormal(5, 0.3, 80)) for _ in range(2)]
    first, second = (compare([runs[0]], [runs[1]], settings=QUICK) for _ in range(2))
    assert first == second
    low, high = metric(first, "mean_ttft_ms")["ratio_ci"]
    assert low < 1 < high
    other = compare([runs[0]], [runs[1]], settings=Settings(resamples=300, seed=1))
    assert metric(other, "mean_ttft_ms")["ratio_ci"] != [low, high]


def test_intervals_are_as_wide_as_conversations_differ() -> None:
    """All turns of a conversation alike: 40 requests tell no more than 10 conversations do."""
    random = np.random.default_rng(2)
    spread = random.normal(100, 20, 10)
    together = [result(np.repeat(spread, 4)), result(np.repeat(spread, 4)[::-1].copy())]
    apart = [
        result(random.permutation(np.repeat(spread, 4))),
        result(random.permutation(np.repeat(spread, 4))),
    ]
    widths = []
    for a, b in (together, apart):
        for number, one in enumerate(b.requests):
            b.requests[number] = msgspec.structs.replace(
                one, conversation_id=f"other-{one.conversation_id}"
            )
        low, high = metric(compare([a], [b], settings=QUICK), "mean_ttft_ms")["difference_ci"]
        widths.append(high - low)
    assert widths[0] > 1.5 * widths[1]


def test_resampled_percentiles_are_those_of_the_repeated_values() -> None:
    random = np.random.default_rng(3)
    values, clusters = random.normal(size=30), [f"c{n % 6}" for n in range(30)]
    names = [f"c{n}" for n in range(6)]
    data = clustered(list(values), clusters, names)
    counts = draw_counts(random, 6, 20)
    percents = (None, 50.0, 90.0)
    for percent, column in zip(percents, data.draws(counts, percents), strict=True):
        for row, found in zip(counts, column, strict=True):
            drawn = np.repeat(values, [row[names.index(name)] for name in clusters])
            expected = drawn.mean() if percent is None else np.percentile(drawn, percent)
            assert found == pytest.approx(expected)


def test_many_values_are_resampled_nearly_as_exactly_as_few() -> None:
    random = np.random.default_rng(5)
    values = random.lognormal(3, 0.5, 20_000)
    names = [f"c{n}" for n in range(50)]
    data = clustered(list(values), [names[n % 50] for n in range(20_000)], names)
    median, tail = data.draws(np.ones((1, 50), dtype=np.int64), (50.0, 99.0))
    assert median[0] == pytest.approx(np.percentile(values, 50), rel=0.001)
    assert tail[0] == pytest.approx(np.percentile(values, 99), rel=0.005)


def test_resampled_rates_average_to_the_rate() -> None:
    random = np.random.default_rng(4)
    ends_s = np.sort(random.uniform(0, 10, 300))
    counts = draw_counts(random, 20, 500)
    rates = rate_draws(ends_s, np.ones(300), 10.0, slices=20, counts=counts)
    assert rates.mean() == pytest.approx(30, rel=0.02)
    assert rates.std() > 0


def test_little_data_gets_no_interval() -> None:
    document = compare([result([100.0] * 8)], [result([90.0] * 8)], settings=QUICK)
    found = metric(document, "mean_ttft_ms")
    assert (found["ratio"], found["ratio_ci"], found["difference_ci"]) == (0.9, None, None)
    assert metric(document, "request_throughput")["ratio_ci"] is None
    empty = compare([result([])], [result([1.0] * 8)], settings=QUICK)
    assert empty["points"][0]["metrics"] == []


def test_failed_requests_and_the_warm_up_do_not_count() -> None:
    noisy = result([100.0] * 24)
    noisy.requests[0] = msgspec.structs.replace(noisy.requests[0], ttft_ms=9e9, warmup=True)
    noisy.requests[1] = msgspec.structs.replace(noisy.requests[1], ttft_ms=9e9, error={"kind": "x"})
    document = compare([result([100.0] * 24)], [noisy], force=True, settings=QUICK)
    (point,) = document["points"]
    assert (point["requests"], point["failed"], point["skipped"]) == ([24, 22], [0, 1], [0, 0])
    assert point["differences"] == ["B: of 24 turns, 1 failed, 0 missing"]
    assert metric(document, "p99_ttft_ms")["ratio"] == 1.0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_id": "n"}, "model_id: 'm' in A, 'n' in B"),
        ({"options": {"concurrency": 4}}, "concurrency: 2 in A, 4 in B"),
        ({"workload": {"sha256": "b", "turns": 5}}, "workload.turns: 4 in A, 5 in B"),
        ({"workload": {"sha256": "b", "turns": 4}}, "workload: same parameters, other content"),
        ({"interrupted": True}, "B was interrupted"),
        ({"skipped": 3}, "B: of 27 turns, 0 failed, 3 missing"),
    ],
)
def test_runs_of_unlike_work_are_refused_and_told_apart(changes: dict[str, Any], said: str) -> None:
    a, b = result([100.0] * 24), result([100.0] * 24, **changes)
    assert differences(a, a) == []
    assert differences(a, b) == [said]
    with pytest.raises(InvalidRequest, match="did not do the same work"):
        compare([a], [b], settings=QUICK)
    forced = compare([a], [b], force=True, settings=QUICK)
    assert forced["points"][0]["differences"] == [said]


def test_files_that_are_no_results_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for content, reason in (
        (b"{", "no result of"),
        (b"[]", "no result of"),
        (b'{"schema_version": 1}', "schema version 1, known is 2"),
        (b'{"schema_version": 2}', "missing required field"),
        (b'{"schema_version": 2, "points": [{"model_id": 3}]}', "no result of"),
    ):
        path.write_bytes(content)
        with pytest.raises(InvalidRequest, match=reason):
            load(path)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        load(tmp_path / "missing.json")


def invoke(*arguments: object) -> Invoked:
    return CliRunner().invoke(bench, [str(argument) for argument in arguments])


def test_results_of_chat_are_compared_on_the_command_line(tmp_path: Path) -> None:
    small = ("--conversations", "6", "--turns", "2", "--first-tokens", "10:20", "--answers", "file")
    a, b, other, plot = (tmp_path / name for name in ("a.json", "b.json", "c.json", "d.png"))
    for path, first_s, more in ((a, 0.05, ()), (b, 0.0, ()), (other, 0.0, ("--concurrency", 2))):
        with StubServer(Script(first_s=first_s)) as server:
            made = invoke("chat", "--url", server.url, *small, *more, "--output", path)
        assert made.exit_code == 0, made.output
    shown = invoke("compare", a, b, "--plot", plot, "--resamples", 200)
    assert shown.exit_code == 0, shown.output
    assert "mean_ttft_ms" in shown.stdout
    assert "the same conversations, resampled together" in shown.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")
    document = msgspec.json.decode(invoke("compare", a, b, "--json").stdout)
    assert (document["points"][0]["requests"], document["a"]) == ([12, 12], str(a))
    refused = invoke("compare", a, other)
    assert refused.exit_code == 2
    assert "concurrency: None in A, 2 in B" in refused.stderr
    assert invoke("compare", a, other, "--force").exit_code == 0


def test_series_are_compared_point_by_point(tmp_path: Path) -> None:
    small = ("--conversations", "5", "--turns", "1", "--first-tokens", "10:20", "--sweep", "1,2")
    path, one = tmp_path / "sweep.json", tmp_path / "one.json"
    with StubServer() as server:
        assert invoke("chat", "--url", server.url, *small, "--output", path).exit_code == 0
        assert invoke("chat", "--url", server.url, *small[:6], "--output", one).exit_code == 0
    shown = invoke("compare", path, path, "--plot", tmp_path / "a.png")
    assert shown.exit_code == 0, shown.output
    assert "concurrency=2" in shown.stdout
    assert "the files hold different runs" in invoke("compare", path, one).stderr
