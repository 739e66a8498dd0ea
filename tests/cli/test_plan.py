"""`kvstore plan` says what to buy, and what it lacks to say it."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from kvstore.settings import parse_size
from tests.cli.run import kvstore
from tests.plan import configs
from tests.replay.traces import chat, write


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(configs.LLAMA_8B))
    return str(folder)


def test_made_up_traffic_becomes_a_list_to_buy(model: str) -> None:
    options = ("--requests", "300", "--rate", "5", "--prefill", "9000", "--prices", "3,80,2.5")
    done = kvstore("plan", "--model", model, "--tp", "4", *options)
    assert done.exit_code == 0, done.output
    assert "llama: GQA, 32 layers, KV in bfloat16: 128 KiB per token, 32 KiB on each" in done.output
    for word in ("dram ", "file tier", "drives ", "written", "break-even     1.099 GiB/s", "cost "):
        assert word in done.output


def test_fewer_drives_come_with_the_settings_to_type(model: str) -> None:
    options = ("--requests", "300", "--rate", "5", "--prices", "3,80,2.5")
    done = kvstore("plan", "--model", model, *options)
    assert done.exit_code == 0, done.output
    assert "with a write budget: 1 instead of " in done.output
    assert "% of the tokens instead of" in done.output
    (line,) = [line.strip() for line in done.output.splitlines() if "kvstore serve" in line]
    typed = kvstore(*line.split()[1:], "--print-config")
    assert typed.exit_code == 0, typed.output
    config = tomllib.loads(typed.stdout)["file"]
    found: dict[str, Any] = json.loads(kvstore("plan", "--model", model, *options, "--json").stdout)
    within = found["within_endurance"]
    assert within["drives"] == 1 < max(found["needs"]["drives"].values())
    assert within["settings"]["file.admission"] == config["admission"]
    exact = within["settings"]["file.write_per_day"]
    assert 0.99 * exact < parse_size(str(config["write_per_day"])) <= exact
    assert within["replay"]["token_hit_ratio"] < found["replay"]["token_hit_ratio"]
    assert within["needs"]["writes_per_day"] <= 7 << 40
    assert within["needs"]["cost_per_hit"] < found["needs"]["cost_per_hit"]
    lasting = kvstore("plan", "--model", model, *options, "--dwpd", "1000")
    assert "with a write budget" not in lasting.output


@pytest.mark.parametrize("rate", [20, 2000])
def test_a_plan_is_for_the_rate_asked_for(model: str, rate: int) -> None:
    options = ("--rate", str(rate), "--requests", "400", "--hits", "0.5", "--json")
    short = ("--first-tokens", "constant:600", "--prefix-tokens", "constant:600")
    found = json.loads(kvstore("plan", "--model", model, *options, *short).stdout)
    assert found["replay"]["requests"] == 400
    assert 0.97 <= 400 / found["replay"]["seconds"] / rate <= 1.03


def test_a_trace_is_planned_for(model: str, tmp_path: Path) -> None:
    trace = write(tmp_path / "t.jsonl.gz", chat(30, 4))
    arguments = ("--trace", str(trace), "--hits", "1", "--tflops", "989", "--json")
    found: dict[str, Any] = json.loads(kvstore("plan", "--model", model, *arguments).stdout)
    assert found["replay"]["token_hit_ratio"] == found["replay"]["infinite"]
    assert found["model"]["bytes_per_token"] == 128 << 10
    assert found["needs"]["break_even"] == pytest.approx(found["prefill"] * (128 << 10))
    assert 20_000 < found["prefill"] < 989e12 * 0.4 / (2 * 6.97e9)


def test_coded_blocks_need_less_of_everything(model: str, tmp_path: Path) -> None:
    trace = write(tmp_path / "t.jsonl.gz", chat(30, 4))
    arguments = ("--trace", str(trace), "--prefill", "9000", "--json")
    raw, coded = (
        json.loads(kvstore("plan", "--model", model, *arguments, "--ratio", ratio).stdout)
        for ratio in ("1", "2")
    )
    assert coded["needs"]["dram_bytes"] == pytest.approx(raw["needs"]["dram_bytes"] / 2, rel=0.01)
    assert coded["needs"]["break_even"] == pytest.approx(raw["needs"]["break_even"] / 2)


def test_files_that_keep_base_parts_alone_need_less(model: str, tmp_path: Path) -> None:
    trace = write(tmp_path / "t.jsonl.gz", chat(30, 4))
    arguments = ("--trace", str(trace), "--prefill", "9000", "--ratio", "2", "--json")
    both, own = (
        json.loads(kvstore("plan", "--model", model, *arguments, *more).stdout)["needs"]
        for more in ((), ("--file-ratio", "4"))
    )
    assert own["dram_bytes"] == both["dram_bytes"]
    for name in ("file_bytes", "writes_per_day", "break_even"):
        assert own[name] == pytest.approx(both[name] / 2, rel=0.01)


def test_windows_and_states_are_told(tmp_path: Path) -> None:
    for config, text in (
        (configs.GPT_OSS_20B, "layers with a window of 128 tokens keep no more of a prompt"),
        (configs.QWEN3_NEXT, "36 layers keep a state instead of KV, which is not stored"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        path = str(tmp_path / "config.json")
        done = kvstore("plan", "--model", path, "--requests", "200")
        assert text in done.output, done.output


@pytest.mark.parametrize(
    ("options", "code", "reason"),
    [
        ([], 2, "--model: a config.json"),
        (["--model", "{}", "--prices", "1,2"], 2, "write three numbers"),
        (["--model", "{}", "--prices", "1,2,-3"], 2, "prices are from 0"),
        (["--model", "{}", "--dwpd", "0"], 2, "must be above 0"),
        (["--model", "{}", "--dwpd", "nan"], 2, "--dwpd nan: say a finite number"),
        (["--model", "{}", "--scale", "inf"], 2, "--scale inf: say a finite number"),
        (["--model", "{}", "--policy", "fifo"], 2, "no eviction policy 'fifo'"),
        (["--model", "{}", "--tp", "3"], 1, "8 KV heads cannot be split over 3 ranks"),
        (["--model", "{}", "--trace", "{}/config.json", "--rate", "1"], 2, "use --scale"),
    ],
)
def test_what_is_wrong_is_said(model: str, options: list[str], code: int, reason: str) -> None:
    done = kvstore("plan", *(option.replace("{}", model) for option in options))
    assert (done.exit_code, reason in done.stderr) == (code, True), done.output
