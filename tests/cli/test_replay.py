"""`kvstore replay` prints, writes and refuses what it says."""

from __future__ import annotations

import csv
import json
import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvstore.cli import main
from tests.plan.configs import LLAMA_8B
from tests.replay.traces import chat, write


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write(tmp_path / "chat.jsonl.gz", chat(40, 4))


def run(*args: object) -> Result:
    return CliRunner().invoke(main, ["replay", *map(str, args)])


def test_it_prints_a_table_beside_what_nobody_can_beat(trace: Path) -> None:
    done = run(trace, "--dram", "5%,64MiB", "--file", "50%", "--compare", "lru,hz")
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[0].startswith("chat.jsonl.gz (mooncake): 160 requests in ")
    assert "321 blocks of 512 tokens, 20.06 GiB of KV" in lines[1]
    assert "an infinite cache hits" in lines[2]
    assert [line.split()[4] for line in lines[-4:]] == ["lru", "hz", "lru", "hz"]


def test_json_has_one_object_a_replay(trace: Path) -> None:
    done = run(trace, "--dram", "100%", "--file", "0,100%", "--policy", "hz", "--json")
    assert done.exit_code == 0, done.output
    one, two = map(json.loads, done.stdout.splitlines())
    assert one["token_hit_ratio"] == one["infinite"] == one["optimum"] == two["token_hit_ratio"]
    assert (one["writes_per_unique"], two["writes_per_unique"]) == (0.0, 1.0)
    assert one["dram_policy"] == "hz"
    assert two["file_written_bytes"] == 321 * 512 * (128 << 10)
    assert one["format"] == "mooncake"


def test_blocks_that_are_stored_smaller_are_more(trace: Path) -> None:
    found = []
    for options in (("--dram", "1%"), ("--dram", "1%", "--ratio", "3"), ("--dram", "3%")):
        done = run(trace, *options, "--policy", "lru", "--json")
        assert done.exit_code == 0, done.output
        found.append(json.loads(done.stdout))
    small, coded, large = (each["token_hit_ratio"] for each in found)
    assert small < coded == large
    assert "--ratio" in run(trace, "--dram", "1%", "--ratio", "0.5").output


def test_each_tier_may_have_a_ratio_of_its_own(trace: Path) -> None:
    found = []
    for options in (
        ("--dram", "1%", "--file", "5%", "--ratio", "2"),
        ("--dram", "1%", "--file", "5%", "--ratio", "2", "--file-ratio", "4"),
        ("--dram", "2%", "--file", "20%"),
    ):
        done = run(trace, *options, "--policy", "lru", "--json")
        assert done.exit_code == 0, done.output
        found.append(json.loads(done.stdout))
    both, own, large = found
    assert both["file_hit_ratio"] < own["file_hit_ratio"] == large["file_hit_ratio"]
    assert own["dram_hit_ratio"] == large["dram_hit_ratio"]
    assert own["file_written_bytes"] == large["file_written_bytes"] / 4
    assert own["dram_written_bytes"] == large["dram_written_bytes"] / 2
    assert own["file_record_nbytes"] == own["record_nbytes"] / 2
    assert "--file-ratio" in run(trace, "--dram", "1%", "--file-ratio", "0.5").output


def test_it_writes_a_table_and_a_picture(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    table, picture = tmp_path / "hits.csv", tmp_path / "hits.png"
    options = ("--dram", "2%,10%", "--compare", "lru,hz", "--csv", table, "--plot", picture)
    done = run(trace, *options)
    assert done.exit_code == 0, done.output
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["dram_policy"] for row in rows] == ["lru", "hz", "lru", "hz"]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("option", ["--plot", "--csv"])
def test_what_cannot_be_written_is_said_before_the_replay(
    trace: Path, tmp_path: Path, option: str
) -> None:
    pytest.importorskip("matplotlib")
    done = run(trace, option, tmp_path / "no" / "hits.png")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "there is no directory" in done.stderr
    done = run(trace, option, tmp_path)
    assert (done.exit_code, done.stdout) == (1, "")


def test_a_picture_of_another_kind_is_refused_before_the_replay(
    trace: Path, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    done = run(trace, "--plot", tmp_path / "hits.doc")
    assert (done.exit_code, done.stdout) == (1, "")
    assert ".png, .svg, .pdf" in done.stderr
    assert not (tmp_path / "hits.doc").exists()


def test_a_missing_matplotlib_is_said_before_the_replay(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = run(trace, "--plot", tmp_path / "hits.png")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "kvstore-tiers[bench]" in done.stderr


def test_the_axes_of_the_picture_are_sizes_and_per_cent(trace: Path, tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    picture = tmp_path / "hits.svg"
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # letters, not outlines
        done = run(trace, "--dram", "1GiB,2GiB,4GiB", "--plot", picture)
    assert done.exit_code == 0, done.output
    text = picture.read_text()
    for label in ("1 GiB", "2 GiB", "4 GiB"):
        assert f">{label}<" in text
    assert re.search(r">\d+ %<", text)
    assert "10^" not in text
    assert "mathdefault" not in text


def test_a_model_says_what_a_token_takes_and_what_hits_save(trace: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA_8B))
    done = run(trace, "--dram", "100%", "--model", config, "--kv-dtype", "fp8", "--json")
    found = json.loads(done.stdout)
    assert found["record_nbytes"] == 512 * (64 << 10)
    hit = found["dram_hits"] * 512
    assert found["saved_flops"] > 2 * 6.97e9 * hit
    assert found["saved_flops"] == pytest.approx(2 * 6.97e9 * hit, rel=0.1)
    both = run(trace, "--model", config, "--kv-bytes-per-token", "1KiB")
    assert (both.exit_code, "leave out --kv-bytes-per-token" in both.stderr) == (2, True)


def test_a_write_budget_and_admissions_spare_flash(trace: Path) -> None:
    def written(*options: str) -> float:
        done = run(trace, "--dram", "20%", "--file", "200%", "--json", *options)
        assert done.exit_code == 0, done.output
        return float(json.loads(done.stdout)["writes_per_unique"])

    assert written() == 1.0
    assert written("--admission", "second_use") < 0.8
    assert 0.1 < written("--write-budget", "5%") < 0.8
    assert written("--write-budget", "1MiB") < 0.1


def test_hints_are_given_to_a_share_of_the_sessions(trace: Path) -> None:
    done = run(trace, "--hints", "end:0.5", "--json")
    assert 5 < json.loads(done.stdout)["hinted_sessions"] < 35


@pytest.mark.parametrize(
    ("options", "code", "reason"),
    [
        (["--hints", "end:2"], 2, "write end:SHARE"),
        (["--compare", "lru", "--policy", "hz"], 2, "leave out --policy"),
        (["--policy", "fifo"], 2, "no eviction policy 'fifo'; choose one of lru, hz"),
        (["--dram", "many"], 2, "'many' is not a size"),
        (["--dram", "x%"], 2, "--dram x%: write a percentage like 5%"),
        (["--dram", "0"], 1, "dram has no room for a single block"),
        (["--kv-bytes-per-token", "1GiB"], 2, "a block of 512 tokens would have"),
        (["--format", "weka"], 1, "line 1"),
        (["--write-budget", "x%"], 2, "--write-budget x%: write a percentage"),
        (["--model", "/"], 1, "/config.json: cannot be read"),
        (["--csv", "/nowhere/hits.csv"], 1, "/nowhere/hits.csv: cannot be written"),
    ],
)
def test_what_is_wrong_is_said(trace: Path, options: list[str], code: int, reason: str) -> None:
    done = run(trace, *options)
    assert (done.exit_code, reason in done.stderr) == (code, True), done.output


def test_over_many_hosts_it_says_what_each_source_gave(trace: Path, tmp_path: Path) -> None:
    table = tmp_path / "hosts.csv"
    options = ("--hosts", 6, "--dram", "20%", "--router", "random,affinity", "--csv", table)
    done = run(trace, *options, "--view-age", 0, "--json")
    assert done.exit_code == 0, done.output
    random, affinity = map(json.loads, done.stdout.splitlines())
    assert random["hosts"] == 6
    assert (random["router"], affinity["router"]) == ("random", "affinity")
    assert affinity["own_tokens"] > random["own_tokens"]
    assert random["peer_tokens"] > 0
    for each in (random, affinity):
        hit = each["own_tokens"] + each["peer_tokens"]
        assert hit + each["computed_tokens"] == each["tokens"]
        assert each["hit_tokens"] == pytest.approx(hit / each["one_host_tokens"])
    with table.open(newline="") as file:
        assert [row["router"] for row in csv.DictReader(file)] == ["random", "affinity"]
    lines = run(trace, *options).output.splitlines()
    assert lines[-3].split()[:2] == ["hosts", "router"]
    assert [line.split()[1] for line in lines[-2:]] == ["random", "affinity"]
    for wrong, word in (
        (("--router", "kv"), "--hosts"),
        (("--hosts", 2, "--router", "best"), "random, round-robin, affinity, kv"),
        (("--hosts", 2, "--restart-at", 0.5), "--restart-at is for one host"),
        (("--hosts", 2, "--load-bound", 2), "--router kv"),
        (("--hosts", 5000), "1000"),
    ):
        refused = run(trace, *wrong)
        assert refused.exit_code == 2
        assert word in refused.output


def test_models_of_different_cost_share_a_node(tmp_path: Path) -> None:
    rows = chat(40, 4)
    dear, cheap = tmp_path / "dear.jsonl", tmp_path / "cheap.jsonl"
    for path in (dear, cheap):
        write(path, rows)
    costs = ("--mix", f"{dear}=2", "--mix", f"{cheap}=0.1")
    done = run(dear, *costs, "--dram", "5%", "--policy", "hz", "--json")
    assert done.exit_code == 0, done.output
    unaware, aware = map(json.loads, done.stdout.splitlines())
    assert (unaware["cost_aware"], aware["cost_aware"]) == (False, True)
    assert aware["unique_blocks"] == 2 * 321
    models = {each["model"]: each for each in aware["models"]}
    assert models.keys() == {"dear.jsonl", "cheap.jsonl"}
    saved = sum(each["hit_tokens"] * each["s_per_1000"] / 1000 for each in aware["models"])
    assert aware["saved_s"] == pytest.approx(saved)
    assert aware["saved_s_vs_unaware"] == pytest.approx(aware["saved_s"] / unaware["saved_s"])
    text = run(dear, *costs, "--dram", "5%", "--policy", "hz").output
    assert "s of prefill saved" in text
    assert aware["dram_follows"] in ("hz", "lru")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--mix", "x"], "write MODEL=SECONDS or TRACE=SECONDS"),
        (["--mix", "x=-1"], "write MODEL=SECONDS or TRACE=SECONDS"),
        (["--mix", "x=nan"], "write MODEL=SECONDS or TRACE=SECONDS"),
        (["--mix", "x=1"], "no cost is said of chat.jsonl.gz"),
        (["--mix", "x=1", "--mix", "x=2"], "x has a cost already"),
        (["--mix", "x=1", "--hosts", "2"], "leave out --hosts"),
    ],
)
def test_a_mix_that_makes_no_sense_is_refused(trace: Path, options: list[str], said: str) -> None:
    done = run(trace, *options)
    assert done.exit_code != 0
    assert said in done.output
