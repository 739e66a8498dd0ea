"""What 16 viewers cost the daemon, and the engines that ask it meanwhile."""

from __future__ import annotations

import http.client
import os
import statistics
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from kvstore import Client
from kvstore.testing.daemon import Daemon
from kvstore_bench.page.workload import RECORD_NBYTES, model
from kvstore_bench.store.store import chain

VIEWERS = 16
ROUNDS = 6
ROUND_S = 8.0
TREE_EVERY_S = 5.0  # as the page asks for it
KEYS = 64
PAUSE_S = 0.002  # between two questions of the engine


class Viewer(threading.Thread):
    """Reads what a tab reads: the stream, and the tree now and then."""

    def __init__(self, port: int, token: str) -> None:
        super().__init__(daemon=True)
        self._port = port
        self._headers = {"Authorization": f"Bearer {token}"}
        self._over = threading.Event()
        self.frames = 0
        self.status = 0

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=10)
        connection.request("GET", "/api/live", headers=self._headers)
        reply = connection.getresponse()
        self.status = reply.status
        asked = 0.0
        while reply.status == 200 and not self._over.is_set() and reply.readline():
            self.frames += 1
            if time.monotonic() - asked > TREE_EVERY_S:
                asked = time.monotonic()
                self._tree()
        connection.close()

    def _tree(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=10)
        connection.request("GET", "/api/tree?depth=6&limit=400", headers=self._headers)
        connection.getresponse().read()
        connection.close()

    def end(self) -> None:
        self._over.set()
        self.join()


def cpu_s(pid: int) -> float:
    """Return the processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def viewers(daemon: Daemon) -> dict[str, Any]:
    """Alternate rounds without and with viewers while an engine asks at an even pace.

    viewer_cpu_share: of one core, what the daemon uses more. match_p50_with_viewers: over without.
    """
    token = parse_qs(urlsplit(daemon.page_address).query)["token"][0]
    rounds: dict[str, list[tuple[float, float]]] = {"without": [], "with": []}
    spec = model("asked")
    with Client(daemon.target, name="vllm-0.32.0 asked") as client:
        client.register(spec)
        keys = chain(spec.id, KEYS, salt=b"asked")
        client.put(spec.id, keys, [bytes(RECORD_NBYTES)] * KEYS)
        for number in range(-1, ROUNDS):  # the first of each does not count
            for side in ("without", "with") if number % 2 else ("with", "without"):
                looking = [
                    Viewer(daemon.metrics_port, token) for _ in range(VIEWERS * (side == "with"))
                ]
                for each in looking:
                    each.start()
                time.sleep(2.0)
                took = _round(client, spec.id, keys, daemon.pid)
                for each in looking:
                    each.end()
                if any(each.status != 200 or not each.frames for each in looking):
                    raise RuntimeError("a viewer was not served")
                if number >= 0:
                    rounds[side].append(took)
    cpu, p50 = (
        {side: statistics.median(each[at] for each in found) for side, found in rounds.items()}
        for at in (0, 1)
    )
    return {
        "viewers": VIEWERS,
        "viewer_cpu_share": max(0.0, cpu["with"] - cpu["without"]),
        "match_p50_with_viewers": p50["with"] / p50["without"],
        "match_p50_s": p50,
        "daemon_cpu_share": cpu,
    }


def _round(client: Client, namespace: Any, keys: Any, pid: int) -> tuple[float, float]:
    """Return the daemon's share of a core, and the median time of a Match."""
    before, began = cpu_s(pid), time.perf_counter()
    times = []
    while time.perf_counter() - began < ROUND_S:
        asked = time.perf_counter()
        client.match(namespace, keys)
        times.append(time.perf_counter() - asked)
        time.sleep(PAUSE_S)
    wall = time.perf_counter() - began
    return (cpu_s(pid) - before) / wall, statistics.median(times)
