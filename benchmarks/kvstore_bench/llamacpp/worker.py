"""A process with one model: `python -m kvstore_bench.llamacpp.worker '{...}'`.

It reads questions, one JSON object a line, and answers each with one: what `Ask` and `Answer` say.
llama.cpp itself writes to standard output, too, so answers go to a copy of it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any, TextIO

WARM_TOKENS = 8
READY_S = 600.0


@dataclass(frozen=True, slots=True)
class Setup:
    """system: none, kvstore (exact), default (kvstore, not exact) or disk. place: the daemon's
    target, or the folder of the disk cache. cache_bytes: what the disk cache may hold."""

    model: str
    system: str
    place: str
    context_tokens: int
    threads: int
    cache_bytes: int


@dataclass(frozen=True, slots=True)
class Ask:
    """tokens: of the prompt; without any, flush what was saved. What the model has computed before
    is forgotten, so that only the cache knows it. text: to be cut into tokens, and nothing else."""

    tokens: list[int]
    answer_tokens: int = 0
    text: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """state_bytes: of a snapshot of all that was computed. stored_bytes: what this process has
    stored so far; 0 where that is not known. answer: the tokens that were generated."""

    ttft_s: float
    total_s: float
    answer: list[int]
    state_bytes: int
    stored_bytes: int
    loaded_tokens: int


class Model:
    """A `Llama` and its cache."""

    def __init__(self, setup: Setup) -> None:
        import llama_cpp

        self._llama_cpp = llama_cpp
        self.llama = llama_cpp.Llama(
            setup.model,
            n_ctx=setup.context_tokens,
            n_threads=setup.threads,
            n_threads_batch=setup.threads,
            verbose=False,
        )
        self.cache: Any = None
        if setup.system in ("kvstore", "default"):
            from kvstore_llamacpp import KVStoreCache

            self.cache = (
                KVStoreCache(self.llama, setup.place, exact=True)
                if setup.system == "kvstore"
                else KVStoreCache(self.llama, setup.place)
            )
            if not self.cache.wait_ready(READY_S):
                raise RuntimeError("the model's file was not hashed in time")
        # The first tokens of a process read the model's file.
        self.llama.eval(list(range(WARM_TOKENS)))
        self.clear()
        if setup.system == "disk":
            self.llama.set_cache(llama_cpp.LlamaDiskCache(setup.place, setup.cache_bytes))
        elif self.cache is not None:
            self.llama.set_cache(self.cache)

    def clear(self) -> None:
        """Forget what was computed."""
        self.llama.n_tokens = 0
        self.llama._requires_eval = True
        self.llama._ctx.kv_cache_clear()

    def ask(self, ask: Ask) -> Answer:
        """Generate greedily."""
        self.clear()
        loaded = self.cache.counts.loaded_tokens if self.cache else 0
        began = time.perf_counter()
        first = 0.0
        for _ in self.llama.create_completion(
            ask.tokens, max_tokens=ask.answer_tokens, temperature=0.0, stream=True
        ):
            first = first or time.perf_counter() - began
        total = time.perf_counter() - began
        nbytes = self._llama_cpp.llama_state_seq_get_size(self.llama.ctx, 0)
        return Answer(
            ttft_s=first,
            total_s=total,
            answer=self.llama.input_ids[len(ask.tokens) : self.llama.n_tokens].tolist(),
            state_bytes=int(nbytes),
            stored_bytes=self.cache.cache_size if self.cache else 0,
            loaded_tokens=self.cache.counts.loaded_tokens - loaded if self.cache else 0,
        )

    def tokens(self, text: str) -> Answer:
        """Return the tokens of a text, the first of which begins every prompt."""
        return Answer(0.0, 0.0, self.llama.tokenize(text.encode()), 0, 0, 0)

    def flush(self) -> Answer:
        """Make durable what was saved."""
        if self.cache is not None and not self.cache.flush():
            raise RuntimeError("what was saved is not durable in time")
        stored = self.cache.cache_size if self.cache else 0
        return Answer(0.0, 0.0, [], 0, stored, 0)


def serve(setup: Setup, asks: TextIO, answers: TextIO) -> None:
    """Answer until there are no more questions."""
    model = Model(setup)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in asks:
        ask = Ask(**json.loads(line))
        answer = (
            model.tokens(ask.text) if ask.text else model.ask(ask) if ask.tokens else model.flush()
        )
        print(json.dumps(asdict(answer)), file=answers, flush=True)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(Setup(**json.loads(sys.argv[1])), sys.stdin, answers)


if __name__ == "__main__":
    main()
