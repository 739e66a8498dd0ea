"""What a run puts on the machine, and the proof that it took everything away again."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvstore.model.errors import Unavailable
from kvstore_bench.demo.daemon import Daemon, start_daemon
from kvstore_bench.demo.engine import Engine, EngineSpec, start_engine
from kvstore_bench.demo.processes import (
    SHARED_MEMORY,
    Child,
    session_members,
    shared_memory,
    shared_memory_in_use,
)


class Stage:
    """Owns every process and temporary file of a run; leaving the context ends and removes them.

    results: a folder that stays, with the logs in it. The file tier lies there too while the run
    lasts, because a temporary folder may be memory, which is no disk.
    """

    def __init__(self, results: Path, *, keep: bool = False) -> None:
        self.results = results
        self.logs = results / "logs"
        self.store = results / "store"
        self.leaks: list[str] = []
        self._keep = keep
        self._children: list[Child] = []
        self._shared_memory_before = shared_memory()

    def __enter__(self) -> Self:
        self._lock()
        shutil.rmtree(self.logs, ignore_errors=True)
        shutil.rmtree(self.store, ignore_errors=True)
        self.logs.mkdir(parents=True)
        # Sockets lie here: their paths must be short.
        self.scratch = Path(tempfile.mkdtemp(prefix="kvstore-demo-"))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()
        if not self._keep:
            shutil.rmtree(self.store, ignore_errors=True)
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.leaks = self._leaks()
        os.close(self._locked)

    def adopt(self, child: Child) -> None:
        """Own a child: it ends with the stage."""
        self._children.append(child)

    def end(self) -> None:
        """Stop everything that runs."""
        for child in reversed(self._children):
            child.stop()

    def daemon(self, *, dram_nbytes: int, **options: Any) -> Daemon:
        """Start a daemon and wait for it. options: those of `start_daemon`."""
        self.store.mkdir(exist_ok=True)
        log = self.logs / "kvstore.log"
        daemon = start_daemon(
            scratch=self.scratch,
            directory=self.store,
            dram_nbytes=dram_nbytes,
            log=log,
            **options,
        )
        self.adopt(daemon.child)
        daemon.wait_healthy()
        return daemon

    def engines(self, specs: Sequence[EngineSpec]) -> list[Engine]:
        """Start engines at the same time and wait for all of them."""
        engines = []
        for spec in specs:
            log = self.logs / f"{spec.name}.log"
            engine = start_engine(spec, scratch=self.scratch, log=log)
            self.adopt(engine.child)
            engines.append(engine)
        for engine in engines:
            engine.wait_healthy()
        return engines

    def _lock(self) -> None:
        """Keep a second run out of the folder, by a lock that ends with the process."""
        self.results.mkdir(parents=True, exist_ok=True)
        self._locked = os.open(self.results, os.O_RDONLY)
        try:
            fcntl.flock(self._locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._locked)
            raise Unavailable(f"another demo runs in {self.results}; choose --out") from error

    def _leaks(self) -> list[str]:
        """Say what is left: processes, shared memory nobody maps any more, temporary files."""
        pids = [pid for child in self._children for pid in session_members(child.session)]
        unused = shared_memory() - self._shared_memory_before - shared_memory_in_use()
        folders = [self.scratch] if self._keep else [self.scratch, self.store]
        return [
            *(f"process {pid}" for pid in pids),
            *(f"shared memory {SHARED_MEMORY / name}" for name in sorted(unused)),
            *(f"folder {folder}" for folder in folders if os.path.lexists(folder)),
        ]
