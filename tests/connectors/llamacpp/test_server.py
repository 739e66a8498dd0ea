"""llama-cpp-python's own server, with a cache that outlives it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvstore import Client
from kvstore.testing.daemon import Daemon
from kvstore.testing.llamacpp import llama_site
from kvstore.testing.ports import free_ports

START_S = 60.0


@contextmanager
def server(model: Path, daemon: Daemon, log: Path) -> Iterator[Callable[[str], dict[str, Any]]]:
    """Run one; yield what asks it. At the end it is killed."""
    port = free_ports(1)[0]
    path = [*(each for each in sys.path if each), str(llama_site())]
    options = {"--model": model, "--port": port, "--n_ctx": 1024, "--n_threads": 1, "--cache": True}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "kvstore_llamacpp.server"),
                *(str(word) for option in options.items() for word in option),
            ],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path),
                "KVSTORE_TARGET": daemon.target,
            },
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    address = f"http://127.0.0.1:{port}/v1"

    def ask(prompt: str) -> dict[str, Any]:
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0.0}
        request = urllib.request.Request(
            f"{address}/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=START_S) as reply:
            answer: dict[str, Any] = json.load(reply)
            return answer

    try:
        deadline = time.monotonic() + START_S
        while True:
            try:
                urllib.request.urlopen(f"{address}/models", timeout=START_S).close()
                break
            except (urllib.error.URLError, ConnectionError):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)
        yield ask
    finally:
        process.kill()
        process.wait()


def test_a_server_that_was_killed_resumes(
    models: dict[str, Path], own_daemon: Daemon, tmp_path: Path
) -> None:
    for package in (
        "fastapi",
        "uvicorn",
        "sse_starlette",
        "pydantic_settings",
        "starlette_context",
    ):
        pytest.importorskip(package)
    prompt = "".join(f" w{number % 90}" for number in range(100))
    answers = []
    for number in range(2):
        log = tmp_path / f"{number}.log"
        with server(models["llama"], own_daemon, log) as ask:
            answers.append(ask(prompt)["choices"][0]["text"])
            deadline = time.monotonic() + START_S
            while number == 0 and not stored(own_daemon):
                assert time.monotonic() < deadline
                time.sleep(0.05)
        if number:
            assert "load=done" in log.read_text()
            assert "cache=ram ignored" in log.read_text()
    assert answers[0] == answers[1]


def stored(daemon: Daemon) -> bool:
    with Client(daemon.target) as client:
        return client.admin.stats()["blocks"] > 0
