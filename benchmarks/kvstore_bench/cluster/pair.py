"""Two real daemons on loopback, one of which has what the other one asks for."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvstore import Client
from kvstore.model.block import BlockKey, NamespaceId
from kvstore.model.errors import Unavailable
from kvstore.testing.daemon import Daemon
from kvstore.testing.ports import free_ports
from kvstore_bench.cluster.plan import FLEET, WAIT_S, ClusterPlan
from kvstore_bench.store.store import await_arena, bench_namespace, chain, views_of
from kvstore_bench.store.tls import make_pair

MEET_S = 20.0
LOOK_S = 0.05


@dataclass(slots=True)
class Pair:
    """lender has records; borrower asks for them, and has no files."""

    plan: ClusterPlan
    lender: Daemon
    borrower: Daemon
    lender_files: Path

    def meet(self) -> None:
        """Wait until each has a link to the other. Raises Unavailable."""
        for daemon in (self.lender, self.borrower):
            with Client(daemon.target, arena=False) as client:
                deadline = time.monotonic() + MEET_S
                while not _has_met(client):
                    if time.monotonic() > deadline:
                        raise Unavailable(f"the daemons did not meet:\n{daemon.output()[-500:]}")
                    time.sleep(LOOK_S)

    def restart_lender(self, *overrides: str) -> None:
        """What it has is then in its files alone."""
        self.lender.stop()
        self.lender.start(*overrides)
        self.meet()

    def put(self, name: str, record_nbytes: int, *, durable: bool = False) -> Prefix:
        """Store a prefix of `plan.nbytes` at the lender."""
        count = self.plan.nbytes // record_nbytes
        rows = np.random.default_rng(0).integers(0, 256, (count, record_nbytes), np.uint8)
        with Client(self.lender.target) as client:
            await_arena(client, self.plan.arena_nbytes)
            namespace_id = client.register(bench_namespace(name, record_nbytes))
            keys = chain(namespace_id, count)
            records = views_of(rows)
            done = client.put(namespace_id, keys, records, wait_s=WAIT_S, durable=durable)
            stored = done.committed + done.existing  # its files may have it from before
            if stored != count or (durable and not done.durable):
                raise Unavailable(f"the lender stored {stored} of {count} records")
        return Prefix(name, record_nbytes, namespace_id, keys, rows)


@dataclass(frozen=True, slots=True)
class Prefix:
    """What the lender has. rows: its bytes, one record each."""

    name: str
    record_nbytes: int
    namespace_id: NamespaceId
    keys: list[BlockKey]
    rows: np.ndarray[tuple[int, int], np.dtype[np.uint8]]

    @property
    def nbytes(self) -> int:
        return len(self.keys) * self.record_nbytes


def _has_met(client: Client) -> bool:
    return any(each["state"] == "up" for each in client.admin.stats()["fleet"]["members"])


@contextmanager
def pair(plan: ClusterPlan, path: Path, *, sealed: bool = False) -> Iterator[Pair]:
    """Yield two daemons that have met. Files of the lender are in a scratch folder of `path`."""
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="kv-cluster-", dir=path))
        ports = free_ports(2)
        both = plan.settings(ports)
        if sealed:
            certificates = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kv-")))
            make_pair(certificates, f"*.{FLEET}.kvstore")
            both += [
                f"cluster.cert={certificates}/cert.pem",
                f"cluster.key={certificates}/key.pem",
                f"cluster.ca={certificates}/cert.pem",
            ]
        files = [f"file.path={scratch}", f"file.capacity={4 * plan.nbytes + plan.arena_nbytes}"]
        places: tuple[list[str], list[str]] = (files, [])
        lender, borrower = [
            stack.enter_context(
                Daemon(*both, f"cluster.listen=127.0.0.1:{port}", *place, file=False)
            )
            for port, place in zip(ports, places, strict=True)
        ]
        met = Pair(plan, lender.start(), borrower.start(), Path(scratch))
        met.meet()
        yield met
        for daemon in (borrower, lender):
            daemon.stop()
