"""What deploy/ and the Dockerfile say is true of this release: paths, options, settings."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from kvstore.settings import load_settings
from kvstore.testing.daemon import Daemon
from kvstore.testing.wait import until
from kvstore_vllm.settings import parse_settings
from tests.cli.parse import parse

ROOT = Path(__file__).parents[2]
UNITS = {"kvstore.service": "", "kvstore@.service": "alice"}
HOME = "/opt/kvstore/bin/kvstore"


def unit(name: str) -> configparser.ConfigParser:
    read = configparser.ConfigParser(interpolation=None)
    read.optionxform = str  # type: ignore[assignment, method-assign]
    read.read_string((ROOT / "deploy" / name).read_text())
    return read


def instructions() -> list[tuple[str, str]]:
    """Return the Dockerfile's instructions, lines that go on joined."""
    text = re.sub(r"(?m)^#.*\n", "", (ROOT / "Dockerfile").read_text()).replace("\\\n", "")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines]


@pytest.mark.parametrize(("name", "user"), UNITS.items())
def test_the_unit_starts_a_daemon_that_finds_its_directories(name: str, user: str) -> None:
    service = unit(name)["Service"]
    words = shlex.split(service["ExecStart"].replace("%i", user))
    assert words[0] == HOME
    given = parse(["kvstore", *words[1:]]).params
    settings = load_settings(None, given["overrides"])
    assert settings.server.socket.startswith(
        f"/run/{service['RuntimeDirectory']}/".replace("%i", user)
    )
    state = f"/var/lib/{service['StateDirectory']}/".replace("%i", user)
    assert user == "" or str(settings.file.path).startswith(state)
    assert str(given["config"]).startswith(f"/etc/{service['ConfigurationDirectory']}/")
    assert int(service["TimeoutStopSec"]) > 5 * settings.server.drain_s


def test_the_audit_log_of_the_documents_is_where_the_unit_may_write() -> None:
    service = unit("kvstore.service")["Service"]
    may = (f"/var/log/{service['LogsDirectory']}/", f"/var/lib/{service['StateDirectory']}/")
    text = (ROOT / "docs/security.md").read_text()
    written = re.findall(r'^audit(?:_key)? = "(.*?)"', text, re.MULTILINE)
    assert len(written) == 2
    assert all(each.startswith(may) for each in written)


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze here")
@pytest.mark.parametrize("name", UNITS)
def test_systemd_knows_every_line_of_the_unit(name: str, tmp_path: Path) -> None:
    text = (ROOT / "deploy" / name).read_text()
    (tmp_path / name).write_text(text.replace(HOME, sys.executable))
    ran = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / name)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert [line for line in ran.stderr.splitlines() if "kvstore" in line] == []


@pytest.mark.parametrize("abstract", [False, True])
def test_the_service_manager_hears_when_a_daemon_serves_and_stops(abstract: bool) -> None:
    with Daemon(file=False) as daemon, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        path = str(daemon.directory / "notify")
        manager.bind(f"\0{path}" if abstract else path)
        manager.settimeout(20)
        daemon.environment["NOTIFY_SOCKET"] = f"@{path}" if abstract else path
        daemon.start()
        assert manager.recv(64) == b"READY=1"
        assert daemon.stop() == 0
        assert manager.recv(64) == b"STOPPING=1"


def test_a_daemon_serves_although_its_service_manager_is_gone() -> None:
    with Daemon(file=False) as daemon:
        daemon.environment["NOTIFY_SOCKET"] = str(daemon.directory / "nobody")
        daemon.start()
        until(lambda: "notify=failed" in daemon.output())
        assert daemon.stop() == 0


def test_the_image_runs_commands_that_exist_as_another_user() -> None:
    last_stage = max(at for at, (word, _) in enumerate(instructions()) if word == "FROM")
    stage = dict(instructions()[last_stage:])
    parse([*json.loads(stage["ENTRYPOINT"]), *json.loads(stage["CMD"])])
    parse(json.loads(stage["HEALTHCHECK"].partition("CMD ")[2]))
    assert stage["USER"] == "kvstore"
    for directory in json.loads(stage["VOLUME"]):
        assert f" {directory}" in stage["RUN"], "not made for the user"


def test_what_goes_to_the_builder_makes_the_whole_wheel(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    context = tmp_path / "context"
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    for kept in [line.removeprefix("!/") for line in lines if line.startswith("!")]:
        source, target = ROOT / kept, context / kept
        target.parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, target)
    names = []
    for directory in (context, ROOT):
        output = tmp_path / f"dist-{directory.name}"
        subprocess.run(
            [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(output)],
            cwd=directory,
            check=True,
            capture_output=True,
            timeout=180,
        )
        (wheel,) = output.glob("*.whl")
        listed = subprocess.run(
            [sys.executable, "-m", "zipfile", "-l", str(wheel)],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        names.append({line.split()[0] for line in listed.stdout.splitlines()[1:]})
    assert names[0] == names[1]


def test_daemon_and_engine_run_as_the_same_user() -> None:
    """The daemon lends its arena to nobody else."""
    text = (ROOT / "Dockerfile").read_text()
    assert len(re.findall(r"useradd --system --uid 10001 .* kvstore", text)) == 2
    assert len(re.findall(r"(?m)^USER kvstore$", text)) == 2


def test_the_extras_of_the_image_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    (default,) = [rest for word, rest in instructions() if rest.startswith("EXTRAS=")]
    assert set(default.removeprefix("EXTRAS=").strip("[]").split(",")) <= set(extras)


@pytest.fixture
def services() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    compose: dict[str, Any] = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())
    return compose["services"]  # type: ignore[no-any-return]


def test_the_composed_daemon_has_settings_that_exist(services: dict[str, Any]) -> None:
    given = parse(["kvstore", *services["kvstore"]["command"]]).params
    settings = load_settings(None, given["overrides"])
    limit = int(services["kvstore"]["mem_limit"].removesuffix("g")) << 30
    assert settings.dram.capacity_bytes < limit


def test_the_composed_engine_has_settings_that_the_connector_takes(
    services: dict[str, Any],
) -> None:
    engine = services["vllm"]
    (transfer,) = [
        json.loads(word.partition("=")[2])
        for word in engine["command"]
        if word.startswith("--kv-transfer-config=")
    ]
    settings = parse_settings(transfer["kv_connector_extra_config"])
    assert transfer["kv_connector"] == "KVStoreConnector"
    assert transfer["kv_load_failure_policy"] == "recompute"
    stages = {rest.rpartition(" AS ")[2] for word, rest in instructions() if word == "FROM"}
    assert engine["build"]["target"] in stages
    # The socket's directory is the one thing they share, at the same path.
    place = next(each for each in engine["volumes"] if each.startswith("socket:"))
    assert place in services["kvstore"]["volumes"]
    assert settings.target.startswith(f"unix:{place.removeprefix('socket:')}/")
