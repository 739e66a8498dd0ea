"""`kvstore status` and `kvstore top`: one daemon's state, in words and live."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvstore as package
from kvstore import Client
from kvstore.store.findings import Level, daemon_health
from kvstore.testing.daemon import Daemon
from kvstore.testing.damage import damage_resident
from kvstore.testing.samples import sample_keys, sample_namespace, sample_records
from kvstore.testing.wait import until
from tests.cli.run import kvstore

KEYS = sample_keys("status", 12)


@pytest.fixture(scope="module")
def own() -> Iterator[Daemon]:
    with Daemon() as daemon:
        yield daemon.start()


@pytest.fixture
def engine(own: Daemon) -> Iterator[Client]:
    with Client(own.target, name="engine one") as client:
        yield client


def use(client: Client) -> None:
    namespace_id = client.register(sample_namespace())
    client.put(namespace_id, KEYS[:9], sample_records(KEYS[:9]), durable=True)
    client.release(client.acquire(namespace_id, KEYS, request_id="r").lease_id)


def test_status_says_in_words_that_all_is_well(own: Daemon, engine: Client) -> None:
    use(engine)
    done = kvstore("status", "--target", own.target)
    assert done.exit_code == 0, done.output
    for word in ("healthy", "reads and writes", "every one matched", "never_stored"):
        assert word in done.output
    assert "engine one: 1 processes, 0 leases" in done.output
    assert len(done.output.splitlines()) <= 25, "one screen"
    told = json.loads(kvstore("status", "--json", "--target", own.target).output)
    assert told["healthy"]
    assert {each["level"] for each in told["findings"]} <= {"ok", "note"}
    assert told["file"]["state"] == "ok"


def test_status_without_a_daemon_says_how_to_start_one(tmp_path: Path) -> None:
    for command in ("status", "top"):
        done = kvstore(command, "--target", f"unix:{tmp_path}/none.sock")
        assert done.exit_code == 3
        assert "kvstore serve" in done.output


def test_a_disk_that_cannot_be_written_makes_the_status_bad() -> None:
    with Daemon() as daemon:
        daemon.start()
        directory = daemon.directory / "file"
        directory.rename(daemon.directory / "gone")
        directory.symlink_to(directory)  # whatever is opened in there is an error now
        with Client(daemon.target) as client:
            namespace_id = client.register(sample_namespace())
            done = client.put(namespace_id, KEYS, sample_records(KEYS), durable=True)
            assert not done.durable
        done = kvstore("status", "--target", daemon.target)
        assert done.exit_code == 1
        assert "something is wrong" in done.output
        assert "wrong  file tier" in done.output
        directory.unlink()


def test_wrong_bytes_make_the_status_bad() -> None:
    with Daemon() as daemon:
        daemon.start()
        with Client(daemon.target) as client:
            namespace_id = client.register(sample_namespace())
            client.put(namespace_id, KEYS, sample_records(KEYS))
            damage_resident(client, namespace_id, KEYS[:1])
            client.admin.delete(namespace_id, KEYS[:1], corrupt=True)
        done = kvstore("status", "--target", daemon.target)
        assert done.exit_code == 1
        assert "did not match: 1 by " in done.output  # the reader, or who writes it behind


STATS = {
    "sessions": 1,
    "leases": 2,
    "durable_lag_s": 0.1,
    "dirty_bytes": 0,
    "dirty_bytes_max": 1000,
    "dram": {
        "capacity_bytes": 1000,
        "leased_bytes": 10,
        "leased_bytes_max": 500,
        "limbo_bytes": 0,
        "growing": False,
    },
    "file": {"capacity_bytes": 5000, "state": "ok", "failed_writes": 0, "failed_reads": 0},
    "totals": {},
}


@pytest.mark.parametrize(
    ("changes", "about", "level"),
    [
        ({}, "", Level.OK),
        ({"file": {"capacity_bytes": 0}}, "file tier", Level.NOTE),
        ({"durable_lag_s": 60.0}, "durable lag", Level.WRONG),
        ({"dirty_bytes": 950}, "durable lag", Level.WRONG),
        ({"dram": {**STATS["dram"], "limbo_bytes": 200}}, "limbo", Level.WRONG),
        ({"dram": {**STATS["dram"], "leased_bytes": 499}}, "arena", Level.NOTE),
        ({"dram": {**STATS["dram"], "growing": True}}, "arena", Level.NOTE),
        ({"file": {**STATS["file"], "failed_reads": 1}}, "file tier", Level.WRONG),
        ({"totals": {"refused_parts": {"no_room": 3.0}}}, "puts", Level.NOTE),
        ({"totals": {"corrupt_blocks": {"put": 1.0, "scrub": 0.0}}}, "checksums", Level.NOTE),
        ({"totals": {"corrupt_blocks": {"pair": 2.0}}}, "checksums", Level.NOTE),
        ({"totals": {"corrupt_blocks": {"put": 1.0, "scrub": 1.0}}}, "checksums", Level.WRONG),
        ({"sessions": 0}, "clients", Level.NOTE),
    ],
)
def test_each_sign_of_trouble_is_found(
    changes: dict[str, object], about: str, level: Level
) -> None:
    findings = {each.about: each for each in daemon_health({**STATS, **changes})}
    for name, finding in findings.items():
        if name == about:
            assert finding.level is level
            assert finding.do or level is not Level.WRONG
        elif about == "":
            assert finding.level is Level.OK


def test_top_shows_one_interval(own: Daemon, engine: Client) -> None:
    use(engine)
    done = kvstore("top", "--once", "--interval", "0.1", "--target", own.target)
    assert done.exit_code == 0, done.output
    for word in ("dram", "file", "hits", "queues", "durable", "engine one"):
        assert word in done.output


def test_a_clients_name_is_neither_markup_nor_a_line(own: Daemon) -> None:
    with Client(own.target, name="a[/b] [red]\nwrong  disk\x1b[2J") as client:
        client.connect()
        shown = "a[/b] [red]?wrong  disk?[2J: "
        done = kvstore("status", "--target", own.target)
        assert (done.exit_code, f"{shown}1 processes" in done.output) == (0, True)
        done = kvstore("top", "--once", "--interval", "0.1", "--target", own.target)
        assert (done.exit_code, f"{shown}0 leases" in done.output) == (0, True)
        assert "dram" in done.output


def start(daemon: Daemon, *options: str, **how: object) -> subprocess.Popen[str]:
    root = str(Path(package.__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, "-m", "kvstore.cli", "top", "--target", daemon.target, *options],
        text=True,
        env={**os.environ, "PYTHONPATH": root, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"},
        **how,  # type: ignore[call-overload]
    )


def test_top_emits_a_line_an_interval_and_follows_a_restart() -> None:
    with Daemon() as daemon:
        daemon.start()
        top = start(daemon, "--json", "--interval", "0.2", stdout=subprocess.PIPE)
        assert top.stdout is not None
        lines = (json.loads(line) for line in top.stdout)
        try:
            next(lines)
            with Client(daemon.target, name="engine") as client:
                use(client)
                frame = next(frame for frame in lines if frame["hits"]["lookup_blocks_per_s"])
                assert frame["hits"]["ratio"] == pytest.approx(9 / 12)
                assert frame["ended_by"] == {"never_stored": 1}
                assert frame["bytes_per_s"]["dram_read"] > 0
                assert frame["calls"]["Acquire"]["mean_s"] > 0
            daemon.kill()
            assert "no kvstore daemon" in next(each for each in lines if "error" in each)["error"]
            daemon.start()
            assert next(frame for frame in lines if "error" not in frame)["dram"]["blocks"] == 0
        finally:
            top.kill()
            top.wait()
            top.stdout.close()


def test_top_prints_one_screen_after_the_other_where_there_is_no_terminal(own: Daemon) -> None:
    top = start(own, "--interval", "0.1", stdout=subprocess.PIPE)
    assert top.stdout is not None
    titles = (line for line in top.stdout if line.startswith(f"kvstore at {own.target}"))
    try:
        assert [next(titles) for _ in range(2)]
        top.send_signal(signal.SIGINT)
        assert top.wait(30) == 0
    finally:
        top.kill()
        top.wait()
        top.stdout.close()


def test_top_draws_a_live_screen_until_ctrl_c(own: Daemon) -> None:
    parent, child = pty.openpty()
    top = start(own, "--interval", "0.1", stdout=child, stderr=child, stdin=child)
    os.close(child)
    seen = b""

    def drawn() -> bool:
        nonlocal seen
        if select.select([parent], [], [], 0.1)[0]:
            seen += os.read(parent, 65536)
        return b"durable" in seen and b"dram" in seen

    try:
        until(drawn, 20)
        top.send_signal(signal.SIGINT)
        assert top.wait(30) == 0
    finally:
        top.kill()
        top.wait()
        os.close(parent)
