"""The same daemon with a bucket behind it, which is troubled instead of the disk.

Every other life begins on an empty disk, as another host's would: what is served then came from the
bucket, and has to be what was put and not deleted.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from random import Random

from kvstore import Client
from tests.torture.bucket import FAULTS, Bucket
from tests.torture.plan import Life
from tests.torture.spaces import NAMESPACES
from tests.torture.traffic import (
    Chain,
    PrefixReader,
    Worker,
    Writer,
    read_prefix,
)
from tests.torture.world import World

SERVER = "server"  # the trouble that it is killed
TROUBLES = (SERVER, *FAULTS)
DEATHS = ("timer", "drain", "write", "tombstone", "fdatasync")
SETTINGS = (
    *("object.grace_s=12", "object.believed_s=1", "object.collect_every_s=3"),
    *(
        "object.timeout_s=1",
        "object.capacity=32MiB",
        "object.requests_max=8",
        "object.fidelity=fine",
    ),
    "server.drain_s=4",
)
TROUBLE_S = (1.0, 4.0)
UPLOAD_S = 2.0  # for the first prefixes of a life to get into the bucket
CHECKED_CHAINS_MAX = 60
PREFIX_READERS = 2


class SharedWorld(World):
    """See the module."""

    def __init__(self, bucket: Bucket) -> None:
        super().__init__(settings=(*bucket.settings, *SETTINGS))
        self.daemon.environment.update(bucket.environment)
        self.fetched_blocks = 0
        self._bucket = bucket
        self._chains: list[Chain] = []  # of earlier lives
        self._writers: list[Writer] = []

    def _start(self, life: Life) -> None:
        self._bucket.calm()
        if life.number % 2:
            shutil.rmtree(self._directories[0])
            self.journal.disk_lost()
        super()._start(life)

    def _check(self, life: Life) -> None:
        super()._check(life)
        with Client(self.daemon.target, timeout_s=10.0) as client:
            for namespace in NAMESPACES:
                client.register(namespace)
            for chain in self._chains[-CHECKED_CHAINS_MAX:]:
                self._found(life, read_prefix(client, self.journal, chain))
            hits = client.admin.stats()["totals"].get("hit_blocks") or {}
            self.fetched_blocks += int(hits.get("object", 0))

    def _workers(self, stack: ExitStack, life: Life, draw: Random) -> list[Worker]:
        workers = super()._workers(stack, life, draw)
        self._writers = [worker for worker in workers if isinstance(worker, Writer)]
        for _ in range(PREFIX_READERS):
            client = stack.enter_context(Client(self.daemon.target))
            for namespace in NAMESPACES:
                client.register(namespace)
            seed = Random(draw.getrandbits(32))
            workers.append(PrefixReader(self.traffic, client, seed, self._all_chains))
        return workers

    def _all_chains(self) -> Sequence[Chain]:
        mine = (Chain(w.namespace, keys) for w in self._writers for keys in list(w.chains))
        return [*self._chains, *mine]

    def _warm_up(self, life: Life, workers: Sequence[Worker]) -> None:
        super()._warm_up(life, workers)
        time.sleep(UPLOAD_S)

    def _trouble(self, life: Life, draw: Random) -> None:
        if life.trouble == SERVER:
            self._bucket.kill_server()
        else:
            self._bucket.trouble(life.trouble, draw)
        time.sleep(draw.uniform(*TROUBLE_S))
        if life.trouble == SERVER:
            self._bucket.start_server()
        if draw.random() < 0.5:  # else the trouble outlasts the daemon
            self._bucket.calm()

    def _kill(self, life: Life, draw: Random) -> None:
        if life.death != "drain":
            super()._kill(life, draw)
            return
        if self.daemon.stop() != 0:
            self._found(life, ["hung: the daemon did not drain"])
        self.findings.deaths["drain"] += 1
        self._over()

    def _end(self, life: Life, workers: Sequence[Worker]) -> None:
        super()._end(life, workers)
        self._chains = [*self._all_chains()]
        self._writers = []
