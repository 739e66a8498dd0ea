"""Real engines in processes of their own, driven step by step."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

from kvstore.testing.daemon import Daemon

HERE = Path(__file__).parent
ANSWER_TIMEOUT_S = 120.0
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

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, name: str, /, **arguments: Any) -> None:
        """Start a command without waiting for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": name, "with": arguments}) + "\n")
        self._process.stdin.flush()

    def receive(self) -> Any:
        """Return the next answer. Raises RuntimeError with the log's end on an error."""
        ready, _, _ = select.select([self._answers], [], [], ANSWER_TIMEOUT_S)
        line = self._answers.readline() if ready else ""
        message = json.loads(line) if line else {"error": "no answer"}
        if "error" in message:
            raise RuntimeError(f"{message['error']}\n{self.log.read_text()[-6000:]}")
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
