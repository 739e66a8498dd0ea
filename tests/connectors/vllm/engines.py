"""Real engines in processes of their own, driven step by step."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from kvstore.testing.daemon import Daemon
from kvstore_bench.demo.processes import SHARED_MEMORY, session_members, shared_memory_of
from tests.connectors.vllm.engine_process import FORKED, run

HERE = Path(__file__).parent
ANSWER_TIMEOUT_S = 240.0  # four workers start on two cores, beside other tests
END_TIMEOUT_S = 30.0

_ENVIRONMENT = {
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # `in_worker` sends functions to workers
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

SEVERAL_PROCESSES = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", FORKED: "1"}
"""Of an engine whose core and workers are processes of their own."""

_ctx = multiprocessing.get_context("forkserver")
_IMPORTED = ["torch", "vllm", "vllm.entrypoints.llm", "vllm.v1.engine.llm_engine"]
"""Modules that a server imports once; each engine is forked from it. They start no thread."""


def _start_server() -> None:
    """Start the server of engines unless it runs. What is read at import is in its environment."""
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    os.environ.update(_ENVIRONMENT)
    try:
        _ctx.set_forkserver_preload(_IMPORTED)
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class EngineProcess:
    """A vLLM engine in a child process. Methods of `engine_process.Engine` are called by name."""

    def __init__(self, log: Path, **environment: str) -> None:
        self.log = log
        log.touch()
        _start_server()
        self._commands, theirs = _ctx.Pipe()
        environ = {**os.environ, **_ENVIRONMENT, **environment}
        self._process = _ctx.Process(target=run, args=(theirs, log, environ))
        self._process.start()
        theirs.close()
        self._memory: set[str] | None = None  # of its workers, in /dev/shm

    @property
    def pid(self) -> int:
        pid = self._process.pid
        assert pid is not None
        return pid

    def send(self, name: str, /, **arguments: Any) -> None:
        """Start a command without waiting for its answer."""
        self._commands.send((name, arguments))

    def receive(self) -> Any:
        """Return the next answer. Raises RuntimeError with the log's end on an error."""
        message = {"error": "no answer"}
        with contextlib.suppress(EOFError, ConnectionError):
            if self._commands.poll(ANSWER_TIMEOUT_S):
                message = self._commands.recv()
        if "error" in message:
            raise RuntimeError(f"{message['error']}\n{self.log.read_text()[-6000:]}")
        if self._memory is None:
            mapped = set().union(*map(shared_memory_of, session_members(self.pid)))
            self._memory = {name for name in mapped if name.startswith("vllm_dist_")}
        return message["answer"]

    def __call__(self, name: str, /, **arguments: Any) -> Any:
        self.send(name, **arguments)
        return self.receive()

    def generate(self, *prompts: list[int], **options: Any) -> Any:
        """Return the generated tokens: one list for one prompt, else a list of lists."""
        outputs = self("generate", prompts=prompts, **options)
        return outputs[0] if len(prompts) == 1 else outputs

    def counter(self, name: str) -> float:
        return float(self("counters").get(name, 0))

    def tokens_from_outside(self) -> float:
        """Return how many prompt tokens any connector loaded, as vLLM counts."""
        return float(self("metric", name="vllm:external_prefix_cache_hits"))

    def drafts(self, *, accepted: bool = False) -> float:
        """Return how many tokens were drafted."""
        kind = "accepted" if accepted else "draft"
        return float(self("metric", name=f"vllm:spec_decode_num_{kind}_tokens"))

    def kill(self) -> None:
        """SIGKILL, to all that it has started as well."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.join(END_TIMEOUT_S)

    def close(self) -> None:
        """End the process; if it does not, with all that it has started."""
        self._commands.close()
        self._process.join(END_TIMEOUT_S)
        if self._process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)  # its workers, too
            self._process.join()
        for name in self._memory or ():  # still there if a worker was killed
            (SHARED_MEMORY / name).unlink(missing_ok=True)


def make_models(out: Path) -> None:
    """Write the tiny models to directory `out`."""
    script = [sys.executable, str(HERE / "tiny_models.py"), str(out)]
    subprocess.run(script, check=True, capture_output=True, env={**os.environ, **_ENVIRONMENT})


def kvstore_transfer(daemon: Daemon, **extra: Any) -> dict[str, Any]:
    """Return the fields of a KVTransferConfig that has engines use this daemon."""
    return {
        "kv_connector": "KVStoreConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"target": daemon.target, **extra},
    }


def make_prompt(tokens: int, seed: int = 0) -> list[int]:
    """Return a prompt without repeated blocks."""
    return [(7 * i * i + 13 * i + 101 * seed) % 900 + 4 for i in range(tokens)]
