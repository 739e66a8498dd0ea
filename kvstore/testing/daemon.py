"""A real `kvstore serve` process for tests: started, stopped, killed, started again."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Protocol, Self

import kvstore
from kvstore.client import Client
from kvstore.model.block import BlockKey, Namespace

START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 20.0
POLL_S = 0.01
_SERVING = re.compile(r"node=serving .*? port=(\d+) metrics_port=(\d+)")


class Process(Protocol):
    """What is used here of a `subprocess.Popen`."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, number: int, /) -> None: ...


class Launch(Protocol):
    """Starts a process; called as `subprocess.Popen` is."""

    def __call__(
        self,
        command: Sequence[str],
        *,
        stdout: IO[bytes],
        stderr: IO[bytes],
        env: Mapping[str, str],
    ) -> Process: ...


def _launched(
    command: Sequence[str], *, stdout: IO[bytes], stderr: IO[bytes], env: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdout=stdout, stderr=stderr, env=env)


class Daemon:
    """One daemon on free ports and a unix socket in a short temporary directory.

    overrides: as `kvstore serve --set` takes them. file: give it a file tier in that directory.
    tcp: listen on a free port of loopback as well, open to every user of the host. environment: of
    the process, beside our own. launch: starts the process. A context manager; at its end the
    process and the directory are gone.
    """

    launch: Launch = staticmethod(_launched)

    def __init__(self, *overrides: str, file: bool = True, tcp: bool = False) -> None:
        # Not pytest's tmp_path: a unix socket's path has at most 107 bytes.
        self.directory = Path(tempfile.mkdtemp(prefix="kv-"))
        self.socket = self.directory / "run/k.sock"
        self.log = self.directory / "log"
        self.printed = self.directory / "printed"  # on stdout
        self.port = 0
        self.metrics_port = 0
        self.environment: dict[str, str] = {}
        self._process: Process | None = None
        settings = [
            f"server.socket={self.socket}",
            "server.metrics_listen=127.0.0.1:0",
            "dram.capacity=64MiB",
            "dram.extent=32MiB",
            "file.capacity=1GiB",
            "file.segment=64MiB",
        ]
        if tcp:
            settings += ["server.listen=127.0.0.1:0", "server.listen_open=true"]
        settings.append(f"file.path={self.directory / 'file' if file else ''}")
        self._arguments = [f"--set={each}" for each in (*settings, *overrides)]

    @property
    def target(self) -> str:
        """Address for clients that map the arena."""
        return f"unix:{self.socket}"

    @property
    def address(self) -> str:
        """Address for clients over TCP, of a daemon with `tcp`."""
        assert self.port, "this daemon does not listen on TCP"
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def command(self, *arguments: str) -> list[str]:
        """Return the `kvstore` command with these arguments; a test may run it its own way."""
        return [sys.executable, "-m", "kvstore.cli", *arguments]

    def add(self, *overrides: str) -> None:
        """Set something more at every start from now on."""
        self._arguments += [f"--set={each}" for each in overrides]

    def start(self, *overrides: str, wait: bool = True) -> Self:
        """Start the process and wait until it serves. Raises RuntimeError with its log if not."""
        arguments = [*self._arguments, *(f"--set={each}" for each in overrides)]
        # Our root first, then whatever this process finds its packages by.
        path = [str(Path(kvstore.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        self.log.unlink(missing_ok=True)
        with self.log.open("wb") as log, self.printed.open("wb") as printed:
            self._process = self.launch(
                self.command("serve", *arguments),
                stdout=printed,
                stderr=log,
                env={
                    **os.environ,
                    **self.environment,
                    "PYTHONPATH": os.pathsep.join(filter(None, path)),
                },
            )
        if wait:
            self._await_serving()
        return self

    def kill(self) -> None:
        """SIGKILL: what a crash looks like."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """SIGTERM: drain. Returns the exit code."""
        return self._end(signal.SIGTERM)

    def wait(self) -> int:
        """Wait for a daemon that is expected to end by itself. Returns the exit code."""
        assert self._process is not None
        return self._process.wait(STOP_TIMEOUT_S)

    @property
    def page_address(self) -> str:
        """Where its page is, with the token in it."""
        return self.printed.read_text().partition("page: ")[2].strip()

    def output(self) -> str:
        """Return what the daemon logged since its last start."""
        return self.log.read_text()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.alive:
            self.kill()
        shutil.rmtree(self.directory)

    def _end(self, number: signal.Signals) -> int:
        assert self._process is not None
        self._process.send_signal(number)
        return self._process.wait(STOP_TIMEOUT_S)

    def _await_serving(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            found = _SERVING.search(self.output())
            if found:
                self.port, self.metrics_port = int(found[1]), int(found[2])
                return
            if self._process.poll() is not None:
                break
            time.sleep(POLL_S)
        raise RuntimeError(f"the daemon did not start:\n{self.output()}")


@contextmanager
def restarted_with(
    namespace: Namespace, keys: Sequence[BlockKey], records: Sequence[bytes]
) -> Iterator[Daemon]:
    """Yield a daemon of which only the file tier has these records: it has been killed since."""
    with Daemon() as daemon:
        with Client(daemon.start().target) as client:
            client.register(namespace)
            if not client.put(namespace.id, keys, records, durable=True).durable:
                raise RuntimeError("the records are not durable")
        daemon.kill()
        yield daemon.start()
