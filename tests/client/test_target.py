"""Which daemon is asked: a path as one sees it, KVSTORE_TARGET, or the first default socket."""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvstore.client.target
from kvstore import Client, Unavailable
from kvstore.client.target import default_target
from kvstore.model.errors import Unauthorized
from kvstore.settings import default_socket, default_sockets
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import sample_keys, sample_namespace, sample_records
from kvstore.testing.wait import until
from kvstore.transport.unix_sockets import target_of
from tests.cli.run import kvstore as command

KEYS = sample_keys("target", 3)

# The same directory at another place, and nothing at the daemon's own.
ELSEWHERE = """
set -e
mount --make-rprivate / 2>/dev/null || true
mount --bind "$1" "$2"
mount -t tmpfs none "$3"
exec "$4" -c "$5" "$2/k.sock"
"""
USE = """
import sys
from kvstore import Client
from kvstore.testing.samples import sample_keys, sample_namespace, sample_records
keys = sample_keys("target", 3)
with Client("unix:" + sys.argv[1]) as client:
    client.register(sample_namespace())
    client.put(sample_namespace().id, keys, sample_records(keys))
    lease = client.acquire(sample_namespace().id, keys)
    print(client.local, client.release(lease.lease_id))
"""


@pytest.fixture
def own() -> Iterator[Daemon]:
    with Daemon(file=False) as own:
        yield own.start()


def uses(client: Client) -> bool:
    """Say whether a client maps the arena, and leases there."""
    client.register(sample_namespace())
    client.put(sample_namespace().id, KEYS, sample_records(KEYS))
    lease = client.acquire(sample_namespace().id, KEYS)
    return client.local and client.release(lease.lease_id) == [True]


@pytest.mark.parametrize("form", ["unix:run/k.sock", "./run/k.sock", "run/k.sock"])
def test_relative_paths_mean_the_directory_one_is_in(
    own: Daemon, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(own.directory)
    assert command("stats", "--target", form).exit_code == 0
    with Client(form) as client:
        assert client.target == own.target
        assert uses(client)
        monkeypatch.chdir(tmp_path)
        own.kill()
        own.start()
        until(lambda: client.available, 10.0)
        assert uses(client)


def test_a_relative_server_socket_works(monkeypatch: pytest.MonkeyPatch) -> None:
    with Daemon(file=False) as daemon:
        monkeypatch.chdir(daemon.directory)
        daemon.start("server.socket=run/k.sock")
        assert f"socket={daemon.socket} " in daemon.output()
        with Client(daemon.target) as client:
            assert uses(client)


def test_a_server_socket_that_is_too_long_in_full_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.chdir(deep)
    with Daemon(file=False) as daemon:
        daemon.start("server.socket=k.sock", wait=False)
        assert daemon.wait() == 2
        assert "choose a shorter path" in daemon.output()


def test_the_socket_s_directory_mounted_elsewhere_works(own: Daemon, tmp_path: Path) -> None:
    unshare = shutil.which("unshare")
    user = [] if os.getuid() == 0 else ["--user", "--map-root-user"]
    apart = [str(unshare), *user, "--mount"]
    if unshare is None or subprocess.run([*apart, "true"], check=False).returncode:
        pytest.skip("no mount namespace can be made here")
    hidden = own.directory
    there = tmp_path / "there"
    there.mkdir()
    places = [str(own.socket.parent), str(there), str(hidden)]
    done = subprocess.run(
        [*apart, "sh", "-c", ELSEWHERE, "sh", *places, sys.executable, USE],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "True [True]\n", done.stderr


def test_the_environment_says_which_daemon_is_asked(
    own: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(own.directory)
    for told in (own.target, str(own.socket), "./run/k.sock"):
        monkeypatch.setenv("KVSTORE_TARGET", told)
        assert default_target() == own.target
        with Client() as client:
            assert uses(client)
        for name in ("stats", "status", "namespaces"):
            assert command(name).exit_code == 0
        assert f"at {own.target}" in command("status").output
    monkeypatch.setenv("KVSTORE_TARGET", "nowhere")
    assert command("stats").exit_code == 2


def test_clients_take_the_first_default_socket_that_they_may_use(
    own: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVSTORE_TARGET", raising=False)
    absent, stale = tmp_path / "absent/kvstore.sock", tmp_path / "file"
    stale.write_text("")
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    with Daemon(f"server.socket={open_to_all}/k.sock", file=False) as other:
        other.start()
        open_to_all.chmod(0o777)
        places: tuple[Path, ...] = (absent, stale, open_to_all / "k.sock", own.socket)
        monkeypatch.setattr(kvstore.client.target, "default_sockets", lambda: places)
        assert default_target() == own.target
        with Client() as client:
            assert uses(client)
        places = places[:3]
        with Client() as client, pytest.raises(Unauthorized, match="chmod 700"):
            client.connect()
        places = places[:2]
        assert default_target() == f"unix:{default_socket()}"


def test_daemons_and_clients_have_the_same_places_in_the_same_order() -> None:
    environ = {"XDG_RUNTIME_DIR": "/run/user/7"}
    places = [str(path.parent) for path in default_sockets(environ)]
    assert places == [
        "/run/kvstore",
        f"/run/kvstore-{getpass.getuser()}",
        "/run/user/7/kvstore",
        f"/run/user/{os.getuid()}/kvstore",
        str(Path.home() / ".local/state/kvstore"),
    ]
    assert {path.name for path in default_sockets(environ)} == {"kvstore.sock"}
    assert default_socket(environ) in map(str, default_sockets(environ))
    for other in ({}, {"XDG_RUNTIME_DIR": "not/absolute"}):
        assert len(default_sockets(other)) == 4


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("unix:///run/k.sock", "unix:/run/k.sock"),
        ("unix:/run/../k.sock", "unix:/k.sock"),
        ("/run/k.sock", "unix:/run/k.sock"),
        ("/a:b/k.sock", "unix:/a:b/k.sock"),
        ("127.0.0.1:7700", "127.0.0.1:7700"),
        ("[::1]:7700", "[::1]:7700"),
        ("dns:///host:7700", "dns:///host:7700"),
    ],
)
def test_addresses_are_read_as_meant(text: str, target: str) -> None:
    assert target_of(text) == target


def test_nobody_answers_where_nobody_listens(own: Daemon) -> None:
    own.kill()
    assert own.socket.exists()
    with Client(own.target) as client, pytest.raises(Unavailable):
        client.connect()
