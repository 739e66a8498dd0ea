"""The connector's two halves between a stand-in for TensorRT-LLM and a real daemon."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import Client
from kvstore.system import fingerprints
from kvstore.system.engine_versions import ALLOW
from kvstore.testing.daemon import Daemon
from kvstore.testing.wait import until
from tests.connectors.trtllm import standin
from tests.connectors.trtllm.executor import KINDS, Executor, Rank, llm_args, write_config

BLOCKS = 64


@pytest.fixture(autouse=True)
def tensorrt_llm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """TensorRT-LLM can be imported, as far as the connector needs it; one rank."""
    monkeypatch.delenv(ALLOW, raising=False)
    standin.install()
    standin.enter(standin.World())
    yield
    standin.remove()


@pytest.fixture(autouse=True)
def made_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models of these tests are younger than the process, which would be distrusted."""
    monkeypatch.setattr(fingerprints, "process_began", lambda: time.time() + 60)


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A folder of weights, as far as the connector looks at them."""
    folder = tmp_path / "tiny-model"
    folder.mkdir()
    write_config(str(folder))
    (folder / "model.safetensors").write_bytes(b"weights of " + str(tmp_path).encode() * 100)
    return str(folder)


@pytest.fixture(scope="session")
def daemon() -> Iterator[Daemon]:
    """A daemon for all tests: their models differ. It is left alone."""
    with Daemon() as daemon:
        yield daemon.start()


@pytest.fixture
def mortal() -> Iterator[Daemon]:
    """One that the test may stop and kill."""
    with Daemon() as daemon:
        yield daemon.start()


@dataclass
class Engine:
    """One engine of one rank."""

    scheduler: Any
    worker: Any
    executor: Executor

    def saved(self) -> None:
        """Wait until all saves have ended, and release their blocks."""
        assert self.worker._saver.drain(20)
        self.executor.poll()
        assert self.executor.held == 0

    def flush(self) -> None:
        self.saved()
        assert self.scheduler._engine.client.admin.flush()

    @property
    def namespace(self) -> Any:
        return self.scheduler._engine.namespace

    def count(self, name: str) -> int:
        return int(self.scheduler.counters[name] + self.worker.counters[name])


Open = Callable[..., Engine]


@pytest.fixture
def engine(model: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Start an engine: engine(daemon or target, settings={}, blocks=, kinds=, **llm_args)."""
    with ExitStack() as stack:

        def start(
            daemon: Daemon,
            settings: dict[str, Any] | None = None,
            *,
            blocks: int = BLOCKS,
            kinds: int = KINDS,
            known: bool = True,
            **options: Any,
        ) -> Engine:
            # Deadlines are a matter of other tests, and this machine may be busy.
            own = {"target": daemon.target, "load_deadline_s": 10, **(settings or {})}
            monkeypatch.setenv("TRTLLM_KVSTORE", json.dumps(own))
            from kvstore_trtllm import KVStoreScheduler, KVStoreWorker

            arguments = llm_args(**{"model": model, **options})
            worker, scheduler = KVStoreWorker(arguments), KVStoreScheduler(arguments)
            stack.callback(worker.close)
            executor = Executor(scheduler, Rank(worker, 0, blocks, kinds))
            if known:
                until(lambda: scheduler._engine.namespace is not None)
            return Engine(scheduler, worker, executor)

        yield start


@pytest.fixture
def words(request: pytest.FixtureRequest) -> Callable[[int, int], list[int]]:
    """Return what makes prompts of so many tokens, from a seed; each test has its own."""
    name = list(request.node.nodeid.encode())

    def make(count: int, seed: int) -> list[int]:
        random = np.random.default_rng([seed, *name])
        return [int(each) for each in random.integers(0, 32000, count)]

    return make


def stored_blocks(daemon: Daemon) -> int:
    with Client(daemon.target) as client:
        return sum(each.blocks for each in client.admin.namespaces())
