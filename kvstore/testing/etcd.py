"""Real etcds on loopback, in a temporary directory: started, paused, killed and emptied by pid."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvstore.model.errors import Unavailable
from kvstore.testing.ports import free_ports

START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 10.0
POLL_S = 0.05
INSTALL = "etcd is not installed: apt-get install etcd-server (Debian, Ubuntu)"
ROOT_PASSWORD = "not-a-secret-7c1e"


def has_etcd() -> bool:
    """Return whether etcd is there; `INSTALL` says how to get it."""
    return shutil.which("etcd") is not None


class Etcd:
    """One etcd, or several that are one. A context manager: at its end nothing of it is left.

    tls: certificate, key, and, if it asks for certificates, the authorities of its clients.
    options: more of etcd's own, without the dashes.
    """

    def __init__(
        self,
        count: int = 1,
        *,
        tls: tuple[Path, Path, Path | None] | None = None,
        **options: str,
    ) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="kv-etcd-"))
        self._tls = tls
        self._options = options
        ports = free_ports(2 * count)
        self.ports, self._peer_ports = ports[:count], ports[count:]
        self._processes: list[subprocess.Popen[bytes] | None] = [None] * count

    @property
    def endpoints(self) -> tuple[str, ...]:
        scheme = "https" if self._tls else "http"
        return tuple(f"{scheme}://127.0.0.1:{port}" for port in self.ports)

    def start(self, *, wait: bool = True) -> Self:
        """Start those that do not run. wait: until each answers."""
        for at, process in enumerate(self._processes):
            if process is None:
                with (self.directory / f"log-{at}").open("ab") as log:
                    self._processes[at] = subprocess.Popen(
                        self._command(at), stdout=log, stderr=log, cwd=self.directory
                    )
        if wait and self._tls is None:
            for port in self.ports:
                self._await_answer(port)
        return self

    def kill(self, at: int = 0) -> None:
        """SIGKILL. Its data stay."""
        process, self._processes[at] = self._processes[at], None
        if process is not None:
            process.kill()
            process.wait(STOP_TIMEOUT_S)

    def pause(self, at: int = 0) -> None:
        """SIGSTOP: connections stay open, and nobody answers."""
        os.kill(self._pid(at), signal.SIGSTOP)

    def resume(self, at: int = 0) -> None:
        """SIGCONT."""
        os.kill(self._pid(at), signal.SIGCONT)

    def empty(self, at: int = 0) -> None:
        """Remove what one that was killed has stored."""
        shutil.rmtree(self.directory / f"data-{at}", ignore_errors=True)

    def leader(self) -> int:
        """Return which of several leads."""
        for at, port in enumerate(self.ports):
            status = self._post(port, "maintenance/status", {})
            if status["leader"] == status["header"]["member_id"]:
                return at
        raise Unavailable("no etcd leads")

    def add_user(self, name: str, password: str, prefix: str | None) -> None:
        """Ask for passwords from now on; one user may use what begins with `prefix`, or nothing."""
        port = self.ports[0]
        for user, secret in (("root", ROOT_PASSWORD), (name, password)):
            self._post(port, "auth/user/add", {"name": user, "password": secret})
        self._post(port, "auth/role/add", {"name": "members"})
        if prefix is not None:
            begin, end = _base64(prefix), _base64(prefix[:-1] + chr(ord(prefix[-1]) + 1))
            permission = {"permType": "READWRITE", "key": begin, "range_end": end}
            self._post(port, "auth/role/grant", {"name": "members", "perm": permission})
        self._post(port, "auth/user/grant", {"user": name, "role": "members"})
        self._post(port, "auth/user/grant", {"user": "root", "role": "root"})
        self._post(port, "auth/enable", {})

    def put(self, key: str, value: bytes) -> None:
        """Write a key without a lease."""
        self._post(self.ports[0], "kv/put", {"key": _base64(key), "value": _base64(value)})

    def delete(self, key: str) -> None:
        """Delete a key."""
        self._post(self.ports[0], "kv/deleterange", {"key": _base64(key)})

    def values(self, prefix: str) -> dict[str, bytes]:
        """Return the keys that begin with `prefix`."""
        end = _base64(prefix[:-1] + chr(ord(prefix[-1]) + 1))
        found = self._post(
            self.ports[0], "kv/range", {"key": _base64(prefix), "range_end": end}
        ).get("kvs", [])
        decode = base64.b64decode
        return {decode(kv["key"]).decode(): decode(kv.get("value", "")) for kv in found}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for at in range(len(self._processes)):
            self.kill(at)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _command(self, at: int) -> list[str]:
        peers = [f"n{i}=http://127.0.0.1:{port}" for i, port in enumerate(self._peer_ports)]
        peer = f"http://127.0.0.1:{self._peer_ports[at]}"
        options = {
            "name": f"n{at}",
            "data-dir": str(self.directory / f"data-{at}"),
            "listen-client-urls": self.endpoints[at],
            "advertise-client-urls": self.endpoints[at],
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": ",".join(peers),
            "logger": "zap",
            "log-level": "error",
            **self._options,
        }
        if self._tls is not None:
            cert, key, authorities = self._tls
            options |= {"cert-file": str(cert), "key-file": str(key)}
            if authorities is not None:
                options |= {"trusted-ca-file": str(authorities), "client-cert-auth": "true"}
        return ["etcd", *(f"--{name}={value}" for name, value in options.items())]

    def _pid(self, at: int) -> int:
        process = self._processes[at]
        assert process is not None, "this etcd does not run"
        return process.pid

    def _await_answer(self, port: int) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                self._post(port, "kv/range", {"key": _base64("a")})
                return
            except (OSError, Unavailable):
                time.sleep(POLL_S)
        logs = "".join(path.read_text() for path in sorted(self.directory.glob("log-*")))
        raise Unavailable(f"etcd did not start:\n{logs[-4000:]}")

    def _post(self, port: int, method: str, message: dict[str, Any]) -> dict[str, Any]:
        """Call etcd by its JSON gateway, as its own users would."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v3/{method}", json.dumps(message).encode(), method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except urllib.error.HTTPError as error:
            with error:
                raise Unavailable(f"etcd: {error.read(500).decode()}") from error


def _base64(text: str | bytes) -> str:
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode()
