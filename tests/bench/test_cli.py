"""The command line: what is printed and written, and the exit status."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from kvstore.model.errors import InvalidRequest
from kvstore_bench.chat.reports.plot import plot_run
from kvstore_bench.chat.workloads.workload import load
from kvstore_bench.cli import bench
from tests.bench.stub import Script, StubServer, failing
from tests.bench.test_report import sample

SMALL = ("--conversations", "2", "--turns", "2", "--first-tokens", "10:20")
PNG = b"\x89PNG"


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(bench, [str(argument) for argument in arguments])


def chat(server: StubServer, *arguments: object) -> Result:
    return invoke("chat", "--url", server.url, *arguments)


def decode(text: str | bytes) -> dict[str, Any]:
    return msgspec.json.decode(text, type=dict[str, Any])


def test_json_on_stdout_is_all_there_is_on_stdout() -> None:
    with StubServer() as server:
        result = chat(server, *SMALL, "--json")
    assert result.exit_code == 0, result.output
    report = decode(result.stdout)
    assert report["schema_version"] == 2
    assert report["model_id"] == "stub"
    assert (report["completed"], report["failed"], report["skipped"]) == (4, 0, 0)
    assert [request["turn"] for request in report["requests"]] == [1, 1, 2, 2]
    assert report["requests"][0]["output_num_tokens"] == 3
    assert "output_text" not in report["requests"][0]
    assert report["options"]["order"] == "round-robin"


def test_the_table_names_what_was_measured() -> None:
    with StubServer() as server:
        result = chat(server, *SMALL)
    assert result.exit_code == 0, result.output
    for text in ("TTFT", "resumed", "p99", "4 completed, 0 failed", "local_compute", "preemptions"):
        assert text in result.stdout


def test_files_are_written(tmp_path: Path) -> None:
    json, spoken, plot = (tmp_path / name for name in ("a.json", "b.json", "c.png"))
    with StubServer(Script(pieces=("yes",))) as server:
        result = chat(
            server,
            *SMALL,
            *("--output", json, "--save-conversations", spoken, "--plot", plot, "--save-text"),
        )
    assert result.exit_code == 0, result.output
    assert decode(json.read_bytes())["requests"][0]["output_text"] == "yes"
    assert [item.messages[1].content for item in load(spoken)] == ["yes", "yes"]
    assert plot.read_bytes().startswith(PNG)


def test_what_is_made_can_be_held(tmp_path: Path) -> None:
    target = tmp_path / "chats.json"
    assert invoke("make-conversations", target, *SMALL, "--seed", "3").exit_code == 0
    printed = invoke("make-conversations", "-", *SMALL, "--seed", "3")
    assert printed.stdout_bytes == target.read_bytes()
    with StubServer() as server:
        replay = ("--input", target, "--answers", "file", "--conversations", "1", "--only-turns", 2)
        result = chat(server, *replay, "--json")
        contents = server.received[0].contents
    assert result.exit_code == 0, result.output
    assert contents == [message.content for message in load(target)[0].messages[:3]]


def test_failed_requests_set_the_exit_status() -> None:
    script = failing(Script(status=503, error={"message": "overloaded"}), requests={0, 4})
    with StubServer(script) as server:
        failed = chat(server, *SMALL, "--answers", "file")
        allowed = chat(server, *SMALL, "--answers", "file", "--allow-errors", "--json")
    assert failed.exit_code == 1
    assert "http: HTTP 503: overloaded" in failed.stdout
    assert "1 failed (1 http_5xx)" in failed.stdout
    assert allowed.exit_code == 0
    assert decode(allowed.stdout)["errors"] == {"http_5xx": 1}


def test_a_run_without_any_answer_is_still_reported(tmp_path: Path) -> None:
    with StubServer(Script(status=500, error="broken")) as server:
        result = chat(server, *SMALL, "--plot", tmp_path / "a.png")
    assert result.exit_code == 1
    assert "0 completed, 2 failed (2 http_5xx), 2 turns skipped" in result.stdout
    assert "not drawn, no request completed" in result.stderr


def test_what_could_not_be_run_says_what_to_do() -> None:
    unreachable = invoke("chat", "--url", "http://127.0.0.1:1", *SMALL)
    assert unreachable.exit_code == 2
    assert "Start the server" in unreachable.stderr
    with StubServer(models=("a",)) as server:
        unknown = chat(server, *SMALL, "--model", "b")
    assert unknown.exit_code == 2
    assert "one of: a" in unknown.stderr


def test_wrong_options_are_usage_errors(tmp_path: Path) -> None:
    target = tmp_path / "chats.json"
    target.write_text("[]")
    wrong = {
        "non-empty JSON list": ("--input", target),
        "is for generated text": ("--input", target, "--first-tokens", "9"),
        "1 <= low <= high": ("--first-tokens", "9:3"),
        "Invalid value for --extra-body": ("--extra-body", "[1]"),
        "needs recorded answers": ("--only-turns", "2"),
        "there is no directory": ("--output", tmp_path / "no" / "a.json"),
        "the suffix must be .png": ("--plot", tmp_path / "a.gif"),
    }
    for reason, arguments in wrong.items():
        result = invoke("chat", *arguments)
        assert result.exit_code == 2, result.output
        assert reason in result.stderr


def test_help_shows_examples() -> None:
    result = invoke("chat", "--help")
    assert "kvstore bench chat --conversations 20" in result.stdout


def test_runs_are_drawn_side_by_side(tmp_path: Path) -> None:
    runs = {"recompute": [sample(), sample(2, 0.4)], "kvstore": [sample(), sample(2, 0.05)]}
    plot_run(runs, tmp_path / "both.png", title="two runs")
    assert (tmp_path / "both.png").read_bytes().startswith(PNG)


def test_a_plot_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="nothing to plot"):
        plot_run({"": [sample(ttft_s=None)]}, tmp_path / "none.png")
