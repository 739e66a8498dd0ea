"""A real indexer of KV events for tests and benchmarks: Dynamo's, in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvstore.testing.ports import free_ports

START_S = 30.0
ANSWER_S = 5.0
MODULE = "dynamo.indexer"


def indexer_site() -> Path | None:
    """Return the folder that its package was installed into; None: it is not here.

    That is what KVSTORE_DYNAMO names, or `dynamo` beside this environment's folders, where `make
    setup` puts it.
    """
    named = os.environ.get("KVSTORE_DYNAMO")
    site = Path(named) if named else Path(sys.prefix) / "dynamo"
    return site if (site / "dynamo" / "indexer").is_dir() else None


class Indexer:
    """One indexer on a free port of loopback. A context manager: at its end it is gone."""

    def __init__(self, site: Path | None = None) -> None:
        """site: as `indexer_site`. Raises FileNotFoundError without one."""
        site = site or indexer_site()
        if site is None:
            raise FileNotFoundError("Dynamo's indexer is not installed: `make setup` does that")
        self._site = site.resolve()
        (self.port,) = free_ports(1)
        self.directory = tempfile.TemporaryDirectory(prefix="kv-indexer-")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> Self:
        """Start it, and wait until it answers."""
        log = Path(self.directory.name) / "log"
        environment = {**os.environ, "PYTHONPATH": str(self._site), "DYN_LOG": "warn"}
        command = [sys.executable, "-B", "-m", MODULE, "--port", str(self.port), "--threads", "1"]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                env=environment,
                cwd=self.directory.name,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + START_S
        while True:
            try:
                self.ask("/health")
                return self
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise TimeoutError(f"the indexer did not start: {self.log()}") from None
                time.sleep(0.02)

    def kill(self) -> None:
        """End it with SIGKILL."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()

    def log(self) -> str:
        return (Path(self.directory.name) / "log").read_text(errors="replace")[-2000:]

    def ask(self, path: str, body: object = None) -> Any:
        """Return the JSON that it answers. Raises OSError, also for a refusal."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data=data, headers={"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            return json.loads(answer.read() or b"null")

    def matched(self, tokens: Sequence[int], model: str, instance: int = 1) -> dict[str, Any]:
        """Return the tokens of a prefix that an instance has, by tier: gpu, cpu, disk; they go on
        from one tier to the next. Empty: none."""
        try:
            found = self.ask("/query", {"model_name": model, "token_ids": list(tokens)})
        except urllib.error.HTTPError as error:
            if error.code == 404:  # nobody is registered for the model
                return {}
            raise
        return dict(found.get("instances", {}).get(str(instance), {}))

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        self.directory.cleanup()
