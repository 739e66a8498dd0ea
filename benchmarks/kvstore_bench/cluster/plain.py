"""Plain reads of the lender's files: O_DIRECT, as many threads as there are streams."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from kvstore.model.errors import Unavailable
from kvstore_bench.cluster.plan import ClusterPlan
from kvstore_bench.huge_pages import huge_memory


class PlainReads:
    """Reads of as many bytes as a prefix has, in pieces of a record. A context manager."""

    def __init__(self, directory: Path, plan: ClusterPlan) -> None:
        self._plan = plan
        self._stack = ExitStack()
        self._threads = self._stack.enter_context(ThreadPoolExecutor(plan.streams))
        paths = sorted(path for path in directory.rglob("*") if path.is_file())
        self._places = list(self._found(paths))[: plan.blocks]
        if len(self._places) < plan.blocks:
            raise Unavailable(
                f"the lender's files hold {len(self._places)} of {plan.blocks} records"
            )
        self._targets = [
            self._stack.enter_context(huge_memory(plan.record_nbytes)) for _ in range(plan.streams)
        ]
        for target in self._targets:
            target.write(bytes(plan.record_nbytes))  # touched once, like the arena's slots

    def _found(self, paths: list[Path]) -> Iterator[tuple[int, int]]:
        """Yield descriptors and offsets of whole records' worth of bytes."""
        for path in paths:
            pieces = path.stat().st_blocks * 512 // self._plan.record_nbytes
            if pieces:
                fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
                self._stack.callback(os.close, fd)
                yield from ((fd, piece * self._plan.record_nbytes) for piece in range(pieces))

    def run(self) -> float:
        """Read; return bytes/s."""
        began = time.perf_counter()
        list(self._threads.map(self._read, range(self._plan.streams)))
        return self._plan.nbytes / (time.perf_counter() - began)

    def _read(self, thread: int) -> None:
        target = self._targets[thread]
        for fd, offset in self._places[thread :: self._plan.streams]:
            if os.preadv(fd, [target], offset) != self._plan.record_nbytes:
                raise Unavailable("a file of the lender ended early")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
