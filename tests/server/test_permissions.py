"""Files and sockets are this user's alone, and the arena asks the kernel who its peer is."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from kvstore import Client
from kvstore.model.errors import ConfigError
from kvstore.server.sockets import owned_socket_path
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import sample_keys, sample_namespace, sample_records

NOBODY = 65534
# Another user's process cannot always read this project's interpreter.
PYTHON = shutil.which("python3", path="/usr/bin:/bin")
CONNECT = """
import socket, sys
kind, path = getattr(socket, sys.argv[1]), sys.argv[2]
try:
    with socket.socket(socket.AF_UNIX, kind) as link:
        link.settimeout(5)
        link.connect(path)
        print(link.recv(4096))
except PermissionError:
    print("no permission")
"""


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_every_file_and_socket_is_0600_and_every_directory_0700() -> None:
    before = os.umask(0)  # what a careless service manager may leave
    try:
        with Daemon() as daemon:
            daemon.start()
            keys = sample_keys("modes", 8)
            with Client(daemon.target) as client:
                client.put(
                    client.register(sample_namespace()), keys, sample_records(keys), durable=True
                )
            run, file = daemon.socket.parent, daemon.directory / "file"
            found = {path.name: mode(path) for path in (*run.iterdir(), *file.iterdir())}
            assert {"k.sock", "k.sock.arena", "k.sock.calls", "k.sock.lock", "LOCK"} < found.keys()
            assert any(name.endswith(".segment") for name in found)
            assert {name: value for name, value in found.items() if value != 0o600} == {}
            assert (mode(run), mode(file)) == (0o700, 0o700)
    finally:
        os.umask(before)


def as_nobody(kind: str, path: str) -> str:
    assert PYTHON is not None
    done = subprocess.run(
        [PYTHON, "-c", CONNECT, kind, path],
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
        timeout=20,
    )
    return done.stdout


@pytest.mark.skipif(os.getuid() != 0 or PYTHON is None, reason="only root can be somebody else")
def test_another_user_gets_neither_socket_nor_by_mistake_the_arena() -> None:
    with Daemon() as daemon:
        daemon.start()
        arena = f"{daemon.socket}.arena"
        assert "no permission" in as_nobody("SOCK_STREAM", str(daemon.socket))
        assert "no permission" in as_nobody("SOCK_SEQPACKET", arena)
        # With every mode opened by mistake the kernel's word on the peer still keeps it out.
        for path in (daemon.directory, daemon.socket.parent):
            path.chmod(0o755)
        Path(arena).chmod(0o666)
        assert "Unauthorized" in as_nobody("SOCK_SEQPACKET", arena)


def test_a_directory_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="chmod 700"), owned_socket_path(tmp_path / "k.sock"):
        pass
    tmp_path.chmod(0o1777)  # as /tmp is: nobody can replace what is another's
    with owned_socket_path(tmp_path / "k.sock"):
        assert mode(tmp_path / "k.sock.lock") == 0o600
