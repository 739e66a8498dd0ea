"""LMCache's own server in a process of its own, with a daemon as its L2."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvstore.model.errors import Unavailable
from kvstore.testing.lmcache import lmcache_environment
from kvstore.testing.ports import free_ports

START_S = 120.0
END_S = 20.0
POLL_S = 0.05


class Server:
    """One server on free ports of loopback. A context manager: at its end it is gone.

    chunk_tokens: of its chunks. params: of the native client, beside its target.
    """

    def __init__(
        self, site: Path, target: str, log: Path, *, chunk_tokens: int, params: dict[str, Any]
    ) -> None:
        self._site, self._log = site, log
        self._port, self._http = free_ports(2)
        adapter = {
            "type": "native_plugin",
            "module_path": "kvstore_lmcache",
            "class_name": "Client",
            "adapter_params": {"target": target, **params},
        }
        self._arguments = [
            *("server", "--host", "127.0.0.1", "--port", str(self._port)),
            *("--http-host", "127.0.0.1", "--http-port", str(self._http)),
            *("--transport", "zmq", "--supported-transfer-mode", "auto"),
            "--disable-metrics",  # they need one more exporter
            *("--no-l1-use-lazy", "--l1-size-gb", "0.5", "--eviction-policy", "LRU"),
            *("--chunk-size", str(chunk_tokens), "--l2-adapter", json.dumps(adapter)),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"tcp://127.0.0.1:{self._port}"

    def start(self) -> Self:
        """Start it, and wait until it serves. Raises Unavailable with the end of its log."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lmcache.cli.main", *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=lmcache_environment(self._site),
                start_new_session=True,
            )
        deadline = time.monotonic() + START_S
        while self._process.poll() is None and time.monotonic() < deadline:
            if _listens(self._port) and _listens(self._http):
                return self
            time.sleep(POLL_S)
        self.kill()
        raise Unavailable(f"LMCache's server did not start: {self._log.read_text()[-2000:]}")

    def kill(self) -> None:
        """SIGKILL: what a crash looks like."""
        self._end(signal.SIGKILL)

    def clear_l1(self) -> None:
        """Have it drop its own copies, so that the next loads come from the daemon."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._http}/cache/clear", data=b"{}", method="POST"
        )
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=END_S):
            pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is not None and self._process.poll() is None:
            self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(number)
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_S)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
