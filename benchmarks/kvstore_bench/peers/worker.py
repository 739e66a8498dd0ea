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
from kvstore_bench.peers.system import Place, System

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
        self._system: System

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

    def chill(self) -> dict[str, Any]:
        return {"cold": self._system.chill()}

    def close(self) -> dict[str, Any]:
        self._system.close()
        return {}
