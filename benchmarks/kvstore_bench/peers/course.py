"""The rounds: every system in turn does the same with the same bytes. Only one lives at a time."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from kvstore.model.errors import Unavailable
from kvstore_bench.peers.blocks import Blocks
from kvstore_bench.peers.device import Device, yardstick_blocks
from kvstore_bench.peers.process import Process
from kvstore_bench.peers.remote.course import RemoteCourse
from kvstore_bench.peers.roster import (
    LMCACHE,
    LMCACHE_OVER_KVSTORE,
    LMCACHE_OVER_S3,
    LMCACHE_OVER_VALKEY,
    PEERS,
    Peer,
)
from kvstore_bench.peers.turn import (
    DEVICE_GETS,
    LOWER_GET,
    LOWER_PUT,
    PeersPlan,
    Record,
    Turn,
)
from kvstore_bench.tiers.tier import summed_up

Say = Callable[[str], None]

GETS = ("hot_get", *DEVICE_GETS)
PUTS = ("put_accepted", "put_durable")


@dataclass(frozen=True, slots=True)
class Course:
    """One run in a scratch folder of `directory`. pythons: by a peer's name, where not our own."""

    plan: PeersPlan
    directory: Path
    pythons: Mapping[str, str] = field(default_factory=dict)

    def present(self, peers: Sequence[Peer]) -> tuple[list[Peer], dict[str, str]]:
        """Return the peers that are installed, and for the others what to do about it."""
        lines = {peer.name: self._lacks(peer) for peer in peers}
        absent = {name: line for name, line in lines.items() if line}
        return [peer for peer in peers if peer.name not in absent], absent

    def run(self, peers: Sequence[Peer], say: Say) -> dict[str, Any]:
        """Measure. Raises Unavailable if this store fails; a peer that does takes no more turns."""
        records = {peer.name: Record() for peer in peers}
        failed: dict[str, str] = {}
        plan = self.plan
        blocks = yardstick_blocks(count=plan.blocks, nbytes=plan.block_nbytes, seed=plan.seed)
        for number in range(self.plan.rounds):
            for peer in peers[:: -1 if number % 2 else 1]:
                say(peer.name)
                if peer.name in failed:
                    continue
                try:
                    self._turn(peer, number, records[peer.name], blocks)
                except Unavailable as error:
                    if peer.ours:
                        raise
                    failed[peer.name] = f"round {number + 1}: {error}"
        return result(self.plan, records) | {"failed": failed}

    def _turn(self, peer: Peer, number: int, record: Record, blocks: Blocks) -> None:
        scratch = partial(tempfile.TemporaryDirectory, prefix="kvstore-bench-", dir=self.directory)
        with (
            scratch() as directory,
            scratch() as beside,
            tempfile.TemporaryDirectory(prefix="kvb-") as runtime,
            closing(Device(Path(beside), blocks, self.plan.threads)) as device,
        ):
            python, where = self._python(peer), (Path(directory), Path(runtime))
            Turn(peer, python, self.plan, number, record, *where, device).run()

    @property
    def remote(self) -> RemoteCourse:
        """The rounds between two processes."""
        return RemoteCourse(self.plan, self._python)

    def _lacks(self, peer: Peer) -> str:
        """Return in one line what is missing and how to get it; "" if nothing is."""
        python = self._python(peer)
        try:
            with Process(peer, python, Path(tempfile.gettempdir())) as process:
                missing = process.ask("check", needs=peer.needs)["missing"]
        except Unavailable as error:
            return f"{python} cannot run it: {error}"
        return f"{python} has no {', '.join(missing)}: {peer.install}" if missing else ""

    def _python(self, peer: Peer) -> str:
        return self.pythons.get(peer.name, sys.executable)


def result(plan: PeersPlan, records: Mapping[str, Record]) -> dict[str, Any]:
    """Sum up: medians and ranges, and ours over the best peer's median of each measure; for gets
    from the device, of their shares of what it gave at the time."""
    peers = {peer.name: peer for peer in PEERS}
    speeds = {name: summed_up(record.bytes_per_s) for name, record in records.items()}
    shares = {name: summed_up(record.of_device) for name, record in records.items()}
    ratios: dict[str, Any] = {}
    for measure in PUTS + GETS:
        known = shares if measure in DEVICE_GETS else speeds
        medians = {name: each[measure]["p50"] for name, each in known.items() if measure in each}
        ours = [value for name, value in medians.items() if peers[name].ours]
        rivals = {name: value for name, value in medians.items() if peers[name].rival}
        best = max(rivals, key=lambda name: rivals[name], default=None)
        ratios[f"{measure}_best"] = best
        ratios[f"{measure}_vs_best"] = ours[0] / rivals[best] if ours and best else None
    return {
        **ratios,
        "lmcache_over_kvstore": over_files(LMCACHE_OVER_KVSTORE, speeds, shares),
        "lmcache_over_s3": over_files(LMCACHE_OVER_S3, speeds, shares),
        "lmcache_over_valkey": over_files(LMCACHE_OVER_VALKEY, speeds, shares),
        "wrong": sum(record.wrong for record in records.values()),
        "systems": {
            name: {
                "bytes_per_s": speeds[name],
                "of_device": shares[name],
                "ready_s": summed_up({"": record.ready_s})[""] if record.ready_s else None,
                "kept": min(record.kept, default=None),
                "missed": record.missed,
                "wrong": record.wrong,
                "checks": peers[name].checks,
                "durable": peers[name].durable or None,
                "cold": peers[name].cold or None,
            }
            for name, record in records.items()
        },
        "plan": asdict(plan),
    }


def over_files(
    name: str, speeds: Mapping[str, Any], shares: Mapping[str, Any]
) -> dict[str, float | None] | None:
    """Return LMCache over something else, over LMCache over its own files; None: not both ran.

    put_warm: until what is below had taken it. get_warm: from there, which may have it in memory.
    get_after_kill: with the page cache dropped, of what the device gave at the time.
    """
    if name not in speeds or LMCACHE not in speeds:
        return None

    def ratio(known: Mapping[str, Any], measure: str) -> float | None:
        one, other = known[name].get(measure), known[LMCACHE].get(measure)
        return one["p50"] / other["p50"] if one and other else None

    return {
        "put_warm": ratio(speeds, LOWER_PUT),
        "get_warm": ratio(speeds, LOWER_GET),
        "get_after_kill": ratio(shares, "restart_get"),
    }
