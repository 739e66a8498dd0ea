"""`kvstore status` and `kvstore doctor` say who can reach a daemon, and what they may do there."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.testing.daemon import Daemon
from tests.cli.run import kvstore


@pytest.fixture
def own() -> Iterator[Daemon]:
    with Daemon(file=False) as own:
        yield own


def told(command: str, daemon: Daemon) -> dict[str, dict[str, str]]:
    done = kvstore(command, "--target", daemon.target, "--json")
    return {each["about"]: each for each in json.loads(done.output)["findings"]}


@pytest.mark.parametrize("command", ["status", "doctor"])
def test_by_default_one_user_reaches_the_socket_and_all_the_metrics(
    own: Daemon, command: str
) -> None:
    found = told(command, own.start())
    socket = found["unix socket"]
    assert socket["level"] == "ok"
    for word in (str(own.socket), "mode 0600", "0700", "only this user"):
        assert word in socket["found"]
    assert (found["tcp"]["level"], found["tcp"]["found"]) == ("ok", "off")
    assert f"127.0.0.1:{own.metrics_port}" in found["metrics"]["found"]
    assert "every user of this host may read counts" in found["metrics"]["found"]
    assert "whether a prompt that they know is stored" in found["metrics"]["found"]


@pytest.mark.parametrize("command", ["status", "doctor"])
def test_what_is_open_is_said(command: str) -> None:
    with Daemon("server.metrics_listen=", file=False, tcp=True) as daemon:
        daemon.start()
        found = told(command, daemon)
        assert found["tcp"]["level"] == "note"
        assert daemon.address in found["tcp"]["found"]
        assert "every user of this host may read, record and wipe" in found["tcp"]["found"]
        assert 'server.listen=""' in found["tcp"]["do"]
        assert found["metrics"]["found"] == "off"
        daemon.socket.chmod(0o660)
        daemon.socket.parent.chmod(0o750)
        assert found["unix socket"]["level"] == "ok"
        found = told(command, daemon)
        assert found["unix socket"]["level"] == "note"
        assert "group" in found["unix socket"]["found"]
        daemon.socket.chmod(0o666)
        daemon.socket.parent.chmod(0o755)
        found = told(command, daemon)
        assert found["unix socket"]["level"] == "wrong"
        assert "chmod 600" in found["unix socket"]["do"]


def test_open_metrics_are_said_and_served_beyond_loopback(own: Daemon) -> None:
    own.start("server.metrics_listen=0.0.0.0:0", "server.metrics_open=true")
    found = told("status", own)["metrics"]
    assert found["level"] == "note"
    assert "everybody who reaches it may read counts" in found["found"]
    assert "whether a prompt that they know is stored" in found["found"]
    page = told("status", own)["page"]["found"]
    assert "beyond loopback without tls.cert" in page
    with urllib.request.urlopen(f"http://127.0.0.2:{own.metrics_port}/metrics") as answer:
        assert b"kvstore_rpc_seconds" in answer.read()


def test_doctor_says_it_of_a_daemon_that_does_not_run_yet(own: Daemon) -> None:
    def found(*settings: str) -> dict[str, dict[str, str]]:
        sets = [f"--set={each}" for each in (f"server.socket={own.socket}", *settings)]
        done = kvstore("doctor", *sets, "--json", f"--set=file.path={own.directory / 'file'}")
        return {each["about"]: each for each in json.loads(done.output)["findings"]}

    assert found("server.metrics_listen=")["tcp"]["found"] == "off"
    opened = found("server.listen=127.0.0.1:0", "server.listen_open=true")
    assert "every user of this host may read, record and wipe" in opened["tcp"]["found"]


def test_doctor_asks_the_daemon_of_the_settings_or_the_usual_one(
    own: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own.start()
    config = tmp_path / "kvstore.toml"
    config.write_text(f'[server]\nsocket = "{own.socket}"\n[file]\npath = "{tmp_path}/file"\n')
    monkeypatch.setenv("KVSTORE_TARGET", f"{tmp_path}/absent.sock")
    assert f"answers at {own.target}" in kvstore("doctor", "--config", str(config)).output
    monkeypatch.setenv("KVSTORE_TARGET", own.target)
    output = kvstore("doctor", f"--set=file.path={tmp_path}/file").output
    assert f"answers at {own.target}" in output


def test_a_port_that_asks_for_credentials_is_said_to(tmp_path: Path) -> None:
    settings = ("server.listen=127.0.0.1:0", f"security.tokens={tmp_path}/tokens")
    with Daemon(*settings, file=False) as daemon:
        found = told("status", daemon.start())["tcp"]
        assert found["level"] == "ok"
        assert "each call shows a certificate or a token" in found["found"]
        assert "in the clear" in found["found"]
        metrics = told("status", daemon)["metrics"]["found"]
        assert "/metrics takes a credential" in metrics
        assert "prompt" not in metrics
