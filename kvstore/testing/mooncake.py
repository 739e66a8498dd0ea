"""A real Mooncake Store on loopback: its master, and hosts that give it memory, by pid."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self

from kvstore.model.errors import Unavailable
from kvstore.testing.ports import free_ports

INSTALL = (
    "Mooncake is not installed: pip install --no-deps mooncake-transfer-engine-non-cuda "
    "(and libibverbs1, libcurl4, libnuma1)"
)
START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 10.0
POLL_S = 0.05
SEGMENT_BYTES = 64 << 20
_HOST = """
import sys, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup({"local_hostname": "127.0.0.1", "metadata_server": "P2PHANDSHAKE",
    "global_segment_size": sys.argv[2], "local_buffer_size": "0", "protocol": "tcp",
    "master_server_addr": sys.argv[1]})
print(code, flush=True)
sys.stdin.read()
"""
_VALUE = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
store.setup({"local_hostname": "127.0.0.1", "metadata_server": "P2PHANDSHAKE",
    "global_segment_size": "0", "local_buffer_size": str(16 << 20), "protocol": "tcp",
    "master_server_addr": sys.argv[1]})
for line in sys.stdin:
    operation, name, how = line.split()
    value = store.get(name)
    if operation == "begin":
        code = store.batch_put_session_start([name], [4096])[0]
    elif operation == "revoke":
        code = store.batch_put_session_revoke([name])[0]
    elif operation == "copy":
        store.remove(how, True)
        code = store.put(how, value)
    elif operation == "change":
        at = len(value) // 2
        flipped = value[:at] + bytes([value[at] ^ 1]) + value[at + 1:]
        value = {"flip": flipped, "cut": value[:-1], "empty": b"\\0", "long": value + b"x"}[how]
        store.remove(name, True)
        code = store.put(name, value)
    else:
        code = store.is_exist(name)
    print(code, len(value), flush=True)
"""


@cache
def has_mooncake() -> bool:
    """Return whether Mooncake is there, with its libraries; `INSTALL` says how to get it."""
    if importlib.util.find_spec("mooncake") is None:
        return False
    # In a process of its own: native code that is not for this machine may end it.
    program = [sys.executable, "-c", "import mooncake.store"]
    return subprocess.run(program, capture_output=True, check=False).returncode == 0


class Mooncake:
    """A master, and at first one host. A context manager: at its end nothing of it is left.

    options: more of the master's own, without the dashes.
    """

    def __init__(self, *, segment_bytes: int = SEGMENT_BYTES, **options: str) -> None:
        self.port, self._metrics_port = free_ports(2)
        self._segment_bytes = segment_bytes
        self._options = options
        self._master: subprocess.Popen[bytes] | None = None
        self._hosts: list[subprocess.Popen[str]] = []
        self._hand: subprocess.Popen[str] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__

    @property
    def url(self) -> str:
        return f"mooncake://127.0.0.1:{self.port}"

    def start(self, *, host: bool = True) -> Self:
        """Start the master, and a host."""
        self._master = subprocess.Popen(
            [
                _master_program(),
                "--rpc_address=127.0.0.1",
                f"--rpc_port={self.port}",
                "--metrics_host=127.0.0.1",
                f"--metrics_port={self._metrics_port}",
                "--rpc_thread_num=2",
                *(f"--{name}={value}" for name, value in self._options.items()),
            ],
            stdout=self._log,
            stderr=self._log,
        )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _listens(self.port):
            if time.monotonic() > deadline or self._master.poll() is not None:
                self._log.seek(0)
                raise Unavailable(f"mooncake_master: {self._log.read()[-2000:]!r}")
            time.sleep(POLL_S)
        if host:
            self.add_host()
        return self

    def add_host(self) -> None:
        """Let one more process give memory."""
        host = self._run(_HOST, f"127.0.0.1:{self.port}", str(self._segment_bytes))
        self._hosts.append(host)
        assert host.stdout is not None
        if (said := host.stdout.readline().strip()) != "0":
            raise Unavailable(f"Mooncake takes no memory: {said}")

    def kill_hosts(self) -> None:
        """SIGKILL: their memory, and what is there, is gone."""
        while self._hosts:
            _end(self._hosts.pop())

    def kill_master(self) -> None:
        """SIGKILL. It keeps nothing."""
        if self._master is not None:
            _end(self._master)
            self._master = None

    def pause_master(self) -> None:
        """SIGSTOP: connections stay open, and nobody answers."""
        assert self._master is not None
        self._master.send_signal(signal.SIGSTOP)

    def resume_master(self) -> None:
        """SIGCONT."""
        assert self._master is not None
        self._master.send_signal(signal.SIGCONT)

    def change(self, name: str, how: str) -> None:
        """Put a wrong value in the place of one. how: flip, cut, empty, long."""
        if (said := self._by_hand(f"change {name} {how}"))[0] != "0":
            raise Unavailable(f"the value was not changed: {said}")

    def copy(self, name: str, target: str) -> None:
        """Put a value under another name as well."""
        self._by_hand(f"copy {name} {target}")

    def begin(self, name: str) -> None:
        """Begin to put a value, and do not end it."""
        self._by_hand(f"begin {name} -")

    def revoke(self, name: str) -> None:
        """Give up what `begin` began."""
        self._by_hand(f"revoke {name} -")

    def exists(self, name: str) -> bool:
        """Say whether a value is there, whatever a daemon says."""
        return self._by_hand(f"exists {name} -")[0] == "1"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._hand is not None:
            _end(self._hand)
        self.kill_hosts()
        self.kill_master()
        self._log.close()

    def _by_hand(self, line: str) -> list[str]:
        """Do something by a client of our own, in a process of its own."""
        if self._hand is None:
            self._hand = self._run(_VALUE, f"127.0.0.1:{self.port}")
        assert self._hand.stdin is not None
        assert self._hand.stdout is not None
        self._hand.stdin.write(f"{line}\n")
        self._hand.stdin.flush()
        return self._hand.stdout.readline().split()

    def _run(self, program: str, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, "GLOG_minloglevel": "2"},
        )


def _master_program() -> str:
    spec = importlib.util.find_spec("mooncake")
    if spec is None or not spec.submodule_search_locations:
        raise Unavailable(INSTALL)
    return str(Path(spec.submodule_search_locations[0]) / "mooncake_master")


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _end(process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(STOP_TIMEOUT_S)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
