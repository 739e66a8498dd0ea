"""One `kvstore serve` process of the demo."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore import Client
from kvstore.model.errors import Unavailable
from kvstore.testing.ports import free_port
from kvstore_bench.chat.metrics import Counters
from kvstore_bench.demo.engine import fetch_counters
from kvstore_bench.demo.processes import Child

START_TIMEOUT_S = 30.0
FLUSH_TIMEOUT_S = 60.0


@dataclass(slots=True)
class Daemon:
    """A started daemon; `child` owns the process."""

    child: Child
    target: str
    metrics_port: int

    def flush(self) -> None:
        """Wait until everything saved so far is durable. Raises Unavailable past a deadline."""
        with Client(self.target, timeout_s=FLUSH_TIMEOUT_S) as client:
            if not client.admin.flush(FLUSH_TIMEOUT_S):
                raise Unavailable(f"the daemon has not flushed within {FLUSH_TIMEOUT_S:.0f} s")

    def counters(self) -> Counters:
        """Return its Prometheus counters. Raises Unavailable."""
        return fetch_counters(f"http://127.0.0.1:{self.metrics_port}/metrics", "kvstore")

    def wait_healthy(self) -> None:
        """Wait until it answers. Raises Unavailable."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            self.child.check()
            try:
                with Client(self.target) as client:
                    client.admin.stats()
                self.counters()
                return
            except Unavailable:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)


def start_daemon(
    *,
    scratch: Path,
    directory: Path,
    dram_nbytes: int,
    log: Path,
    program: Sequence[str] | None = None,
    settings: Mapping[str, str] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Daemon:
    """Start a daemon with its socket in `scratch`, whose path must be short.

    program: runs it instead of `kvstore`. settings: further ones. environ: of the process.
    """
    metrics_port = free_port()
    socket = scratch / "kvstore.sock"
    all_settings = {
        "server.socket": str(socket),
        "server.listen": "",
        "server.metrics_listen": f"127.0.0.1:{metrics_port}",
        "dram.capacity": str(dram_nbytes),
        "file.path": str(directory),
        "file.capacity": "16GiB",
        **(settings or {}),
    }
    program = program or [str(Path(sys.executable).with_name("kvstore"))]
    command = [*program, "serve", *_overrides(all_settings.items())]
    child = Child("kvstore", command, environ=environ, log=log)
    return Daemon(child, f"unix:{socket}", metrics_port)


def _overrides(settings: Iterable[tuple[str, str]]) -> Iterable[str]:
    for key, value in settings:
        yield from ("--set", f"{key}={value}")
