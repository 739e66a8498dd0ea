"""A vLLM engine that obeys: one JSON command per line on stdin, one JSON answer per line.

Answers go to the file descriptor given as the only argument; vLLM itself writes to stdout. The
engine core runs in this process, so commands can look into both halves of the connector.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

SAVED_WITHIN_S = 10.0


class Engine:
    """The commands; every public method is one."""

    def __init__(self, answers: Any) -> None:
        self._answers = answers

    def start(self, model: str, connector: dict[str, Any] | None, **options: Any) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        transfer = None
        if connector is not None:
            transfer = KVTransferConfig(
                kv_connector="KVStoreConnector",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config=connector,
            )
        if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
            options["distributed_executor_backend"] = "uni"
        defaults = {
            "block_size": 32,
            "max_model_len": 4096,
            "max_num_seqs": 8,
            "enforce_eager": True,
            "enable_prefix_caching": True,
            "disable_log_stats": False,
            "seed": 0,
        }
        self.llm = LLM(model=model, kv_transfer_config=transfer, **{**defaults, **options})

    def generate(self, prompts: list[list[int]], max_tokens: int = 16, **extra: Any) -> Any:
        """Return the generated tokens of each prompt; all are submitted at once."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        requests = [{"prompt_token_ids": prompt, **extra} for prompt in prompts]
        outputs = self.llm.generate(requests, sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def settle(self) -> None:
        """Deliver and finish all saves. Without requests nobody steps an in-process engine."""
        core = self.llm.llm_engine.engine_core.engine_core
        while core.scheduler.has_requests():
            core.step_fn()
        if not self._worker.saver.drain(SAVED_WITHIN_S):
            raise TimeoutError("saves are stuck")

    def reset_prefix_cache(self, settle: bool = True) -> bool:
        """Forget the engine's own cached blocks, so that hits must come from the daemon."""
        if settle:
            self.settle()
        return bool(self.llm.reset_prefix_cache())

    def reset_all(self) -> bool:
        """The same, and the connector's."""
        return bool(self.llm.reset_prefix_cache(reset_connector=True))

    def counters(self) -> dict[str, float]:
        """Return the totals of both halves, and the engine's preemptions."""
        totals = dict(self._worker.counters.totals)
        for name, count in self._scheduler.counters.totals.items():
            totals[name] += count
        for metric in self.llm.get_metrics():
            if metric.name == "vllm:num_preemptions":
                totals["preemptions"] = metric.value
        return totals

    def metrics(self) -> dict[str, float]:
        """Return the connector's counters as Prometheus would see them."""
        return {
            metric.name.removeprefix("vllm:kvstore_"): metric.value
            for metric in self.llm.get_metrics()
            if metric.name.startswith("vllm:kvstore_")
        }

    def hold_loads(self, gate: str) -> None:
        """Make the next load say "loading" before it copies, and wait until file `gate` exists."""
        pages = self._worker.loader._pages
        write = pages.write

        def held(*arguments: Any) -> None:
            pages.write = write
            self._say({"event": "loading"})
            while not Path(gate).exists():
                threading.Event().wait(0.005)
            write(*arguments)

        pages.write = held

    def slow_saves(self, seconds: float) -> None:
        """Make every copy out of device pages begin this late, until called with 0."""
        pages = self._worker.saver._pages
        vars(pages).pop("read", None)
        read = pages.read

        def late(*arguments: Any) -> None:
            threading.Event().wait(seconds)
            read(*arguments)

        if seconds:
            pages.read = late

    @property
    def _worker(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group().worker_side

    @property
    def _scheduler(self) -> Any:
        core = self.llm.llm_engine.engine_core.engine_core
        return core.scheduler.connector.scheduler_side

    def _say(self, answer: Any) -> None:
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()

    def obey(self) -> None:
        """Answer commands until stdin ends."""
        for line in sys.stdin:
            command = json.loads(line)
            name, arguments = command["do"], command["with"]
            try:
                self._say({"answer": getattr(self, name)(**arguments)})
            except Exception as error:
                self._say({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    with os.fdopen(int(sys.argv[1]), "w") as answers:
        Engine(answers).obey()
