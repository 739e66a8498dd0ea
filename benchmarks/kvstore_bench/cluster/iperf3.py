"""iperf3: what TCP does here at best, with as many streams as a daemon has threads for peers."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvstore.model.errors import Unavailable
from kvstore.testing.ports import free_ports
from kvstore.testing.wait import until

INSTALL = "iperf3 is not installed: apt-get install iperf3 (Debian), dnf install iperf3 (Fedora)"
TIMEOUT_S = 60.0
ATTEMPTS, AGAIN_S = 5, 0.5
SECONDS = 1  # of one measurement
_READY = "Server listening"


def has_iperf3() -> bool:
    """Return whether iperf3 is there; `INSTALL` says how to get it."""
    return shutil.which("iperf3") is not None


class Iperf3:
    """Its client, of a server that runs."""

    def __init__(self, port: int, streams: int) -> None:
        self._command = ["iperf3", "--client", "127.0.0.1", "--port", str(port), "--json"]
        self._command += ["--parallel", str(streams)]
        self._streams = streams

    def measure(self) -> float:
        """Return bytes/s at full speed, as the receiver counts them."""
        said = ""
        for _ in range(ATTEMPTS):  # its server may not have ended the test before
            done = subprocess.run(
                [*self._command, "--time", str(SECONDS)],
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
            said = (done.stderr or done.stdout).strip()[-300:]
            received = json.loads(done.stdout or "{}").get("end", {}).get("sum_received")
            if done.returncode == 0 and received:
                return float(received["bits_per_second"]) / 8
            time.sleep(AGAIN_S)
        raise Unavailable(f"iperf3 failed: {said}")

    @contextmanager
    def running(self, bytes_per_s: int) -> Iterator[None]:
        """Send so many bytes a second, all streams together, until the end."""
        rate = max(1, 8 * bytes_per_s // self._streams)
        command = [*self._command, "--time", "0", "--bitrate", str(rate)]
        time.sleep(AGAIN_S)  # see `measure`
        client = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            time.sleep(AGAIN_S)
            yield
            if client.poll() is not None:  # so what was measured was beside nothing
                raise Unavailable(f"iperf3 ended too soon, with {client.returncode}")
        finally:
            client.kill()
            client.wait()


@contextmanager
def loopback(streams: int) -> Iterator[Iperf3]:
    """Run a server on 127.0.0.1; yield its client."""
    (port,) = free_ports(1)
    serve = ["iperf3", "--server", "--forceflush", "--bind", "127.0.0.1", "--port", str(port)]
    with tempfile.NamedTemporaryFile("w") as log:  # a pipe that nobody reads would stop it
        server = subprocess.Popen(serve, stdout=log.fileno(), stderr=subprocess.STDOUT)
        try:
            try:
                until(lambda: _READY in Path(log.name).read_text())
            except TimeoutError as error:
                raise Unavailable("the server of iperf3 did not start") from error
            yield Iperf3(port, streams)
        finally:
            server.kill()
            server.wait()
