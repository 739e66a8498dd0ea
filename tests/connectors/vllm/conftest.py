"""Real engines in processes of their own, driven from the tests step by step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.testing.daemon import Daemon
from tests.connectors.vllm.engines import EngineProcess, kvstore_transfer, make_models, make_prompt


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the tiny models `llama`, `gemma3`, `granite`, `deepseek` and `drafter`."""
    pytest.importorskip("vllm")
    out = tmp_path_factory.mktemp("models")
    make_models(out)
    return out


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """A daemon with a file tier that the test may kill and restart."""
    with Daemon("dram.capacity=256MiB", "dram.extent=64MiB") as daemon:
        yield daemon.start()


StartEngine = Callable[..., EngineProcess]


@pytest.fixture
def start_engine(models: Path, tmp_path: Path) -> Iterator[StartEngine]:
    """Start engines: start_engine("llama", daemon or None, **options of LLM).

    extra: settings of our connector. transfer: a whole KVTransferConfig instead.
    """
    with contextlib.ExitStack() as stack:

        def start(
            model: str,
            daemon: Daemon | None,
            *,
            extra: dict[str, Any] | None = None,
            transfer: dict[str, Any] | None = None,
            environment: dict[str, str] | None = None,
            **options: Any,
        ) -> EngineProcess:
            log = tmp_path / f"engine-{time.monotonic_ns()}.log"
            engine = EngineProcess(log, **(environment or {}))
            stack.callback(engine.close)
            if daemon is not None and transfer is None:
                transfer = kvstore_transfer(daemon, **(extra or {}))
            engine("start", model=str(models / model), transfer=transfer, **options)
            return engine

        yield start


@pytest.fixture
def prompt() -> Callable[..., list[int]]:
    return make_prompt
