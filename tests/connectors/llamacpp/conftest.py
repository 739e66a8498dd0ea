"""A real llama.cpp with tiny models, where llama-cpp-python is installed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.system import fingerprints
from kvstore.testing.daemon import Daemon
from kvstore.testing.llamacpp import llama_site
from tests.connectors.llamacpp.tiny import VOCABULARY, WORDS, make_model

KINDS = ("llama", "gemma3", "mamba")


@pytest.fixture(scope="session")
def llama_cpp() -> Any:
    site = llama_site()
    if site is None:
        pytest.skip("llama-cpp-python is not here: run `make setup-llamacpp`")
    pytest.importorskip("gguf")
    if str(site) not in sys.path:
        sys.path.append(str(site))
    import llama_cpp

    return llama_cpp


@pytest.fixture(scope="session")
def models(llama_cpp: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("gguf")
    return {kind: make_model(folder / f"{kind}.gguf", kind) for kind in KINDS}


@pytest.fixture(autouse=True)
def made_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models of these tests are younger than the process, which would be distrusted."""
    monkeypatch.setattr(fingerprints, "process_began", lambda: time.time() + 60)


@pytest.fixture(scope="session")
def daemon() -> Iterator[Daemon]:
    """A daemon for all tests: their prompts differ. It is left alone."""
    with Daemon() as daemon:
        yield daemon.start()


@pytest.fixture
def own_daemon() -> Iterator[Daemon]:
    """One that the test may stop and kill."""
    with Daemon() as daemon:
        yield daemon.start()


class Chat:
    """A `Llama` with a cache, or without."""

    def __init__(self, llama: Any, cache: Any) -> None:
        self.llama = llama
        self.cache = cache

    def ask(self, tokens: list[int], count: int = 12) -> list[int]:
        """Return the tokens of a greedy answer."""
        for _ in self.llama.create_completion(
            tokens, max_tokens=count, temperature=0.0, stream=True
        ):
            pass
        return self.llama.input_ids[len(tokens) : self.llama.n_tokens].tolist()

    def saved(self) -> None:
        assert self.cache.flush()


Open = Callable[..., Chat]


@pytest.fixture
def chat(llama_cpp: Any, models: dict[str, Path]) -> Iterator[Open]:
    """Open a model: chat("llama", daemon or None, cache={}, **options of Llama)."""
    with ExitStack() as stack:

        def start(
            model: str | Path,
            daemon: Daemon | None,
            cache: dict[str, Any] | None = None,
            **options: Any,
        ) -> Chat:
            path = models.get(str(model), model)
            plain = {"n_ctx": 1024, "n_batch": 128, "n_threads": 1, "n_threads_batch": 1}
            llama = llama_cpp.Llama(str(path), verbose=False, **{**plain, **options})
            stack.callback(llama.close)
            kept = None
            if daemon is not None:
                from kvstore_llamacpp import KVStoreCache

                kept = KVStoreCache(llama, daemon.target, **(cache or {}))
                stack.callback(kept.close)
                assert kept.wait_ready(30)
                llama.set_cache(kept)
            return Chat(llama, kept)

        yield start


@pytest.fixture
def words(request: pytest.FixtureRequest) -> Callable[[int, int], list[int]]:
    """Return what makes prompts of so many tokens, from a seed; each test has its own."""
    name = list(request.node.nodeid.encode())

    def make(count: int, seed: int) -> list[int]:
        random = np.random.default_rng([seed, *name])
        return [1, *random.integers(VOCABULARY - WORDS, VOCABULARY, count - 1).tolist()]

    return make
