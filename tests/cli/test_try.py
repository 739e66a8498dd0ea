"""`kvstore ping`, `put`, `get --tokens`, `selftest` and `clear --all`: a daemon tried by hand."""

import json
import os
import pty
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

import kvstore as package
from kvstore import Client
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import sample_keys, sample_namespace, sample_records
from tests.cli.run import kvstore


def test_ping_says_who_answers_and_how_soon(daemon: Daemon) -> None:
    done = kvstore("ping", "--target", daemon.target)
    assert done.exit_code == 0
    assert re.fullmatch(
        rf"PONG from kvstore {package.__version__} at {daemon.target} in \S+ m?s\n", done.output
    )
    done = kvstore("ping", "--target", daemon.target, "-c", "3", "-i", "0")
    assert done.output.count("PONG") == 3
    assert "3 of 3 answered; least" in done.output
    told = json.loads(
        kvstore("ping", "--target", daemon.target, "-c", "3", "-i", "0", "--json").output
    )
    assert (told["version"], told["asked"], told["answered"]) == (package.__version__, 3, 3)
    assert 0 < min(told["times_s"]) <= told["round_trip_s"] <= max(told["times_s"])


def test_ping_waits_for_a_daemon_that_is_starting(tmp_path: Path) -> None:
    socket = f"unix:{tmp_path}/k.sock"
    began = time.monotonic()
    assert kvstore("ping", "--target", socket, "--wait", "0.3").exit_code == 3
    assert time.monotonic() - began >= 0.3
    with Daemon("dram.capacity=64MiB", "dram.extent=64MiB") as late:
        command = late.command("ping", "--target", late.target, "--wait", "60")
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as waiting:
            time.sleep(0.5)
            assert waiting.poll() is None
            late.start()
            told, _ = waiting.communicate(timeout=60)
        assert waiting.returncode == 0
        assert told.startswith("PONG")


def test_ping_without_a_daemon_and_past_one_that_ended(tmp_path: Path) -> None:
    done = kvstore("ping", "--target", f"unix:{tmp_path}/none.sock", "-c", "2", "-i", "0")
    assert done.exit_code == 3
    with Daemon(file=False) as daemon:
        daemon.start()
        command = daemon.command("ping", "--target", daemon.target, "-c", "4", "-i", "0.3")
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as asking:
            assert asking.stdout is not None
            assert asking.stdout.readline().startswith("PONG")
            daemon.kill()
            rest = asking.stdout.read()
        assert asking.returncode == 1
    assert "no answer: " in rest
    assert "of 4 answered" in rest


def test_what_is_put_comes_back_by_key_and_by_tokens(daemon: Daemon, tmp_path: Path) -> None:
    at = ("--target", daemon.target)
    file = tmp_path / "block.bin"
    file.write_bytes(os.urandom(70_001))
    done = kvstore("put", *at, "--tokens", "7,8,9", str(file))
    assert done.exit_code == 0, done.output
    assert done.output.startswith("stored 68.36 KiB as block ")
    told = json.loads(kvstore("put", *at, "--tokens", "7,8,9", "--json", str(file)).output)
    by_key = kvstore("get", *at, "--namespace", told["namespace"], told["key"])
    assert by_key.stdout_bytes == file.read_bytes()
    by_tokens = kvstore("get", *at, "--tokens", "7,8,9")
    assert (by_tokens.exit_code, by_tokens.stdout_bytes) == (0, file.read_bytes())
    named = kvstore("get", *at, "--tokens", "7,8,9", "--namespace", told["namespace"])
    assert named.stdout_bytes == file.read_bytes()


def test_a_file_that_cannot_be_written_is_said_before_anybody_is_asked(tmp_path: Path) -> None:
    done = kvstore("get", "--tokens", "1", "-o", f"{tmp_path}/no/x", "--target", "127.0.0.1:1")
    assert done.exit_code == 1
    assert "there is no directory" in done.output


def test_put_reads_a_pipe_and_waits_for_the_disk(daemon: Daemon) -> None:
    at = ("--target", daemon.target)
    done = kvstore("put", *at, "--tokens", "1,2", "--durable", stdin="hello\n")
    assert done.exit_code == 0, done.output
    assert done.output.endswith("durable\n")
    assert kvstore("get", *at, "--tokens", "1,2").output == "hello\n"


def test_put_is_not_durable_without_a_file_tier() -> None:
    with Daemon(file=False) as daemon:
        at = ("--target", daemon.start().target)
        assert kvstore("put", *at, "--tokens", "1", stdin="x").exit_code == 0
        done = kvstore("put", *at, "--tokens", "2", "--durable", stdin="x")
        assert done.exit_code == 1
        assert "not durable" in done.output


def test_other_bytes_under_the_same_tokens_are_refused_and_said(daemon: Daemon) -> None:
    at = ("--target", daemon.target)
    assert kvstore("put", *at, "--tokens", "4", stdin="one").exit_code == 0
    assert kvstore("put", *at, "--tokens", "4", stdin="one").exit_code == 0
    done = kvstore("put", *at, "--tokens", "4", stdin="two")
    assert done.exit_code == 1
    command = re.search(r"kvstore (delete .*)\n", done.output)
    assert command is not None
    assert kvstore(*command[1].split(), *at).output == "deleted 1 of 1 blocks\n"
    assert kvstore("put", *at, "--tokens", "4", stdin="two").exit_code == 0
    assert kvstore("put", *at, "--tokens", "4", stdin="three").exit_code == 0
    done = kvstore("get", *at, "--tokens", "4")
    assert done.exit_code == 2
    assert "2 sizes are stored under these tokens: say --namespace" in done.output


@pytest.mark.parametrize(
    ("arguments", "stdin", "code", "word"),
    [
        (("put", "--tokens", "1,a"), "x", 2, "1,15043,3186"),
        (("put", "--tokens", "-1"), "x", 2, "2**32-1"),
        (("put", "--tokens", "1"), "", 1, "no bytes"),
        (("get", "--tokens", "9,9,9,9"), None, 1, "stored nothing"),
        (("get", "--tokens", "1", "00" * 32), None, 2, "either KEY or --tokens"),
        (("get",), None, 2, "either KEY or --tokens"),
    ],
)
def test_what_cannot_be_put_or_got(
    daemon: Daemon, arguments: tuple[str, ...], stdin: str | None, code: int, word: str
) -> None:
    done = kvstore(*arguments, "--target", daemon.target, stdin=stdin)
    assert done.exit_code == code
    assert word in done.output


def test_selftest_tries_everything_and_leaves_nothing() -> None:
    with Daemon(tcp=True) as daemon:
        at = ("--target", daemon.start().target)
        done = kvstore("selftest", *at)
        assert done.exit_code == 0, done.output
        steps = [line.split()[:2] for line in done.output.splitlines()[:-1]]
        tried = ["answers", "put", "get", "flush", "disk", "memory", "clean"]
        assert steps == [["ok", about] for about in tried]
        scanned = kvstore("scan", *at)
        assert (scanned.stdout, scanned.stderr) == ("", "no block is stored\n")
        over_tcp = json.loads(kvstore("selftest", "--target", daemon.address, "--json").output)
        assert over_tcp["works"]
        skipped = [each["about"] for each in over_tcp["steps"] if each["result"] == "skipped"]
        assert skipped == ["memory"]


def test_what_selftest_leaves_known_is_not_taken_for_an_engine() -> None:
    with Daemon(file=False) as daemon:
        at = ("--target", daemon.start().target)
        assert "no namespace is known yet" in kvstore("namespaces", *at).stderr
        assert kvstore("namespaces", *at, "--json").output == ""
        assert kvstore("selftest", *at).exit_code == 0
        told = json.loads(kvstore("put", *at, "--tokens", "5", "--json", stdin="hello").output)
        assert kvstore("get", *at, told["key"]).stdout_bytes == b"hello"


def test_selftest_without_a_file_tier_skips_the_disk_and_without_a_daemon_fails() -> None:
    with Daemon(file=False) as daemon:
        at = ("--target", daemon.start().target)
        done = kvstore("selftest", *at)
        assert done.exit_code == 0, done.output
        assert "skipped  flush" in done.output
        daemon.kill()
        assert kvstore("selftest", *at).exit_code == 3


def test_selftest_says_what_does_not_work() -> None:
    with Daemon("dram.capacity=1MiB", "dram.extent=1MiB", file=False) as daemon:
        done = kvstore("selftest", "--target", daemon.start().target)
        assert done.exit_code == 1
        assert "failed   put" in done.output
        assert "clean up" in done.output
        assert done.output.endswith("something does not work: see above\n")


def stored(daemon: Daemon) -> int:
    with Client(daemon.target) as client:
        namespace_id, keys = client.register(sample_namespace("all")), sample_keys("all", 3)
        client.put(namespace_id, keys, sample_records(keys))
        return int(client.admin.stats()["blocks"])


def test_clear_all_refuses_where_nobody_can_be_asked() -> None:
    with Daemon(file=False) as daemon:
        assert stored(daemon.start()) == 3
        done = kvstore("clear", "--all", "--target", daemon.target)
        assert done.exit_code == 2
        assert "kvstore clear --all --yes" in done.output
        done = kvstore("clear", "--all", "--yes", "--target", daemon.target)
        assert (done.exit_code, done.output) == (0, "deleted 3 blocks\n")


@pytest.mark.parametrize(("answer", "left"), [("n", 3), ("y", 0)])
def test_clear_all_asks_on_a_terminal(answer: str, left: int) -> None:
    with Daemon(file=False) as daemon:
        assert stored(daemon.start()) == 3
        mine, theirs = pty.openpty()
        command = daemon.command("clear", "--all", "--target", daemon.target)
        with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs) as asking:
            os.close(theirs)
            asked = b""
            try:
                while b"[y/N]" not in asked:
                    asked += os.read(mine, 1000)
                os.write(mine, f"{answer}\n".encode())
                assert asking.wait(20) == (0 if answer == "y" else 1)
            finally:
                asking.send_signal(signal.SIGKILL)
                os.close(mine)
        assert b"Delete all 3 blocks of" in asked
        with Client(daemon.target) as client:
            assert client.admin.stats()["blocks"] == left
