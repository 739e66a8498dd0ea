"""Real engines in processes of their own, driven from the tests step by step."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.testing.daemon import Daemon

HERE = Path(__file__).parent
ANSWER_TIMEOUT_S = 120.0
END_TIMEOUT_S = 30.0

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


class EngineProcess:
    """A vLLM engine in a child process. Methods of `engine_process.Engine` are called by name."""

    def __init__(self, log: Path, **environment: str) -> None:
        self.log = log
        reading, writing = os.pipe()
        self._answers = os.fdopen(reading)
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "engine_process.py"), str(writing)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                text=True,
                pass_fds=[writing],
                env={**os.environ, **_ENVIRONMENT, **environment},
                start_new_session=True,
            )
        os.close(writing)

    def send(self, name: str, **arguments: Any) -> None:
        """Start a command without waiting for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": name, "with": arguments}) + "\n")
        self._process.stdin.flush()

    def receive(self) -> Any:
        """Return the next answer, or event. Raises RuntimeError with the log's end on an error."""
        ready, _, _ = select.select([self._answers], [], [], ANSWER_TIMEOUT_S)
        line = self._answers.readline() if ready else ""
        message = json.loads(line) if line else {"error": "no answer"}
        if "error" in message:
            raise RuntimeError(f"{message['error']}\n{self.log.read_text()[-6000:]}")
        return message.get("answer", message)

    def __call__(self, name: str, **arguments: Any) -> Any:
        self.send(name, **arguments)
        return self.receive()

    def generate(self, *prompts: list[int], **options: Any) -> Any:
        """Return the generated tokens: one list for one prompt, else a list of lists."""
        outputs = self("generate", prompts=prompts, **options)
        return outputs[0] if len(prompts) == 1 else outputs

    def counter(self, name: str) -> float:
        return float(self("counters").get(name, 0))

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the tiny models `llama` and `gemma3`."""
    pytest.importorskip("vllm")
    out = tmp_path_factory.mktemp("models")
    script = [sys.executable, str(HERE / "tiny_models.py"), str(out)]
    subprocess.run(script, check=True, capture_output=True, env={**os.environ, **_ENVIRONMENT})
    return out


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """A daemon with a file tier that the test may kill and restart."""
    with Daemon("dram.capacity=256MiB", "dram.extent=64MiB") as daemon:
        yield daemon.start()


StartEngine = Callable[..., EngineProcess]


@pytest.fixture
def start_engine(models: Path, tmp_path: Path) -> Iterator[StartEngine]:
    """Start engines: start_engine("llama", daemon or None, **options of LLM)."""
    with contextlib.ExitStack() as stack:

        def start(
            model: str,
            daemon: Daemon | None,
            *,
            extra: dict[str, Any] | None = None,
            environment: dict[str, str] | None = None,
            **options: Any,
        ) -> EngineProcess:
            log = tmp_path / f"engine-{time.monotonic_ns()}.log"
            engine = EngineProcess(log, **(environment or {}))
            stack.callback(engine.close)
            connector = {"target": daemon.target, **(extra or {})} if daemon else None
            engine("start", model=str(models / model), connector=connector, **options)
            return engine

        yield start


def make_prompt(tokens: int, seed: int = 0) -> list[int]:
    """Return a prompt without repeated blocks."""
    return [(7 * i * i + 13 * i + 101 * seed) % 900 + 4 for i in range(tokens)]


@pytest.fixture
def prompt() -> Callable[..., list[int]]:
    return make_prompt
