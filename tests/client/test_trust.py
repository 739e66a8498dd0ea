"""A client believes a daemon of its own user, of root, or of the user it was told, and no other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import Client, Unauthorized, Unavailable
from kvstore.testing.daemon import Daemon
from tests.cli.run import kvstore

NOBODY = 65534

# Another user listens where the arena, or the call socket, should be.
IMPOSTOR = """
import os, socket, sys
listener = socket.socket(socket.AF_UNIX, getattr(socket, sys.argv[2]))
listener.bind(sys.argv[1])
os.chmod(sys.argv[1], 0o666)
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
listener.listen()
print("listening", flush=True)
sys.stdin.read()
"""

# Imports as itself, and asks as somebody else.
DENIED = """
import os, sys
from kvstore import Client
from kvstore.cli import main
import encodings.idna
try:
    main(["stats", "--target", sys.argv[1]], standalone_mode=False)  # loads what it needs
except Exception as error:
    print("itself:", error)
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
try:
    Client(sys.argv[1]).connect()
except Exception as error:
    print(type(error).__name__, error)
main(["stats", "--target", sys.argv[1]])
"""

root_only = pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")


@pytest.fixture
def own() -> Iterator[Daemon]:
    with Daemon(file=False) as own:
        yield own.start()


@root_only
def test_a_socket_of_another_user_is_not_believed_unless_one_says_so(own: Daemon) -> None:
    os.chown(own.socket, NOBODY, NOBODY)
    for arena in (True, False):
        with Client(own.target, arena=arena) as client:
            for _ in range(2):  # the second time, the first one's refusal still says why
                with pytest.raises(Unauthorized, match=f"nobody.*--daemon-uid {NOBODY}"):
                    client.admin.stats()
        with Client(own.target, arena=arena, daemon_uid=NOBODY) as client:
            assert client.admin.stats()["sessions"] == arena
        with (
            Client(own.target, arena=arena, daemon_uid=4711) as client,
            pytest.raises(Unauthorized),
        ):
            client.admin.stats()


@root_only
def test_a_directory_of_another_user_is_not_believed(own: Daemon) -> None:
    os.chown(own.socket.parent, NOBODY, NOBODY)
    with Client(own.target) as client, pytest.raises(Unauthorized, match="nobody"):
        client.connect()


def test_a_directory_that_others_may_write_to_is_not_believed(own: Daemon) -> None:
    own.socket.parent.chmod(0o777)
    with Client(own.target) as client, pytest.raises(Unauthorized, match="chmod 700"):
        client.connect()
    own.socket.parent.chmod(0o1777)  # as /tmp is: nobody can replace what is another's
    with Client(own.target) as client:
        client.connect()


@root_only
@pytest.mark.parametrize(("name", "kind"), [("arena", "SOCK_SEQPACKET"), ("calls", "SOCK_STREAM")])
def test_another_user_at_the_sockets_beside_it_is_found_out(
    own: Daemon, name: str, kind: str
) -> None:
    path = f"{own.socket}.{name}"
    Path(path).unlink()
    with subprocess.Popen(
        [sys.executable, "-c", IMPOSTOR, path, kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as impostor:
        assert impostor.stdout is not None
        assert impostor.stdout.readline() == b"listening\n"
        with Client(own.target) as client, pytest.raises(Unauthorized, match=f"k.sock.{name} .*"):
            client.connect()
        impostor.kill()


@root_only
def test_permission_denied_is_told_as_such(own: Daemon) -> None:
    own.directory.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", DENIED, own.target],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "itself:" not in done.stdout
    assert f"Unauthorized permission denied: {own.socket.parent} belongs to user root" in (
        done.stdout
    )
    assert "permission denied" in done.stderr
    assert "Is a daemon running" not in done.stderr
    assert done.returncode == 1


def test_where_no_socket_is_no_daemon_answers(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name in ("absent", "file"):
        with Client(f"{tmp_path}/{name}") as client, pytest.raises(Unavailable, match=name):
            client.connect()
        done = kvstore("stats", "--target", f"{tmp_path}/{name}")
        assert done.exit_code == 3
        assert "kvstore serve" in done.output


@root_only
def test_commands_take_the_daemon_s_user(own: Daemon) -> None:
    os.chown(own.socket, NOBODY, NOBODY)
    for command in ("status", "stats", "namespaces"):
        refused = kvstore(command, "--target", own.target)
        assert refused.exit_code == 1
        assert f"--daemon-uid {NOBODY}" in refused.output
        done = kvstore(command, "--target", own.target, "--daemon-uid", str(NOBODY))
        assert done.exit_code == 0, done.output
    sets = (f"--set=file.path={own.directory}/file", "--set=file.capacity=1GiB", "--json")
    for more, word in (((), "nobody"), (("--daemon-uid", str(NOBODY)), "release")):
        told = json.loads(kvstore("doctor", "--target", own.target, *sets, *more).output)
        (found,) = [each["found"] for each in told["findings"] if each["about"] == "daemon"]
        assert word in found
