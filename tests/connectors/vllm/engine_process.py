"""A vLLM engine that obeys: a command comes over a pipe, and an answer goes back.

The process is forked from one that has imported vLLM, because the import takes seconds. The
engine core runs in this process, unless VLLM_ENABLE_V1_MULTIPROCESSING says otherwise: commands can
look into both halves of the connector. What happens inside workers is in `in_worker.py`.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import threading
from concurrent import futures
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

from kvstore.testing.wait import until
from tests.connectors.vllm import in_worker, latent_kernels
from tests.connectors.vllm.traffic import Traffic, reference

SAVED_WITHIN_S = 10.0
FORKED = "KVSTORE_TEST_FORKED_WORKERS"
"""The variable whose "1" has the processes of an engine forked."""


class Engine:
    """The commands; every public method is one."""

    def start(self, model: str, transfer: dict[str, Any] | None, **options: Any) -> None:
        """transfer: fields of KVTransferConfig; None: no connector."""
        from vllm import LLM
        from vllm.config import KVTransferConfig

        if os.environ.get(latent_kernels.TORCH_KERNELS) == "1":
            latent_kernels.install()  # processes that are forked have them, too
        if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
            options.setdefault("distributed_executor_backend", "uni")
        defaults = {
            "block_size": 32,
            "max_model_len": 4096,
            "max_num_seqs": 8,
            "enforce_eager": True,
            "enable_prefix_caching": True,
            "disable_log_stats": False,
            "seed": 0,
        }
        config = KVTransferConfig(**transfer) if transfer is not None else None
        self.llm = LLM(model=model, kv_transfer_config=config, **{**defaults, **options})
        if config is not None:
            self.in_workers("await_weights")
            if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
                ours = in_worker.ours(self._core.scheduler.connector)
                until(lambda: ours is None or in_worker.knows(ours), in_worker.GATE_S)

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int = 16,
        kv_transfer_params: dict[str, Any] | None = None,
        adapter: tuple[str, int, str] | None = None,
        **extra: Any,
    ) -> Any:
        """Return the generated tokens of each prompt; all are submitted at once.

        adapter: name, number and folder of a LoRA adapter.
        """
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        sampling = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            extra_args={"kv_transfer_params": kv_transfer_params} if kv_transfer_params else None,
        )
        requests = [{"prompt_token_ids": prompt, **extra} for prompt in prompts]
        outputs = self.llm.generate(
            requests,
            sampling,
            use_tqdm=False,
            lora_request=LoRARequest(*adapter) if adapter else None,
        )
        return [list(output.outputs[0].token_ids) for output in outputs]

    def prefill(self, prompt: list[int], kv_transfer_params: dict[str, Any]) -> dict[str, Any]:
        """Compute a prompt for another engine; return with what that goes on."""
        from vllm import SamplingParams

        extra = {"kv_transfer_params": kv_transfer_params}
        sampling = SamplingParams(temperature=0, max_tokens=1, extra_args=extra)
        (output,) = self.llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
        answer: dict[str, Any] = output.kv_transfer_params
        return answer

    def reference(self, prompts: list[list[int]], max_tokens: int) -> list[dict[str, Any]]:
        """Answer each prompt; return turns as `Traffic` wants them."""
        return reference(self.llm, prompts, max_tokens)

    def submit(self, name: str, prompt: list[int], max_tokens: int = 16) -> None:
        """Hand a request to the engine without stepping it."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, sampling)

    def step(self, times: int = 1) -> dict[str, list[int]]:
        """Step the engine; return the tokens of the requests that finished."""
        outputs = [output for _ in range(times) for output in self.llm.llm_engine.step()]
        return {
            output.request_id: list(output.outputs[0].token_ids)
            for output in outputs
            if output.finished
        }

    def abort(self, name: str) -> None:
        self.llm.llm_engine.abort_request([name])

    def held(self) -> dict[str, int]:
        """Return what requests still hold in the engine and the connector, without the zeros."""
        scheduler, worker = self._core.scheduler, self._worker
        pool = scheduler.kv_cache_manager.block_pool
        held = {
            "requests": len(scheduler.requests),
            "device_blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
            "tracked": len(self._scheduler._tracked),
            "ran": len(self._scheduler._ran),
            "pending_saves": len(self._scheduler._finished),
            "load_orders": len(self._scheduler._loads),
            "saves": len(worker.saver._reading) + len(worker.saver._queue),
            "loads": worker.loader._pending,
        }
        return {name: count for name, count in held.items() if count}

    def begin_traffic(self, **options: Any) -> None:
        self._traffic = Traffic(self.llm.llm_engine, **options)

    def traffic(self, seconds: float) -> dict[str, Any]:
        """Keep the engine busy for a while; return what was counted since the beginning."""
        return self._traffic.run(seconds)

    def answer_times(self) -> list[float]:
        """Return the seconds of each answer to the traffic since the last call."""
        return self._traffic.answer_times()

    def end_traffic(self, wait_s: float) -> dict[str, Any]:
        """Let what runs finish; return the counts."""
        return self._traffic.end(wait_s)

    def settle(self) -> None:
        """Deliver and finish all saves. Without requests nobody steps an in-process engine."""
        while self._core.scheduler.has_requests():
            self._core.step_fn()
        if self._worker is not None and not self._worker.saver.drain(SAVED_WITHIN_S):
            raise TimeoutError("saves are stuck")

    def reset_prefix_cache(self, settle: bool = True) -> bool:
        """Forget the engine's own cached blocks, so that hits must come from the daemon."""
        if settle:
            self.settle()
        return bool(self.llm.reset_prefix_cache())

    def reset_all(self) -> bool:
        """The same, and the connector's."""
        self.settle()
        return bool(self.llm.reset_prefix_cache(reset_connector=True))

    def reset_host_pool(self) -> bool:
        """The same for vLLM's own offloading, whose second tier is told nothing of it."""
        (tier,) = self._core.scheduler.connector.connector_scheduler.manager.secondary_tiers
        drained = mock.Mock(side_effect=lambda: futures.wait(tier._running))
        with mock.patch.object(tier, "drain_jobs", drained):
            return self.reset_all()

    def counters(self) -> dict[str, float]:
        """Return the totals of both halves, and the engine's preemptions."""
        totals = dict(self._worker.counters.totals)
        for name, count in self._scheduler.counters.totals.items():
            totals[name] += count
        for metric in self.llm.get_metrics():
            if metric.name == "vllm:num_preemptions":
                totals["preemptions"] = metric.value
        return totals

    def connected(self) -> bool:
        """Say whether both halves may ask the daemon."""
        clients = self._scheduler._client, self._worker.loader._client
        return all(client.available and client.local for client in clients)

    def metrics(self) -> dict[str, float]:
        """Return the connector's counters as Prometheus would see them."""
        return {
            metric.name.removeprefix("vllm:kvstore_"): metric.value
            for metric in self.llm.get_metrics()
            if metric.name.startswith("vllm:kvstore_")
        }

    def in_workers(self, do: str, **arguments: Any) -> list[Any]:
        """Call a function of `in_worker` in every worker; return the answers by rank."""
        answers: list[Any] = self.llm.collective_rpc(getattr(in_worker, do), kwargs=arguments)
        return answers

    def groups(self) -> int:
        """Return how many KV cache groups the engine has."""
        return len(self._scheduler._namespace.groups)

    def metric(self, name: str) -> float:
        """Return the sum of one of vLLM's own counters."""
        return float(sum(each.value for each in self.llm.get_metrics() if each.name == name))

    def hold_loads(self, gate: str) -> None:
        """Make the next load say "loading" before it copies, and wait until file `gate` exists."""
        in_worker.hold_loads(None, gate=gate)

    def hold_saves(self, gate: str) -> None:
        """The same for the next save."""
        in_worker.hold_saves(None, gate=gate)

    def slow_saves(self, seconds: float) -> None:
        """Make every copy out of device pages begin this late, until called with 0."""
        pages = self._worker.saver._pages
        name = "encode" if pages.coded else "read"
        vars(pages).pop(name, None)
        copy = getattr(pages, name)

        def late(*arguments: Any) -> Any:
            threading.Event().wait(seconds)
            return copy(*arguments)

        if seconds:
            setattr(pages, name, late)

    @property
    def _worker(self) -> Any:
        return in_worker.side()

    @property
    def _scheduler(self) -> Any:
        return in_worker.ours(self._core.scheduler.connector).scheduler_side

    @property
    def _core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    def obey(self, commands: Connection) -> None:
        """Answer commands until the other end is closed."""
        while True:
            try:
                name, arguments = commands.recv()
            except (EOFError, ConnectionError):
                return
            try:
                answer = {"answer": getattr(self, name)(**arguments)}
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            commands.send(answer)


def _fork_workers() -> None:
    """Let vLLM fork its processes. On a CPU it starts them anew, and each imports for seconds."""
    get_context = multiprocessing.get_context

    def forked(method: str | None = None) -> Any:
        return get_context("fork" if method == "spawn" else method)

    multiprocessing.get_context = forked  # type: ignore[assignment]


def run(commands: Connection, log: Path, environment: dict[str, str]) -> None:
    """Be an engine: with this environment, in a session of its own, all output into the log."""
    os.setsid()
    with log.open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    if os.environ.get(FORKED) == "1":
        _fork_workers()
    Engine().obey(commands)
    atexit._run_exitfuncs()  # a fork ends without them, and vLLM ends its own processes by one
