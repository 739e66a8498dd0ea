"""What a fault case acts on: daemons, engine processes, and the count of what went wrong."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from kvstore import Client
from kvstore.testing.daemon import Daemon
from kvstore.testing.samples import RECORD_NBYTES
from kvstore.testing.wait import until

ROOT = Path(__file__).parents[2]
ANSWER_TIMEOUT_S = 20.0  # an engine that does not answer a command by then hangs
FREED_WITHIN_S = 5.0


class Hung(Exception):
    """A process did not answer."""


class Dead(Exception):
    """An engine ended that nobody killed."""


class EngineProcess:
    """A process of `engine.py`. `tell` and `answer`, or both at once by `ask`."""

    def __init__(
        self, target: str, token: str, record_nbytes: int = RECORD_NBYTES, kind: str = "fixed"
    ) -> None:
        self.token = token
        self.killed = False
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.engine", target, token, str(record_nbytes), kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self._answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def ask(self, do: str, *, timeout_s: float = ANSWER_TIMEOUT_S, **fields: Any) -> dict[str, Any]:
        """Give a command and return its answer. Raises Hung or Dead."""
        self.tell(do, **fields)
        return self.answer(timeout_s)

    def tell(self, do: str, **fields: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **fields}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise Dead from error

    def answer(self, timeout_s: float = ANSWER_TIMEOUT_S) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise Hung from None
        if not line:
            raise Dead
        answer: dict[str, Any] = json.loads(line)
        return answer

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.killed = True
        self._process.kill()
        self._process.wait()

    @property
    def dead(self) -> bool:
        """Whether it ended by itself."""
        return not self.killed and self._process.poll() is not None

    def close(self) -> None:
        self._process.kill()  # SIGKILL reaches a stopped process too
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(b"")


class Skipped(Exception):
    """The machine lacks what a case needs: in one line, what."""


class Scene:
    """One case's world. `wrong`, `hung`, `engine_dead`, `leaked` and `resurrected` have to stay 0.

    kind: of the records of its engines, see `records.py`. daemons: `daemon` is the first.
    """

    def __init__(self, *overrides: str, quick: bool = False, kind: str = "fixed") -> None:
        self.quick = quick
        self.kind = kind
        self.wrong = self.hung = self.engine_dead = self.leaked = self.resurrected = 0
        self.details: dict[str, Any] = {}
        self.overrides = overrides
        self.daemons: list[Daemon] = []
        self._engines: list[EngineProcess] = []

    def open(self) -> None:
        """Start the daemons."""
        self.daemons.append(Daemon(*self.overrides))
        self.daemon.start()

    def __enter__(self) -> Self:
        try:
            self.open()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.engine_dead += sum(engine.dead for engine in self._engines)
        for engine in self._engines:
            engine.close()
        for daemon in self.daemons:
            with contextlib.suppress(ProcessLookupError, AssertionError):
                os.kill(daemon.pid, signal.SIGCONT)
            daemon.__exit__(None, None, None)

    @property
    def daemon(self) -> Daemon:
        return self.daemons[0]

    def engine(
        self, token: str | None = None, *, join: bool = True, at: int = 0, **options: Any
    ) -> EngineProcess:
        """Start a process of an engine, beside a daemon; the same token, the same engine."""
        options.setdefault("kind", self.kind)
        target = self.daemons[at].target
        engine = EngineProcess(target, token or secrets.token_hex(16), **options)
        self._engines.append(engine)
        if join:
            self.expect("local" in engine.ask("join"), "an engine could not join")
        return engine

    def expect(self, true: object, what: str) -> None:
        """Count as wrong, with words, what is not true."""
        if not true:
            self.wrong += 1
            self.details.setdefault("wrong", []).append(what)

    def stats(self, at: int = 0) -> dict[str, Any]:
        with Client(self.daemons[at].target, arena=False, timeout_s=5.0) as client:
            return client.admin.stats()

    def held(self, at: int = 0) -> dict[str, int]:
        """Return what leases, reservations and limbo keep now."""
        stats = self.stats(at)
        return {
            "leases": stats["leases"],
            "leased_bytes": stats["dram"]["leased_bytes"],
            "limbo_bytes": stats["dram"]["limbo_bytes"],
        }

    def expect_freed(self, within_s: float = FREED_WITHIN_S) -> None:
        """Count as leaked what is still held after a while, at any daemon that runs."""
        began = time.monotonic()
        for at, daemon in enumerate(self.daemons):
            if not daemon.alive:
                continue
            try:
                until(lambda at=at: not any(self.held(at).values()), within_s)  # type: ignore[misc]
            except TimeoutError:
                self.leaked += 1
                self.details.setdefault("leaked", {})[at] = self.held(at)
        self.details["freed_after_s"] = round(time.monotonic() - began, 2)

    @contextlib.contextmanager
    def frozen_daemon(self, at: int = 0) -> Iterator[None]:
        os.kill(self.daemons[at].pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.daemons[at].pid, signal.SIGCONT)
