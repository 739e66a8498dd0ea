"""What happens to LMCache and its daemon, and what must not be lost by it."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from kvstore import Client
from kvstore.model.errors import Unavailable
from kvstore.testing.daemon import Daemon
from kvstore.testing.wait import until
from kvstore_bench.lmcache.engine import Engine, Shape
from kvstore_bench.lmcache.loads import Found
from kvstore_bench.lmcache.server import Server

PARAMS = {"page_mib_max": 4, "weights_id": "by-name"}
DAEMON = ("dram.capacity=512MiB", "dram.extent=256MiB", "file.capacity=4GiB")
SHAPE = Shape(chunks=32, chunk_tokens=64)
STOP_S = 3.0  # longer than the client waits for a ping
BASELINE_LOOKUPS = 200
SETTLE_S = 60.0
ABSENT = 1 << 20  # the first request that nobody stores

Say = Callable[[str], None]


class Course:
    """One run. site: LMCache's folder. requests: of 32 chunks each."""

    def __init__(self, site: Path, directory: Path, *, requests: int, stops: int) -> None:
        self._site, self._directory = site, directory
        self._requests, self._stops = requests, stops
        self._say: Say
        self._found = Found()

    @property
    def steps(self) -> int:
        """How often a run says something."""
        return 2 * self._requests + 2 * self.again + self._stops

    @property
    def again(self) -> int:
        """Requests that are loaded once more after each further kill."""
        return max(1, self._requests // 8)

    def run(self, say: Say) -> dict[str, Any]:
        """Return what was found. Raises Unavailable if LMCache or the daemon does not come back."""
        self._say = say
        with ExitStack() as stack:
            daemon = stack.enter_context(Daemon(*DAEMON)).start()
            server = stack.enter_context(
                Server(
                    self._site,
                    daemon.target,
                    self._directory / "lmcache.log",
                    chunk_tokens=SHAPE.chunk_tokens,
                    params=PARAMS,
                )
            ).start()
            engine = Engine(server.url, SHAPE)
            stored_s = self._store(engine, daemon)

            server.kill()
            engine.abandon()
            engine = Engine(server.start().url, SHAPE)
            loaded_s = self._load(engine, "lmcache", self._requests)

            daemon.kill()
            daemon.start()
            server.clear_l1()
            self._wait_found(engine)
            self._load(engine, "daemon", self.again)

            server.kill()
            daemon.kill()
            engine.abandon()
            daemon.start()
            engine = Engine(server.start().url, SHAPE)
            self._load(engine, "both", self.again)

            delays = self._stop_and_go(engine, daemon)
            engine.close()
        chunks = self._requests * SHAPE.chunks
        return {
            "stored": chunks,
            "verified": self._found.verified,
            "wrong": self._found.wrong,
            "late": self._found.late,
            "lost": self._found.lost,
            **delays,
            "stored_per_s": chunks / stored_s,
            "loaded_per_s": chunks / loaded_s,
            "chunk_nbytes": SHAPE.chunk_tokens * 256,
        }

    def _store(self, engine: Engine, daemon: Daemon) -> float:
        """Store everything, and wait until it is on disk."""
        began = time.perf_counter()
        for number in range(self._requests):
            engine.store(number)
            self._say(f"stored {(number + 1) * SHAPE.chunks}")
        chunks = self._requests * SHAPE.chunks
        with Client(daemon.target, name="make test-lmcache") as client:
            stored = 0

            def all_there() -> bool:
                nonlocal stored
                stored = sum(use.blocks for use in client.admin.namespaces())
                return stored >= chunks

            try:
                until(all_there, SETTLE_S)
            except TimeoutError:
                said = (self._directory / "lmcache.log").read_text()[-2000:]
                raise Unavailable(f"LMCache stored {stored} of {chunks} chunks: {said}") from None
            took = time.perf_counter() - began
            if not client.admin.flush(SETTLE_S):
                raise Unavailable("the daemon did not get everything written")
        return took

    def _load(self, engine: Engine, killed: str, requests: int) -> float:
        """Load requests after somebody was killed, and count what is missing or wrong."""
        began = time.perf_counter()
        lost = 0
        for number in range(requests):
            lost += self._found.load_all(partial(engine.load, number), SHAPE.chunks)
            self._say(f"after SIGKILL of {killed}: lost {lost}")
        self._found.lost[killed] = lost
        return time.perf_counter() - began

    def _wait_found(self, engine: Engine) -> None:
        """Wait until LMCache's client has found the daemon that was started again."""
        load = partial(engine.load, self._requests - 1)
        until(lambda: self._found.load(load).found, SETTLE_S)

    def _stop_and_go(self, engine: Engine, daemon: Daemon) -> dict[str, Any]:
        """Stop the daemon, and see by how much LMCache's lookups are later than before."""
        absent = iter(range(ABSENT, ABSENT << 1))
        usual = sorted(engine.lookup_s(next(absent)) for _ in range(BASELINE_LOOKUPS))
        usual_s = statistics.median(usual)
        load = partial(engine.load, self._requests // 2)
        first: list[float] = []
        after: list[float] = []
        back: list[float] = []
        for _ in range(self._stops):
            os.kill(daemon.pid, signal.SIGSTOP)
            try:
                until_s = time.monotonic() + STOP_S
                first.append(engine.lookup_s(next(absent)) - usual_s)
                while time.monotonic() < until_s:
                    after.append(engine.lookup_s(next(absent)) - usual_s)
            finally:
                os.kill(daemon.pid, signal.SIGCONT)
            back.append(until(lambda: self._found.load(load).found, SETTLE_S))
            self._say(f"stopped: {1e3 * max(first):.0f} ms")
        return {
            "lookup_ms": {
                "p50": round(1e3 * usual_s, 2),
                "p99": round(1e3 * usual[int(BASELINE_LOOKUPS * 0.99)], 2),
            },
            "lookup_delay_ms": [round(1e3 * each, 2) for each in first],
            "lookup_delay_after_ms": {
                "p50": round(1e3 * statistics.median(after), 2),
                "p99": round(1e3 * sorted(after)[int(len(after) * 0.99)], 2),
                "max": round(1e3 * max(after), 2),
                "lookups": len(after),
            },
            "found_again_s": round(max(back), 3),
        }
