"""Series of runs: a result a point, prompts of its own for each, and pictures."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from kvstore_bench.chat import overhead
from kvstore_bench.chat.reports.requests_csv import COLUMNS
from kvstore_bench.cli import bench
from tests.bench.stub import Received, Script, StubServer, failing

SMALL = ("--conversations", "2", "--turns", "2", "--first-tokens", "10:20")
PNG = b"\x89PNG"


def chat(server: StubServer, *arguments: object) -> Result:
    given = ["chat", "--url", server.url, *map(str, arguments)]
    return CliRunner().invoke(bench, given)


def decode(text: str | bytes) -> dict[str, Any]:
    return msgspec.json.decode(text, type=dict[str, Any])


def first_words(server: StubServer) -> list[str]:
    return [received.contents[0] for received in server.received if len(received.contents) == 1]


def test_a_sweep_has_a_result_and_prompts_of_its_own_for_each_point(tmp_path: Path) -> None:
    plot, table = tmp_path / "sweep.png", tmp_path / "sweep.csv"
    with StubServer() as server:
        options = ("--sweep", "1,2", "--json", "--plot", plot, "--csv", table)
        result = chat(server, *SMALL, *options, "--slo-ttft", 5000)
    assert result.exit_code == 0, result.output
    document = decode(result.stdout)
    assert document["axes"] == ["concurrency"]
    points = document["points"]
    assert [point["name"] for point in points] == ["concurrency=1", "concurrency=2"]
    assert [point["max_concurrency"] for point in points] == [1, 2]
    assert [point["completed"] for point in points] == [4, 4]
    assert len(set(first_words(server))) == 4
    assert points[0]["workload"]["sha256"] != points[1]["workload"]["sha256"]
    assert plot.read_bytes().startswith(PNG)
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["point"] for row in rows] == ["concurrency=1"] * 4 + ["concurrency=2"] * 4


def test_a_sweep_may_keep_its_prompts_and_vary_the_rate() -> None:
    with StubServer() as server:
        result = chat(server, *SMALL, "--sweep-rate", "100,200.5", "--same-prompts")
    assert result.exit_code == 0, result.output
    assert "request_rate=200.5" in result.stdout
    assert len(set(first_words(server))) == 2


def test_the_four_patterns_ask_for_their_lengths(tmp_path: Path) -> None:
    with StubServer() as server:
        options = ("--patterns", "--conversations", 1, "--turns", 1, "--plot", tmp_path / "a.png")
        result = chat(server, *options, "--json")
        asked = [
            (len(received.contents[0].split()) - 2, received.body["max_tokens"])
            for received in server.received
        ]
        assert all(received.body["ignore_eos"] for received in server.received)
    assert result.exit_code == 0, result.output
    assert [point["name"] for point in decode(result.stdout)["points"]] == [
        "short_input_short_output",
        "short_input_long_output",
        "long_input_short_output",
        "long_input_long_output",
    ]
    assert asked == [(256, 16), (256, 256), (8192, 16), (8192, 256)]
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)


def test_a_grid_of_lengths_is_shown_cell_by_cell() -> None:
    with StubServer() as server:
        result = chat(server, *SMALL[:4], "--input-lengths", "10,20,30", "--output-lengths", "4")
    assert result.exit_code == 0, result.output
    assert "input=30 output=4" in result.stdout


def test_series_that_make_no_sense_are_usage_errors(tmp_path: Path) -> None:
    wrong: dict[str, tuple[object, ...]] = {
        "are different series of runs": ("--sweep", "1,2", "--patterns"),
        "needs both --input-lengths and": ("--input-lengths", "10"),
        "no list like 1,2,4": ("--sweep", "1,x"),
        "must be whole numbers": ("--sweep", "1.5"),
        "a value occurs twice": ("--sweep", "2,2"),
        "all must be above 0": ("--sweep-rate", "0"),
        "is for generated text": ("--patterns", "--workload", "bench-multiturn"),
        "--save-conversations is for one run": (
            *SMALL, "--sweep", "1,2", "--save-conversations", tmp_path / "a.json",
        ),
    }  # fmt: skip
    with StubServer() as server:
        for reason, arguments in wrong.items():
            result = chat(server, *arguments)
            assert result.exit_code == 2, result.output
            assert reason in result.stderr


def test_failures_of_a_point_are_shown_with_it() -> None:
    with StubServer(failing(Script(status=503, error="full"), requests={2})) as server:
        result = chat(server, "--conversations", 2, "--turns", 1, "--sweep", "1,2")
    assert result.exit_code == 1
    assert "concurrency=2: http: HTTP 503: full" in result.stdout


def test_a_point_that_cannot_be_run_leaves_the_results_before_it(tmp_path: Path) -> None:
    output = tmp_path / "a.json"
    # Each point asks once to warm up and twice in earnest: the fourth is the second's warm-up.
    with StubServer(failing(Script(status=503, error="full"), requests={3})) as server:
        options = ("--turns", 1, "--sweep", "1,2,4", "--warmup", 1, "--output", output)
        result = chat(server, "--conversations", 2, *options)
    assert result.exit_code == 1
    assert "concurrency=2: a warm-up request failed" in result.stderr
    points = decode(output.read_bytes())["points"]
    assert [(point["name"], point["completed"]) for point in points] == [("concurrency=1", 2)]


def test_the_table_of_requests_has_lmcaches_columns_first(tmp_path: Path) -> None:
    table = tmp_path / "a.csv"
    before_s = time.time()
    with StubServer(failing(Script(status=500, error="x"), requests={1})) as server:
        chat(server, "--conversations", 2, "--turns", 1, "--csv", table, "--allow-errors")
    with table.open() as file:
        done, failed = csv.DictReader(file)
    assert COLUMNS[:8] == (
        "prompt_tokens", "generation_tokens", "ttft", "generation_time", "user_id", "question_id",
        "launch_time", "finish_time",
    )  # fmt: skip
    assert int(done["generation_tokens"]) == 3
    assert before_s < float(done["launch_time"]) < float(done["finish_time"]) < time.time()
    total = float(done["ttft"]) + float(done["generation_time"])
    assert total == pytest.approx(float(done["latency"]), abs=1e-5)
    assert (failed["ttft"], failed["error"]) == ("", "http_5xx: HTTP 500: x")


def test_a_trace_is_replayed_with_its_lengths(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 100 * n, "input_length": 600, "output_length": 5 + n, "hash_ids": [0, n + 1]}
        for n in range(4)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    with StubServer() as server:
        result = chat(server, "--input", path, "--speed", 10, "--max-requests", 3, "--json")
        prompts = [received.contents[0].split() for received in server.received]
        asked = [received.body["max_tokens"] for received in server.received]
    assert result.exit_code == 0, result.output
    assert sorted(asked) == [5, 6, 7]
    assert [len(words) for words in prompts] == [600] * 3
    assert len({tuple(words[:512]) for words in prompts}) == 1
    assert len({tuple(words[:520]) for words in prompts}) == 3
    report = decode(result.stdout)
    assert report["workload"]["format"] == "mooncake"
    assert report["options"]["answers"] == "file"


def test_workloads_of_other_tools_run_by_their_own_parameters() -> None:
    with StubServer(Script(pieces=("a", "b"))) as server:
        sglang = chat(
            server, "--workload", "bench-multiturn", "--num-clients", 3, "--num-rounds", 2,
            "--request-length", 12, "--output-length", 2, "--request-rate", 500, "--json",
        )  # fmt: skip
        lmcache = chat(
            server, "--workload", "multi-round-qa", "--num-users", 3, "--num-rounds", 3,
            "--qps", 40, "--time", 0.3, "--shared-system-prompt", 10,
            "--user-history-prompt", 12, "--answer-len", 2, "--json",
        )  # fmt: skip
    assert sglang.exit_code == lmcache.exit_code == 0, sglang.output + lmcache.output
    first, second = decode(sglang.stdout), decode(lmcache.stdout)
    assert (first["completed"], first["options"]["order"]) == (6, "random")
    assert first["options"]["concurrency"] == 128
    assert second["workload"]["format"] == "multi-round-qa"
    assert second["completed"] == second["workload"]["turns"] > 6


def test_ctrl_c_writes_what_was_measured(tmp_path: Path) -> None:
    def second_hangs(received: Received) -> Script:
        return Script(first_s=100.0 if len(server.received) > 1 else 0.0)

    output = tmp_path / "a.json"
    command = [sys.executable, "-c", "from kvstore_bench.cli import bench; bench()", "chat"]
    with StubServer(second_hangs) as server:
        options = ["--url", server.url, *SMALL, "--output", str(output)]
        with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as process:
            deadline = time.monotonic() + 60
            while len(server.received) < 2:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            os.kill(process.pid, signal.SIGINT)
            shown, _ = process.communicate(timeout=60)
        assert process.returncode == 130
    assert "interrupted" in shown
    report = decode(output.read_bytes())
    assert (report["interrupted"], report["completed"], report["skipped"]) == (True, 1, 3)


def test_the_clients_own_error_is_measured_against_the_stubs_clock() -> None:
    found = overhead.measure(
        rounds=2, rate=100, seconds=0.4, first_ms=20, itl_ms=2, tokens=5, prompt_tokens=20
    )
    assert (found["requests"], found["failed"], len(found["rounds"])) == (80, 0, 2)
    for run in found["rounds"]:
        for name in ("ttft_error_ms", "itl_error_ms", "late_start_ms"):
            assert 0 <= run[name]["p50"] <= run[name]["p99"] <= run[name]["max"]
        # The client cannot have seen a token before it was written.
        assert run["ttft_error_ms"]["mean"] > 0
    p99 = found["ttft_error_ms"]["p99"]
    assert p99["min"] <= p99["median"] <= p99["max"]
