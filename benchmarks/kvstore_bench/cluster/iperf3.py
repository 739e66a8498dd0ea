"""iperf3: what TCP does here at best, with as many streams as a daemon has threads for peers."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
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

Bandwidth = Callable[[], float]


def has_iperf3() -> bool:
    """Return whether iperf3 is there; `INSTALL` says how to get it."""
    return shutil.which("iperf3") is not None


@contextmanager
def loopback(streams: int) -> Iterator[Bandwidth]:
    """Yield what measures bytes/s over 127.0.0.1, as the receiver counts them."""
    (port,) = free_ports(1)
    serve = ["iperf3", "--server", "--forceflush", "--bind", "127.0.0.1", "--port", str(port)]
    with tempfile.NamedTemporaryFile("w") as log:  # a pipe that nobody reads would stop it
        server = subprocess.Popen(serve, stdout=log.fileno(), stderr=subprocess.STDOUT)
        try:
            try:
                until(lambda: _READY in Path(log.name).read_text())
            except TimeoutError as error:
                raise Unavailable("the server of iperf3 did not start") from error
            yield lambda: _measured(port, streams)
        finally:
            server.kill()
            server.wait()


def _measured(port: int, streams: int) -> float:
    command = ["iperf3", "--client", "127.0.0.1", "--port", str(port), "--json"]
    command += ["--parallel", str(streams), "--time", str(SECONDS)]
    said = ""
    for _ in range(ATTEMPTS):  # its server may not have ended the test before
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        said = (done.stderr or done.stdout).strip()[-300:]
        received = json.loads(done.stdout or "{}").get("end", {}).get("sum_received")
        if done.returncode == 0 and received:
            return float(received["bits_per_second"]) / 8
        time.sleep(AGAIN_S)
    raise Unavailable(f"iperf3 failed: {said}")
