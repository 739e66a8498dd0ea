"""`kvstore support` writes one file, with what helps and without what must not leave."""

import json
import stat
import zipfile
from pathlib import Path

import pytest

import kvstore as package
from kvstore.client import Client
from kvstore.model.block import Group, Namespace
from kvstore.model.errors import Unauthorized
from kvstore.model.keys import KeyChain, root_key
from kvstore.testing.daemon import Daemon
from tests.cli.run import kvstore

CANARY = "canary5f1d"
SPEC = Namespace(16, (Group("full", 4096),), (("model", "tiny"),))
KEYS = KeyChain(root_key(SPEC.id), 16).update(range(16 * 3))


def contents(path: Path) -> dict[str, str]:
    with zipfile.ZipFile(path) as report:
        return {name: report.read(name).decode() for name in report.namelist()}


def test_a_report_of_a_running_daemon_has_no_canary(tmp_path: Path) -> None:
    with Daemon(f"server.traces_endpoint=http://me:{CANARY}@127.0.0.1:9/v1/traces?k={CANARY}") as d:
        d.environment |= {
            "AWS_SECRET_ACCESS_KEY": CANARY,
            "HF_TOKEN": CANARY,
            "HOSTNAME": CANARY,
        }
        with Client(d.start().target, name="engine-1") as client:
            client.register(SPEC)
            client.put(SPEC.id, KEYS, [CANARY.encode() * 409 + b"123456"] * 3, durable=True)
            client.release(
                client.acquire(
                    SPEC.id, KEYS, request_id=f"chat-{CANARY}", session_id=f"s-{CANARY}"
                ).lease_id
            )
            done = kvstore("support", "--target", d.target, "--output", str(tmp_path / "r.zip"))
        log = d.output()
    assert done.exit_code == 0, done.output
    assert "not in it" not in done.output
    files = contents(tmp_path / "r.zip")
    assert set(files) == {
        *("README.txt", "versions.json", "settings.toml", "doctor.txt"),
        *("stats.json", "namespaces.json", "log.txt"),
    }
    for name, text in files.items():
        assert CANARY not in text, name
        for key in (*KEYS, SPEC.id):
            assert key.hex() not in text, name
    assert "node=serving" in files["log.txt"]
    assert files["log.txt"].splitlines()[0] in log
    assert "dram.capacity = " in files["settings.toml"]
    assert "# of the running daemon" in files["settings.toml"]
    assert json.loads(files["stats.json"])["version"] == package.__version__
    assert json.loads(files["namespaces.json"])[0]["spec"]["block_tokens"] == 16
    versions = json.loads(files["versions.json"])
    assert versions["kvstore"] == package.__version__
    assert versions["python"]
    assert stat.S_IMODE((tmp_path / "r.zip").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (f'["/usr/bin/kms", "--password", "{CANARY}"]', '["/usr/bin/kms", "[redacted]"]'),
        ("/usr/bin/kms", '"/usr/bin/kms"'),
    ],
)
def test_the_arguments_of_the_roots_command_stay_here(
    tmp_path: Path, command: str, shown: str
) -> None:
    where = tmp_path / "r.zip"
    sets = (f"--set=server.socket={tmp_path}/none.sock", f"--set=security.root_command={command}")
    done = kvstore("support", "--output", str(where), *sets)
    assert done.exit_code == 0, done.output
    files = contents(where)
    assert f"root_command = {shown}\n" in files["settings.toml"]
    assert not [name for name, text in files.items() if CANARY in text]


def test_it_works_without_a_daemon_and_says_what_is_missing(tmp_path: Path) -> None:
    with Daemon() as none:
        where = tmp_path / "r.zip"
        sets = (f"--set=server.socket={none.socket}", f"--set=file.path={none.directory}/file")
        done = kvstore("support", "--output", str(where), *sets)
        assert done.exit_code == 0, done.output
        files = contents(where)
        assert "the daemon's answers" in done.output
        assert "the daemon's answers" in files["README.txt"]
        assert {"versions.json", "settings.toml", "doctor.txt"} <= set(files)
        assert str(none.socket) in files["settings.toml"]
        again = kvstore("support", "--output", str(where), *sets)
        assert again.exit_code == 1
        assert "File exists" in again.output  # nothing is overwritten


def test_over_tcp_neither_settings_nor_log_are_told(tmp_path: Path) -> None:
    with Daemon(tcp=True) as daemon, Client(daemon.start().address) as client:
        for ask in (client.admin.settings, client.admin.log_lines):
            with pytest.raises(Unauthorized, match="unix socket"):
                ask()


def test_a_daemon_that_logs_json_writes_one_object_a_line_from_start_to_stop() -> None:
    with Daemon("server.log_format=json") as daemon:
        daemon.start()
        assert daemon.stop() == 0
        lines = [json.loads(line) for line in daemon.output().splitlines()]
        serving = next(line for line in lines if line.get("node") == "serving")
        assert serving["version"] == package.__version__
        assert serving["dram_bytes"] == 64 << 20
        assert serving["file_bytes"] == 1 << 30
        assert serving["directories"] == str(daemon.directory / "file")
        assert serving["socket"] == str(daemon.socket)
        assert lines[-1]["node"] == "stopped"
        assert {"time", "level", "logger", "message"} <= set(lines[0])
        daemon.start("dram.capacity=1TiB", wait=False)
        assert daemon.wait() == 2
        assert "does not fit" in json.loads(daemon.output().splitlines()[-1])["reason"]
