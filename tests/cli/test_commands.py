"""The command line, as a user meets it."""

import json
import re
import socket
import tomllib
from contextlib import chdir
from pathlib import Path

import pytest
from click import Context

from kvstore import Client
from kvstore.cli import main
from kvstore.cli.inspect import readable
from kvstore.settings import load_settings
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import sample_keys, sample_namespace, sample_records
from tests.cli.run import kvstore

COMMANDS = [name for name in main.list_commands(Context(main)) if name != "bench"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_with_an_example(command: str) -> None:
    done = kvstore(command, "--help")
    assert done.exit_code == 0
    assert f"kvstore {command}" in done.output.split("Example", 1)[1]


def test_the_group_lists_its_commands() -> None:
    done = kvstore("--help")
    assert done.exit_code == 0
    for command in (*COMMANDS, "bench"):
        assert f"  {command} " in done.output


WITHOUT_ANSWER = {"serve", "completion", "man"}  # a log, a script and files


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in WITHOUT_ANSWER])
def test_every_command_that_answers_has_json(command: str) -> None:
    assert "--json" in kvstore(command, "--help").output


def test_print_config_loads_back(tmp_path: Path) -> None:
    done = kvstore("serve", "--set", "dram.capacity=3GiB", "--print-config")
    assert tomllib.loads(done.output)["dram"]["capacity"] == "3GiB"
    file = tmp_path / "kvstore.toml"
    file.write_text(done.output)
    assert load_settings(file) == load_settings(None, ["dram.capacity=3GiB"])
    assert kvstore("serve", "--config", str(file), "--print-config").output == done.output


def test_a_misspelt_setting_names_the_right_one() -> None:
    done = kvstore("serve", "--set", "dram.capcity=3GiB")
    assert done.exit_code == 2
    assert "did you mean dram.capacity?" in done.output


def test_without_a_daemon_the_answer_says_what_to_do(tmp_path: Path) -> None:
    done = kvstore("stats", "--target", f"unix:{tmp_path}/none.sock")
    assert done.exit_code == 3
    assert "kvstore serve" in done.output


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("127.0.0.1:1", "connection refused"),
        ("unix:{}/none.sock", "No such file or directory"),
        ("unix:{}/dead.sock", "connection refused"),
    ],
)
def test_no_daemon_is_said_in_one_sentence_with_the_address_once(
    tmp_path: Path, target: str, why: str
) -> None:
    with socket.socket(socket.AF_UNIX) as dead, chdir(tmp_path):
        dead.bind("dead.sock")
    target = target.format(tmp_path)
    done = kvstore("stats", "--target", target)
    assert done.exit_code == 3
    assert done.output.splitlines()[0] == f"Error: no kvstore daemon answers at {target}: {why}"


@pytest.mark.parametrize("target", ["nowhere", "127.0.0.1"])
def test_a_target_that_is_none_is_a_usage_error(target: str) -> None:
    done = kvstore("stats", "--target", target)
    assert done.exit_code == 2
    assert "host:port" in done.output


def test_stats_are_readable_by_people_and_programs(daemon: Daemon) -> None:
    done = kvstore("stats", "--target", str(daemon.socket))
    assert done.exit_code == 0
    assert "MiB" in done.output
    as_json = kvstore("stats", "--target", daemon.target, "--json")
    assert json.loads(as_json.output)["dram"]["capacity_bytes"] > 0


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("totals.tier_bytes.dram/write", 41_943_040.0, "40 MiB"),
        ("totals.lookup_blocks", 41_943_040.0, "41,943,040"),
        ("uptime_s", 123_456.7, "1.43 days"),
        ("totals.rpc_seconds.Put.sum", 0.000_067_9, "0.0679 ms"),
        ("totals.rpc_seconds.Put.count", 12.0, "12"),
        ("pid", 3_456_789, "3456789"),
        ("dram.growing", False, "False"),
        ("file.ratio", 0.25, "0.25"),
    ],
)
def test_numbers_of_stats_are_said_as_what_they_are(name: str, value: float, text: str) -> None:
    assert readable(name, value) == text


def test_no_number_of_a_daemon_is_printed_with_an_exponent() -> None:
    with Daemon() as daemon:
        with Client(daemon.start().target) as client:
            namespace_id, keys = client.register(sample_namespace("many")), sample_keys("many", 600)
            client.put(namespace_id, keys, sample_records(keys))
        output = kvstore("stats", "--target", daemon.target).output
    assert re.search(r"^totals\.tier_bytes\.dram/write +1\d\.\d+ MiB$", output, re.M)
    assert not re.search(r"\d[eE][+-]\d", output)


def test_blocks_can_be_scanned_flushed_deleted_and_cleared(daemon: Daemon) -> None:
    keys = sample_keys("cli", 4)
    with Client(daemon.target) as client:
        namespace_id = client.register(sample_namespace("cli"))
        client.put(namespace_id, keys, sample_records(keys))
    at = ("--target", daemon.target)
    only = ("--namespace", namespace_id.hex())

    done = kvstore("flush", *at)
    assert (done.exit_code, done.output) == (0, "durable\n")
    done = kvstore("scan", *at, *only)
    in_order = sorted(keys, key=lambda key: (key[-1], key))
    assert [line.split()[0] for line in done.output.splitlines()] == [k.hex() for k in in_order]
    assert all(line.endswith("DF") for line in done.output.splitlines())
    done = kvstore("scan", *at, *only, "--json", "--limit", "1")
    assert json.loads(done.output)["key"] == in_order[0].hex()
    done = kvstore("delete", *at, *only, keys[0].hex(), "00" * 32)
    assert done.output == "deleted 1 of 2 blocks\n"
    done = kvstore("clear", *at, *only, "--json")
    assert json.loads(done.output) == {"deleted": 3}
    assert kvstore("scan", *at, *only).stdout == ""


def test_flush_without_a_file_tier_fails() -> None:
    with Daemon(file=False) as daemon:
        daemon.start()
        done = kvstore("flush", "--target", daemon.target)
        assert done.exit_code == 1
        assert "no file tier" in done.output


@pytest.mark.parametrize(
    "arguments",
    [
        ("clear",),
        ("clear", "--all", "--namespace", "00" * 32),
        ("delete", "--namespace", "00" * 32),
        ("delete", "--namespace", "00" * 32, "short"),
        ("scan", "--limit", "0"),
        ("flush", "--wait", "-1"),
    ],
)
def test_wrong_usage_is_refused_before_anything_is_asked(arguments: tuple[str, ...]) -> None:
    assert kvstore(*arguments, "--target", "127.0.0.1:1").exit_code == 2


def test_missing_benchmarks_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "kvstore_bench.cli", None)
    done = kvstore("bench", "latency", "--anything", "1")
    assert done.exit_code == 1
    assert "kvstore-tiers[bench]" in done.output


def test_the_version_is_that_of_the_distribution() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["project"]["version"] in kvstore("--version").output
