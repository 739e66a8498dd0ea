"""Whatever goes wrong, a command says it in words, and as JSON where JSON was asked for."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvstore.cli import main
from kvstore.client import Client
from kvstore.model.block import Group, Namespace
from kvstore.testing.daemon import Daemon
from kvstore.testing.prompts import prompt, store_prompt
from tests.cluster.fleet import fleet

NOBODY = 54321  # a user id without a name
# Another user cannot always read this project's interpreter: what it needs is imported before.
AS_NOBODY = f"""
import importlib, os, sys
from kvstore.cli.main import _COMMANDS, main
for place, _ in _COMMANDS.values():
    if place.startswith("kvstore.cli"):
        importlib.import_module(place.partition(":")[0])
os.setgid({NOBODY})
os.setuid({NOBODY})
main(sys.argv[1:], prog_name="kvstore")
"""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def kvstore(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments, prog_name="kvstore")


def as_nobody(*arguments: str) -> subprocess.CompletedProcess[str]:
    gone = ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME", "KVSTORE_TARGET", "XDG_RUNTIME_DIR")
    environ = {name: value for name, value in os.environ.items() if name not in gone}
    return subprocess.run(
        [sys.executable, "-c", AS_NOBODY, *arguments],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    "command",
    [
        "clear --all --yes",
        "config get",
        "config set dram.capacity=1GiB",
        "explain --last",
        "flush",
        "get --tokens 1,2",
        "hint end chat-1",
        "namespaces",
        "ping",
        "scan",
        "selftest",
        "stats",
        "status",
        "top",
    ],
)
def test_no_daemon_is_said_in_json_too(tmp_path: Path, command: str) -> None:
    target = f"unix:{tmp_path}/none.sock"
    done = kvstore(*command.split(), "--json", "--target", target)
    assert done.exit_code == 3
    told = json.loads(done.stdout)
    assert told["exit_code"] == 3
    assert target in told["error"]
    assert "kvstore serve" in told["error"]
    assert done.stderr.startswith("Error: ")


@pytest.mark.parametrize(
    ("command", "exit_code", "word"),
    [
        ("verify /nonexistent --json", 2, "/nonexistent"),
        ("inspect {} --json", 2, "is empty"),
        ("plan --json --rate 20 --model /nonexistent", 2, "/nonexistent"),
        ("replay --json /nonexistent", 2, "/nonexistent"),
        ("statu --json", 2, "status"),
        ("config gte --json", 2, "get"),
    ],
)
def test_what_is_wrong_is_said_in_json_too(
    tmp_path: Path, command: str, exit_code: int, word: str
) -> None:
    done = kvstore(*command.format(tmp_path).split())
    assert done.exit_code == exit_code
    told = json.loads(done.stdout)
    assert (told["exit_code"], word in told["error"]) == (exit_code, True)


def test_without_json_nothing_is_on_the_standard_output(tmp_path: Path) -> None:
    done = kvstore("stats", "--target", f"unix:{tmp_path}/none.sock")
    assert (done.exit_code, done.stdout) == (3, "")


@pytest.mark.parametrize("command", ["verify", "inspect", "gc"])
def test_a_device_is_no_directory(command: str) -> None:
    done = kvstore(command, "/dev/null")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == "Error: /dev/null: Not a directory\n"


def test_a_full_disk_is_said_in_one_line() -> None:
    with Daemon() as daemon:
        daemon.start()
        target = f"--target={daemon.target}"
        CliRunner().invoke(main, ["put", target, "--tokens", "1,2"], input="bytes")
        done = kvstore("get", target, "--tokens", "1,2", "-o", "/dev/full")
        daemon.stop()
    assert (done.exit_code, done.stderr) == (1, "Error: No space left on device\n")


def test_a_standard_output_that_is_full_is_said_in_one_line() -> None:
    with Daemon(file=False) as daemon:
        command = daemon.start().command("status", "--json", "--target", daemon.target)
        with open("/dev/full", "wb") as full:
            done = subprocess.run(
                command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
            )
    assert (done.returncode, done.stderr) == (1, "Error: No space left on device\n")


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_that_cannot_be_printed_is_said_in_one_line(option: str) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "kvstore.cli", option],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, "Error: No space left on device\n")


@pytest.mark.parametrize("option", ["ping -c 2 -i nan", "ping -w nan", "top --interval nan"])
def test_no_number_is_no_interval(option: str) -> None:
    done = kvstore(*option.split(), "--target", "127.0.0.1:1")
    assert (done.exit_code, "say a finite number" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    "command", ["top --json --interval 0.2", "events watch", "ping -c 1000 -i 0.1"]
)
def test_ctrl_c_ends_what_goes_on_without_a_word(command: str) -> None:
    with Daemon("events.publish=tcp://127.0.0.1:0", file=False) as daemon:
        target = daemon.start().target
        with Client(target) as client:
            space = Namespace(16, (Group("g", 4096),), (("model", "m"),), name="m")
            client.register(space)
            store_prompt(client, space, prompt(1, 64))
        going = subprocess.Popen(
            daemon.command(*command.split(), "--target", target),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert going.stdout is not None
        assert going.stdout.readline()
        going.send_signal(signal.SIGINT)
        said, wrong = going.communicate(timeout=30)
    assert (going.returncode, wrong) == (0, "")
    assert "answered; least" in said or not command.startswith("ping")


@needs_root
@pytest.mark.parametrize("command", ["ping", "doctor", "serve --print-config"])
def test_a_user_without_a_name_and_a_home(command: str) -> None:
    done = as_nobody(*command.split())
    assert "Traceback" not in done.stderr
    expected = {"ping": (1, 3), "doctor": (1,)}  # 1: root's daemon may run here
    assert done.returncode in expected.get(command, (0,)), done.stderr


@needs_root
def test_a_daemon_of_another_user_is_refused_once_and_in_one_line() -> None:
    with Daemon() as daemon:
        daemon.start()
        done = as_nobody("ping", f"--target={daemon.target}")
        daemon.stop()
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("Error: permission denied: ")


@needs_root
def test_doctor_looks_at_a_directory_it_may_not_see(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    settings = (f"file.path={closed}/blocks", f"server.socket={closed}/k.sock")
    done = as_nobody("doctor", "--json", *(f"--set={each}" for each in settings))
    assert done.returncode == 1, done.stderr
    findings = {each["about"]: each for each in json.loads(done.stdout)["findings"]}
    assert findings["directory"]["level"] == "wrong"
    assert "cannot be written by user 54321" in findings["directory"]["found"]


@pytest.mark.parametrize(
    ("command", "word"),
    [("page", "has no page"), ("events register http://127.0.0.1:1 --instance 7", "set ev")],
)
def test_what_a_daemon_does_not_have_is_not_taken_for_no_daemon(command: str, word: str) -> None:
    with Daemon("server.page=false", file=False) as daemon:
        daemon.start()
        done = kvstore(*command.split(), "--target", daemon.target)
        daemon.stop()
    assert (done.exit_code, word in done.stderr) == (1, True), done.stderr
    assert "kvstore serve\n" not in done.stderr


def test_an_indexer_that_is_down_is_not_taken_for_no_daemon() -> None:
    register = ("events", "register", "http://127.0.0.1:1", "--instance", "7")
    with Daemon("events.publish=tcp://127.0.0.1:0", file=False) as daemon:
        target = daemon.start().target
        done = kvstore(*register, "--model", "m", "--block-size", "16", "--target", target)
    assert done.exit_code == 1
    assert done.stderr.startswith("Error: no indexer answers at http://127.0.0.1:1: ")
    assert "kvstore serve" not in done.stderr


def test_a_clear_that_another_member_does_not_confirm_is_done_here() -> None:
    with fleet(2, file=False) as (one, other):
        os.kill(other.pid, signal.SIGSTOP)
        try:
            done = kvstore("clear", "--all", "--yes", "--json", "--target", one.target)
        finally:
            os.kill(other.pid, signal.SIGCONT)
    told = json.loads(done.stdout)
    assert (done.exit_code, told["exit_code"]) == (1, 1)
    assert told["error"].startswith(
        "this daemon has deleted its own blocks; deleted on 0 of 1 other daemons, not on "
    )
    assert "Is a daemon running there?" not in done.stderr
