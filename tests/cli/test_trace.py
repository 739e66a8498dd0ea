"""`kvstore trace` writes what `kvstore replay` reads, and what says nothing of its contents."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import pty
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from kvstore.cli import main
from kvstore.client import AsyncClient, Client
from kvstore.model.block import BlockKey, NamespaceId
from kvstore.server.recorder import LISTENERS_MAX
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import RECORD_NBYTES, sample_keys, sample_namespace, sample_records
from tests.cli.run import kvstore

WAIT_S = 20.0


def rows_of(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    return [json.loads(line) for line in text.splitlines()]


def test_made_up_traces_are_the_same_for_a_seed_and_are_replayed(tmp_path: Path) -> None:
    one, two = tmp_path / "one.jsonl.gz", tmp_path / "two.jsonl.gz"
    for path in (one, two):
        done = kvstore("trace", "synth", str(path), "--requests", "300", "--seed", "7", "--json")
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["requests"] == 300
    assert one.read_bytes() == two.read_bytes()
    done = kvstore("replay", str(one), "--dram", "100%", "--json")
    found = json.loads(done.stdout)
    assert (found["requests"], found["format"]) == (300, "mooncake")
    assert found["token_hit_ratio"] == found["infinite"] > 0.2


def test_the_oldest_click_that_is_supported_draws_the_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """click 8.1's progressbar has no `hidden`."""
    newest = click.progressbar

    def oldest(**options: Any) -> Any:
        assert "hidden" not in options
        return newest(**options)

    monkeypatch.setattr(click, "progressbar", oldest)
    done = kvstore("trace", "synth", str(tmp_path / "a.jsonl"), "--requests", "10")
    assert done.exit_code == 0, done.output
    with Daemon() as daemon:
        daemon.start()
        for options in ((), ("--json",)):
            done = kvstore("verify", str(daemon.directory / "file"), *options)
            assert done.exit_code == 0, done.output


def test_a_mix_is_made_up_like_any_other_kind(tmp_path: Path) -> None:
    path = tmp_path / "models.jsonl.gz"
    options = ("--kind", "models-chat", "--requests", "60", "--rate", "2", "--json")
    done = kvstore("trace", "synth", str(path), *options)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["requests"] == 60
    assert {row["model"] for row in rows_of(path)} == {"large", "small"}


def test_a_made_up_trace_has_the_rate_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    options = ("--rate", "20", "--requests", "2000")
    done = kvstore("trace", "synth", str(path), *options, "--json")
    found = json.loads(done.stdout)
    rows = rows_of(path)
    assert 0.97 <= found["requests_per_s"] / 20 <= 1.03
    assert 0.97 <= 2000 / (rows[-1]["timestamp"] / 1000) / 20 <= 1.03
    assert found["sessions"] == len({row["session_id"] for row in rows})


def test_what_a_trace_is_made_of_is_changed_by_options(tmp_path: Path) -> None:
    path = tmp_path / "agents.jsonl"
    options = ("--kind", "agent", "--requests", "50", "--rate", "5", "--prefixes", "1")
    sizes = ("--prefix-tokens", "constant:1024", "--first-tokens", "constant:10")
    done = kvstore("trace", "synth", str(path), *options, *sizes)
    assert done.exit_code == 0, done.output
    assert "50 requests of " in done.stdout
    firsts = [row for row in rows_of(path) if row["turn"] == 0]
    assert {row["input_length"] for row in firsts} == {1034}
    assert len({tuple(row["hash_ids"][:2]) for row in firsts}) == 1


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (["synth", "/nowhere/trace.jsonl"], 1, "/nowhere/trace.jsonl: cannot be written"),
        (["synth", "t", "--kind", "office", "--turns", "constant:1"], 2, "takes --rate alone"),
        (["synth", "t", "--turns", "many"], 1, "'many' is no distribution"),
        (["synth", "t", "--return-probability", "2"], 1, "a probability of 2"),
        (["record", "t", "--target", "unix:/nowhere/k.sock"], 3, "Is a daemon running there?"),
        (["record", "t", "--sample", "0"], 2, "--sample"),
    ],
)
def test_what_is_wrong_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = kvstore("trace", *arguments)
    assert (done.exit_code, reason in done.stderr) == (code, True), done.output


def output_of(path: Path) -> Path:
    return path.with_name("output")


@contextmanager
def recording(
    daemon: Daemon, path: Path, *options: str, stderr: int | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `kvstore trace record` until the context ends, then as Ctrl-C does."""
    with Client(daemon.target) as client:
        before = client.admin.stats()["totals"].get("recorded_requests", 0)
    command = daemon.command("trace", "record", str(path), "--target", daemon.target, "--json")
    with output_of(path).open("wb") as output:
        command += options
        process = subprocess.Popen(command, stdout=output, stderr=stderr, env=os.environ)
    try:
        with Client(daemon.target) as client:
            client.connect()
            namespace = client.register(sample_namespace())
            # A recording has begun when it takes a lookup of ours.
            deadline = time.monotonic() + WAIT_S
            while client.admin.stats()["totals"].get("recorded_requests", 0) == before:
                assert time.monotonic() < deadline
                assert process.poll() is None
                client.release(client.acquire(namespace, sample_keys("begun", 1)).lease_id)
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait(WAIT_S)


def ask(client: Client, namespace: NamespaceId, keys: list[BlockKey], **options: Any) -> int:
    """Do what an engine does with a prompt; returns its hit."""
    grant = client.acquire(namespace, keys, wait_s=5.0, **options)
    client.release(grant.lease_id)
    hit = grant.hit_blocks
    if hit < len(keys):
        new, parent = keys[hit:], keys[hit - 1] if hit else None
        client.put(namespace, new, sample_records(new), first_block=hit, parent=parent)
    return hit


def prompts() -> Iterator[list[BlockKey]]:
    """Ten chats of three turns behind one system prompt."""
    system = sample_keys("system", 2)
    for turn in range(3):
        for chat in range(10):
            yield system + sample_keys(f"chat {chat}", 2 + 3 * turn)


def test_a_daemons_traffic_is_recorded_and_its_replay_hits_as_much(tmp_path: Path) -> None:
    path = tmp_path / "live.jsonl.gz"
    with Daemon() as daemon:
        daemon.start()
        with recording(daemon, path) as process:
            with Client(daemon.target) as client:
                namespace = client.register(sample_namespace())
                hits = [ask(client, namespace, keys) for keys in prompts()]
                for _ in range(2):  # one request that asks again
                    ask(
                        client,
                        namespace,
                        sample_keys("again", 1),
                        request_id="r",
                        session_id="secret",
                    )
            time.sleep(0.5)  # gathered by the daemon
        daemon.stop()
    summary = json.loads(output_of(path).read_text())
    assert (process.returncode, summary["dropped"], summary["repeated"]) == (0, 0, 1)
    rows = rows_of(path)
    begun = rows[0]["hash_ids"]
    asked = [row for row in rows if row["hash_ids"] != begun]
    assert [row["hit_blocks"] for row in asked[:-1]] == hits
    assert "session_id" not in rows[0]
    assert isinstance(rows[-1]["session_id"], int)
    assert {row["block_nbytes"] for row in rows} == {RECORD_NBYTES}
    assert [row["at_s"] for row in rows] == sorted(row["at_s"] for row in rows)
    for key in next(prompts()):
        assert key.hex() not in path.read_bytes().hex()

    done = CliRunner().invoke(main, ["replay", str(path), "--dram", "64MiB", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["format"] == "kvstore"
    assert found["record_nbytes"] == RECORD_NBYTES
    assert found["dram_hits"] == sum(hits) + len(rows) - len(asked) - 1
    assert found["refused"] == 0


def test_a_recording_ends_by_its_limits_and_with_the_daemon(tmp_path: Path) -> None:
    with Daemon() as daemon:
        daemon.start()
        path = tmp_path / "few.jsonl"
        with recording(daemon, path, "--requests", "1") as process:
            assert process.wait(WAIT_S) == 0
        assert len(rows_of(path)) == 1
        with recording(daemon, tmp_path / "end.jsonl") as process:
            began = time.monotonic()
            daemon.stop()
            assert time.monotonic() - began < 5.0, "a recording does not keep a daemon from ending"
            process.wait(WAIT_S)
        assert rows_of(tmp_path / "end.jsonl")


def test_on_a_terminal_the_summary_of_a_recording_begins_a_line(tmp_path: Path) -> None:
    parent, child = pty.openpty()
    try:
        with (
            Daemon(file=False) as daemon,
            recording(daemon.start(), tmp_path / "shown.jsonl", stderr=child),
        ):
            seen = b""
            while b"dropped 0" not in seen:
                assert select.select([parent], [], [], WAIT_S)[0]
                seen += os.read(parent, 65536)
        assert select.select([parent], [], [], 0)[0]
        assert (seen + os.read(parent, 65536)).endswith(b"\r\n")
    finally:
        os.close(child)
        os.close(parent)


def test_a_sample_has_all_requests_of_some_prefixes(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    chains = [sample_keys(f"prompt {name}", 4) for name in range(40)]
    with Daemon() as daemon:
        daemon.start()
        with recording(daemon, path, "--sample", "0.5", "--sample-block", "0"):
            with Client(daemon.target) as client:
                namespace = client.register(sample_namespace())
                for keys in chains * 2:
                    client.release(client.acquire(namespace, keys).lease_id)
            time.sleep(0.5)
    rows = [row for row in rows_of(path) if len(row["hash_ids"]) == 4]
    wanted = {bytes(keys[0]) for keys in chains if int.from_bytes(keys[0][:8], "little") < 2**63}
    assert len(rows) == 2 * len(wanted)
    assert len({row["hash_ids"][0] for row in rows}) == len(wanted)


def test_without_a_daemon_an_older_trace_stays_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "monday.jsonl"
    file.write_text("{}\n")
    done = kvstore("trace", "record", str(file), "--target", "127.0.0.1:1")
    assert done.exit_code == 3
    assert file.read_text() == "{}\n"


def test_a_recording_that_is_refused_leaves_an_older_trace_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "monday.jsonl"
    file.write_text("{}\n")

    async def record_beside_others(daemon: Daemon) -> tuple[int | None, bytes]:
        client = AsyncClient(daemon.target, arena=False)
        others = [client.admin.record() for _ in range(LISTENERS_MAX)]
        try:
            for each in others:
                await anext(each)
            command = daemon.command("trace", "record", str(file), "--target", daemon.target)
            refused = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
            _, told = await refused.communicate()
            return refused.returncode, told
        finally:
            await client.close()

    with Daemon() as daemon:
        code, told = asyncio.run(record_beside_others(daemon.start()))
        daemon.stop()
    assert (code, file.read_text()) == (1, "{}\n")
    assert told.startswith(b"Error: 4 recordings are under way")
    assert b"Is a daemon running there?" not in told


def test_an_older_trace_gives_way_to_one_without_requests(tmp_path: Path, daemon: Daemon) -> None:
    file = tmp_path / "monday.jsonl.gz"
    file.write_bytes(b"older")
    command = daemon.command("trace", "record", str(file), "--target", daemon.target)
    done = subprocess.run([*command, "--seconds", "0.1", "--namespace", "00" * 32], check=False)
    assert (done.returncode, rows_of(file)) == (0, [])
