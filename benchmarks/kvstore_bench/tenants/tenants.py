"""`kvstore bench tenants`: a quiet tenant within its guarantee, beside seven that flood.

Every figure is a ratio of two phases of one run, against one daemon: the quiet tenant alone, and
the same beside the others. How much of that the machine does to anybody is told by a phase beside
as many processes that copy memory of their own. A second daemon has tenants that commit durably, a
third idle ones.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvstore import Client
from kvstore.model.block import BlockKey, NamespaceId
from kvstore.model.errors import Unavailable
from kvstore.model.hint import Prefix
from kvstore.model.tenant import tenant_id
from kvstore.store.tenants import TENANTS_DIRECTORY
from kvstore.testing.daemon import Daemon
from kvstore_bench.store.store import bench_namespace, chain
from kvstore_bench.tenants.durable import measure_durable
from kvstore_bench.tenants.noise import PREFIX_BLOCKS, copying, flooding
from kvstore_bench.tenants.overshoot import Bounds, Site, watched

Say = Callable[[str], None]
MIB = 1 << 20
GIB = 1 << 30
QUIET = "quiet"
FILE_NBYTES = 16 * GIB
FILE_GUARANTEED_NBYTES, FILE_MAX_NBYTES = GIB, 2 * GIB  # of each tenant
SETTLE_S = 20.0


@dataclass(frozen=True, slots=True)
class TenantsPlan:
    """What to measure. dram_nbytes: of all tenants, each of which is guaranteed an equal part."""

    tenants: int = 8
    dram_nbytes: int = 2 * GIB
    record_nbytes: int = MIB
    seconds: float = 20.0
    idle_tenants: int = 64
    idle_seconds: float = 20.0
    durable_tenants: int = 32

    @property
    def guaranteed_nbytes(self) -> int:
        return self.dram_nbytes // self.tenants // (4 * MIB) * (4 * MIB)

    @property
    def quiet_prefixes(self) -> int:
        """The working set of the quiet tenant: three quarters of its guarantee."""
        return 3 * self.guaranteed_nbytes // (4 * PREFIX_BLOCKS * self.record_nbytes)

    @property
    def noisy(self) -> list[str]:
        return [f"noisy-{number}" for number in range(self.tenants - 1)]


@dataclass(frozen=True, slots=True)
class Phase:
    """What the quiet tenant saw. nbytes_per_s: of reads from the file tier."""

    hit_ratio: float
    acquire_p50_s: float
    acquire_p99_s: float
    nbytes_per_s: float


def run(plan: TenantsPlan, path: Path, say: Say) -> dict[str, Any]:
    """Measure all daemons; the file tiers are in scratch folders of `path`."""
    with tempfile.TemporaryDirectory(dir=path) as scratch:
        result = _busy(plan, Path(scratch), say)
    say(f"durable commits by {plan.durable_tenants} tenants at once")
    with tempfile.TemporaryDirectory(dir=path) as scratch:
        result |= measure_durable(plan.durable_tenants, Path(scratch))
    say(f"{plan.idle_tenants} idle tenants, {plan.idle_seconds:.0f} s")
    return {**result, **_idle(plan), "plan": asdict(plan)}


# ---- a quiet one beside noisy ones ---------------------------------------------------------------


def _busy(plan: TenantsPlan, scratch: Path, say: Say) -> dict[str, Any]:
    settings = [
        f"dram.capacity={plan.dram_nbytes}",
        f"file.path={scratch}",
        f"file.capacity={FILE_NBYTES}",
    ]
    for name in (QUIET, *plan.noisy):
        settings += [
            f"tenants.{name}.dram.guaranteed={plan.guaranteed_nbytes}",
            f"tenants.{name}.file.guaranteed={FILE_GUARANTEED_NBYTES}",
            f"tenants.{name}.file.max={FILE_MAX_NBYTES}",
        ]
    with Daemon(*settings) as daemon:
        daemon.start()
        targets = {
            name: f"unix:{daemon.socket.parent / name / 'kvstore.sock'}"
            for name in (QUIET, *plan.noisy)
        }
        with (
            Client(targets[QUIET], name=QUIET) as client,
            Client(daemon.target, arena=False) as operator,
        ):
            quiet = _Quiet(client, plan)
            say("the quiet tenant alone")
            free_s = quiet.fill()
            alone = quiet.phase()
            if not alone.hit_ratio:
                raise Unavailable("the quiet tenant hit nothing alone: raise --dram-mib")
            say(f"the same beside {len(plan.noisy)} processes that copy memory")
            with copying(len(plan.noisy), plan.record_nbytes):
                beside_copies = quiet.phase()
            quiet.empty()
            say("one tenant borrows what the others leave")
            borrowed_share = _borrow(targets[plan.noisy[0]], operator, plan)
            lent_s = quiet.fill()
            say(f"{len(plan.noisy)} tenants flood")
            site = _site(daemon, targets, plan, scratch)
            with (
                flooding([targets[name] for name in plan.noisy], plan.record_nbytes),
                watched(site) as overshoot,
            ):
                flooded = quiet.phase()
        daemon.stop()
    gib = quiet.nbytes / GIB
    return {
        "hit_ratio_vs_alone": flooded.hit_ratio / alone.hit_ratio,
        "acquire_p99_vs_alone": flooded.acquire_p99_s / alone.acquire_p99_s,
        "acquire_p99_copies_vs_alone": beside_copies.acquire_p99_s / alone.acquire_p99_s,
        "bandwidth_vs_guarantee": plan.tenants * flooded.nbytes_per_s / alone.nbytes_per_s,
        "borrowed_share": borrowed_share,
        "given_back_s": max(0.0, lent_s - free_s) / gib,
        "cap_overshoot_bytes": overshoot.nbytes,
        "cap_watched": asdict(overshoot),
        "alone": asdict(alone),
        "beside_copies": asdict(beside_copies),
        "flooded": asdict(flooded),
    }


def _site(daemon: Daemon, targets: Mapping[str, str], plan: TenantsPlan, scratch: Path) -> Site:
    """Return what each tenant, and all together, may take of each tier."""
    tenants = [
        Bounds(
            name,
            target,
            [scratch / TENANTS_DIRECTORY / tenant_id(name).hex()],
            plan.dram_nbytes,  # the most that may be lent to it
            FILE_MAX_NBYTES,
        )
        for name, target in targets.items()
    ]
    return Site(daemon.pid, tenants, plan.dram_nbytes, FILE_NBYTES)


class _Quiet:
    """The quiet tenant: asks for its prefixes in turns, and puts again what it did not hit."""

    def __init__(self, client: Client, plan: TenantsPlan) -> None:
        self._client = client
        self._plan = plan
        self._space: NamespaceId = client.register(bench_namespace(QUIET, plan.record_nbytes))
        self._prefixes = [
            chain(self._space, PREFIX_BLOCKS, salt=number.to_bytes(8))
            for number in range(plan.quiet_prefixes)
        ]
        self._cold: NamespaceId = client.register(bench_namespace("cold", plan.record_nbytes))
        self._records = [bytes(plan.record_nbytes)] * PREFIX_BLOCKS

    @property
    def nbytes(self) -> int:
        return len(self._prefixes) * PREFIX_BLOCKS * self._plan.record_nbytes

    def fill(self) -> float:
        """Put the working set; return the seconds that took."""
        began = time.perf_counter()
        for keys in self._prefixes:
            self._put(keys)
        return time.perf_counter() - began

    def empty(self) -> None:
        self._client.admin.clear(self._space)

    def phase(self) -> Phase:
        """Ask for the prefixes again and again, then read some from the file tier."""
        asked = hit = 0
        took: list[float] = []
        end = time.perf_counter() + self._plan.seconds
        number = 0
        while time.perf_counter() < end:
            keys = self._prefixes[number % len(self._prefixes)]
            number += 1
            began = time.perf_counter()
            grant = self._client.acquire(self._space, keys)
            took.append(time.perf_counter() - began)
            self._client.release(grant.lease_id)
            asked, hit = asked + len(keys), hit + grant.hit_blocks
            if grant.hit_blocks < len(keys):
                self._put(keys)
            time.sleep(0.002)  # as an engine asks: now and then
        return Phase(
            hit / asked, statistics.median(took), float(np.percentile(took, 99)), self._read()
        )

    def _put(self, keys: list[BlockKey]) -> None:
        self._client.put(self._space, keys, self._records, wait_s=2.0)

    def _read(self) -> float:
        """Return the speed of reads of durable blocks that the arena does not have."""
        speeds = []
        for number in range(4):
            keys = chain(self._cold, 2 * PREFIX_BLOCKS, salt=os.urandom(8))
            records = [bytes([number]) * self._plan.record_nbytes] * len(keys)
            done = self._client.put(self._cold, keys, records, durable=True, wait_s=10.0)
            if not done.durable:
                raise Unavailable("the file tier did not take the records")
            demoted = self._client.hints.demote(Prefix(self._cold, tuple(keys))).done_blocks
            if demoted != len(keys):
                raise Unavailable(f"{demoted} of {len(keys)} blocks left DRAM: no file was read")
            began = time.perf_counter()
            found = self._client.get(self._cold, keys, wait_s=30.0)
            if any(record is None for record in found):
                raise Unavailable("records that were just stored are missing")
            speeds.append(len(keys) * self._plan.record_nbytes / (time.perf_counter() - began))
        return statistics.median(speeds)


def _borrow(target: str, operator: Client, plan: TenantsPlan) -> float:
    """Let one tenant put all the time; return the part of the free room that it got at most."""
    with Client(target, name="borrower") as client:
        space = client.register(bench_namespace("noise", plan.record_nbytes))
        records = [bytes(plan.record_nbytes)] * PREFIX_BLOCKS
        end = time.monotonic() + SETTLE_S
        number, share = 0, 0.0
        while share < 0.99 and time.monotonic() < end:
            for _ in range(16):
                keys = chain(space, PREFIX_BLOCKS, salt=b"borrow" + number.to_bytes(8))
                client.put(space, keys, records, wait_s=2.0)
                number += 1
            tenants = operator.admin.stats()["tenants"]
            used = {name: each["dram"]["used_bytes"] for name, each in tenants.items()}
            mine = used.pop(plan.noisy[0])
            share = max(share, mine / (plan.dram_nbytes - sum(used.values())))
    return share


# ---- idle ones -----------------------------------------------------------------------------------


def _idle(plan: TenantsPlan) -> dict[str, float]:
    one, many = (_cost_of(count, plan.idle_seconds) for count in (1, plan.idle_tenants))
    more = plan.idle_tenants - 1
    return {
        "idle_rss_mib_each": (many[0] - one[0]) / more / MIB,
        "idle_cpu_share": many[1],
    }


def _cost_of(tenants: int, seconds: float) -> tuple[int, float]:
    """Return bytes beside the arenas, and the part of a core that a daemon takes."""
    settings = ["dram.capacity=512MiB", "file.capacity=2GiB"]
    for number in range(tenants):
        settings += [
            f"tenants.idle-{number}.dram.guaranteed=4MiB",
            f"tenants.idle-{number}.file.guaranteed=16MiB",
        ]
    with Daemon(*settings) as daemon:
        daemon.start()
        time.sleep(2.0)  # what a start leaves to be done
        began_s, began = _cpu_s(daemon.pid), time.monotonic()
        time.sleep(seconds)
        share = (_cpu_s(daemon.pid) - began_s) / (time.monotonic() - began)
        nbytes = _rss_nbytes(daemon.pid)
        daemon.stop()
    return nbytes, share


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _rss_nbytes(pid: int) -> int:
    """Return the resident bytes that are not shared memory: arenas are."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(
        1024 * int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssFile"))
    )
