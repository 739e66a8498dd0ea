"""The process that runs one system: it is asked by JSON messages over a pipe, and times itself."""

from __future__ import annotations

import importlib
import json
import os
import signal
import time
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvstore_bench.peers.blocks import Blocks
from kvstore_bench.peers.system import Place

MESSAGE_NBYTES_MAX = 1 << 16


def main(descriptor: int) -> None:
    """Answer until the runner hangs up; the process is the leader of its group."""
    os.dup2(2, 1)  # whatever a peer prints
    channel = Connection(descriptor)
    worker = Worker()
    while True:
        try:
            request = json.loads(channel.recv_bytes(MESSAGE_NBYTES_MAX))
        except (EOFError, OSError):
            os.killpg(0, signal.SIGKILL)  # nobody asks any more: no server of ours may be left
        try:
            reply = getattr(worker, request.pop("do"))(**request)
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"[:2000]}
        channel.send_bytes(json.dumps(reply).encode())


class Worker:
    """One method a request; what it returns is the reply."""

    def __init__(self) -> None:
        self._blocks: Blocks
        self._system: Any  # a System, or an end of a remote one

    def check(self, *, needs: list[str]) -> dict[str, Any]:
        """Tell which packages are not installed here, without importing any."""
        return {"missing": [name for name in needs if find_spec(name) is None]}

    def open(self, *, module: str, place: dict[str, Any], blocks: dict[str, int]) -> dict[str, Any]:
        """Start the system. Imports and our own memory are not in the time."""
        self._blocks = Blocks(**blocks)
        directory, runtime = Path(place["directory"]), Path(place["runtime"])
        where = Place(directory, runtime, self._blocks, place["threads"])
        make = importlib.import_module(module).open_system
        started = time.perf_counter()
        self._system = make(where)
        return {"seconds": time.perf_counter() - started}

    def lend(
        self, *, module: str, place: dict[str, Any], blocks: dict[str, int], number: int
    ) -> dict[str, Any]:
        """Open the end that has the blocks of a round; tell where they are."""
        where = self._prepare(place, blocks, number)
        self._system = lender = importlib.import_module(module).open_lender(where)
        return {"where": lender.put(self._blocks.keys(number))}

    def borrow(
        self,
        *,
        module: str,
        place: dict[str, Any],
        blocks: dict[str, int],
        number: int,
        where: dict[str, Any],
    ) -> dict[str, Any]:
        """Open the end that gets them."""
        here = self._prepare(place, blocks, number)
        self._system = importlib.import_module(module).open_borrower(here, where)
        return {}

    def _prepare(self, place: dict[str, Any], blocks: dict[str, int], number: int) -> Place:
        self._blocks = Blocks(**blocks)
        self._blocks.stamp(number)
        directory, runtime = Path(place["directory"]), Path(place["runtime"])
        return Place(directory, runtime, self._blocks, place["threads"])

    def fetch(self, *, number: int) -> dict[str, Any]:
        """Get the blocks of a round from the other end, and forget them."""
        borrower: Any = self._system
        self._blocks.wipe()
        keys = self._blocks.keys(number)
        started = time.perf_counter()
        found = borrower.get(keys)
        seconds = time.perf_counter() - started
        borrower.land()
        wrong = self._blocks.wrong(found)
        borrower.forget()
        return {"seconds": seconds, "found": sum(found), "wrong": wrong}

    def put(self, *, number: int) -> dict[str, Any]:
        self._blocks.stamp(number)
        keys = self._blocks.keys(number)
        started = time.perf_counter()
        self._system.put(keys)
        accepted = time.perf_counter() - started
        self._system.flush()
        return {"seconds": accepted, "flushed_s": time.perf_counter() - started}

    def get(self, *, number: int) -> dict[str, Any]:
        self._blocks.stamp(number)
        self._blocks.wipe()
        keys = self._blocks.keys(number)
        started = time.perf_counter()
        found = self._system.get(keys)
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "found": sum(found), "wrong": self._blocks.wrong(found)}

    def settle(self) -> dict[str, Any]:
        self._system.settle()
        return {}

    def forget(self) -> dict[str, Any]:
        self._system.forget()
        return {}

    def chill(self) -> dict[str, Any]:
        return {"cold": self._system.chill()}

    def close(self) -> dict[str, Any]:
        self._system.close()
        return {}
