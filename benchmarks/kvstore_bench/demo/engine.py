"""One `vllm serve` process: how it is started, asked and counted."""

from __future__ import annotations

import http.client
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvstore.model.errors import Unavailable
from kvstore.testing.ports import free_port
from kvstore_bench.chat.metrics import Counters, parse_counters
from kvstore_bench.demo.machine import Machine
from kvstore_bench.demo.processes import Child

BLOCK_TOKENS = 32
CHUNK_TOKENS = 2048
START_TIMEOUT_S = 300.0
REQUEST_TIMEOUT_S = 300.0
GPU_MEMORY_UTILIZATION = 0.2  # four engines share the device
KV_SPACE_GIB = 2
SERVED_NAME = "demo"
# Tensors of one layer are freed and wanted again in the next: giving them back to the kernel each
# time costs a prefill on the CPU. vLLM advises another allocator for that.
KEEP_MEMORY = ":".join(
    (
        "glibc.malloc.hugetlb=1",
        "glibc.malloc.mmap_threshold=33554432",
        "glibc.malloc.trim_threshold=1073741824",
        "glibc.malloc.top_pad=67108864",
    )
)
CORE_PROCESS = "VLLM::EngineCor"  # as far as Linux keeps the name


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What tells engines apart. blocks: size of its own KV space, None is all there is, in blocks
    of block_tokens. chunk_tokens: computed in one step. host: where it listens. enter: what runs
    its command there, such as in a network namespace."""

    name: str
    model: Path
    machine: Machine
    dtype: str
    threads: int
    tokens_max: int
    blocks: int | None = None
    block_tokens: int = BLOCK_TOKENS
    connector: Mapping[str, Any] | None = None
    chunk_tokens: int = CHUNK_TOKENS
    host: str = "127.0.0.1"
    enter: tuple[str, ...] = ()

    def arguments(self, port: int) -> list[str]:
        """Return the command line."""
        command = [
            *self.enter,
            *(str(Path(sys.executable).with_name("vllm")), "serve", str(self.model)),
            *("--host", self.host, "--port", str(port), "--served-model-name", SERVED_NAME),
            *("--dtype", self.dtype, "--max-model-len", str(self.tokens_max)),
            *("--block-size", str(self.block_tokens), "--max-num-seqs", "4"),
            *("--max-num-batched-tokens", str(self.chunk_tokens), "--enforce-eager"),
            # Prompts and answers are token ids; making its pools of tokenizers takes vLLM 20 s.
            "--skip-tokenizer-init",
        ]
        if self.machine.gpu:
            command += ["--gpu-memory-utilization", str(GPU_MEMORY_UTILIZATION)]
        if self.blocks is not None:
            command += ["--num-gpu-blocks-override", str(self.blocks)]
        if self.connector is not None:
            command += ["--kv-transfer-config", json.dumps(self.connector)]
        return command

    def environ(self, scratch: Path) -> dict[str, str]:
        """Return the environment; vLLM's temporary files and caches go to `scratch`."""
        cpus = sorted(os.sched_getaffinity(0))
        # vLLM starts as many threads as it is told CPUs, so it can be told them only if all count.
        bound = ",".join(map(str, cpus)) if self.threads == len(cpus) else "nobind"
        cpu = {
            "OMP_NUM_THREADS": str(self.threads),
            "VLLM_CPU_OMP_THREADS_BIND": bound,
            "VLLM_CPU_KVCACHE_SPACE": str(KV_SPACE_GIB),
            "GLIBC_TUNABLES": KEEP_MEMORY,
        }
        return {
            **os.environ,
            **({} if self.machine.gpu else cpu),
            "VLLM_HOST_IP": self.host,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_SERVER_DEV_MODE": "1",  # for reset_prefix_cache
            "VLLM_CACHE_ROOT": str(scratch / "vllm"),
            "TMPDIR": str(scratch),
        }


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer. ttft_s: from sending the request to the first token."""

    ttft_s: float
    latency_s: float
    tokens: tuple[int, ...]


@dataclass(slots=True)
class Engine:
    """A started engine; `child` owns the processes."""

    spec: EngineSpec
    child: Child
    port: int
    started_s: float = field(default_factory=time.monotonic)

    def wait_healthy(self) -> float:
        """Wait until it answers; return the seconds since its start. Raises Unavailable."""
        deadline = self.started_s + START_TIMEOUT_S
        while time.monotonic() < deadline:
            self.child.check()
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    break
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        else:
            raise Unavailable(f"{self.spec.name} is not healthy after {START_TIMEOUT_S:.0f} s")
        if not self.spec.machine.gpu:
            # It polls for the model's answer: let it not take a core from the threads that compute.
            self.child.yield_to_others(CORE_PROCESS)
        return time.monotonic() - self.started_s

    def ask(
        self, prompt: Sequence[int], answer_tokens: int, *, port: int = 0, request_id: str = ""
    ) -> Reply:
        """Stream one greedy answer of exactly so many tokens. Raises Unavailable.

        port: of a proxy on the engine's host, instead of its own.
        """
        body = json.dumps(
            {
                "model": SERVED_NAME,
                "prompt": list(prompt),
                "max_tokens": answer_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "return_token_ids": True,
            }
        )
        headers = {"Content-Type": "application/json"}
        if request_id:
            headers["X-Request-Id"] = request_id
        connection = http.client.HTTPConnection(
            self.spec.host, port or self.port, timeout=REQUEST_TIMEOUT_S
        )
        try:
            connection.connect()
            started = time.perf_counter()
            connection.request("POST", "/v1/completions", body, headers)
            reply = _read_stream(connection.getresponse(), started)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.child.check()
            raise Unavailable(f"{self.spec.name}: {error}") from error
        finally:
            connection.close()
        if len(reply.tokens) != answer_tokens:
            raise Unavailable(f"{self.spec.name} answered {len(reply.tokens)} tokens")
        return reply

    def counters(self) -> Counters:
        """Return its Prometheus counters. Raises Unavailable."""
        return fetch_counters(f"{self.url}/metrics", self.spec.name)

    def forget_prefixes(self) -> None:
        """Empty the engine's own prefix cache, so that a hit can only come from elsewhere."""
        request = urllib.request.Request(f"{self.url}/reset_prefix_cache", method="POST")
        with urllib.request.urlopen(request, timeout=30):
            pass

    @property
    def url(self) -> str:
        """Its origin."""
        return f"http://{self.spec.host}:{self.port}"


def start_engine(spec: EngineSpec, *, scratch: Path, log: Path, port: int = 0) -> Engine:
    """Start `vllm serve`; `wait_healthy` comes next. port: a free one of loopback by default."""
    port = port or free_port()
    child = Child(spec.name, spec.arguments(port), environ=spec.environ(scratch), log=log)
    return Engine(spec, child, port)


def with_kvstore(spec: EngineSpec, name: str, target: str, **options: str) -> EngineSpec:
    """Return the same engine with our connector, a client of the daemon at `target`.

    options: further ones of the connector."""
    connector = {
        "kv_connector": "KVStoreConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"target": target, **options},
    }
    return replace(spec, name=name, connector=connector)


def fetch_counters(url: str, name: str) -> Counters:
    """Read the counters of a Prometheus page. Raises Unavailable."""
    try:
        with urllib.request.urlopen(url, timeout=30) as page:
            counters = parse_counters(page.read().decode())
    except OSError as error:
        raise Unavailable(f"{name}: no metrics at {url}: {error}") from error
    if counters is None:
        raise Unavailable(f"{name}: {url} shows no metrics")
    return counters


def _read_stream(response: http.client.HTTPResponse, started: float) -> Reply:
    """Read server-sent events to their end. Raises ValueError for anything but an answer."""
    if response.status != http.client.OK:
        raise ValueError(f"HTTP {response.status}: {response.read(500)!r}")
    ttft_s = None
    tokens: list[int] = []
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise ValueError(str(event["error"]))
        for choice in event["choices"]:
            tokens += choice.get("token_ids") or ()
        if tokens and ttft_s is None:
            ttft_s = time.perf_counter() - started
    if ttft_s is None:
        raise ValueError("an answer without tokens")
    return Reply(ttft_s, time.perf_counter() - started, tuple(tokens))
