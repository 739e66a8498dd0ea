"""The rounds between two processes: each system in turn gets the same blocks over TCP.

Only one system lives at a time: some of them poll. Each turn opens both ends, makes one get that
does not count, and times the others.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore.model.errors import Unavailable
from kvstore_bench.peers.process import Process
from kvstore_bench.peers.roster import NIXL_UCX, OURS, Peer
from kvstore_bench.peers.turn import PeersPlan
from kvstore_bench.tiers.tier import summed_up

Say = Callable[[str], None]

REMOTE_PEERS = (
    Peer(
        OURS,
        "remote.ours",
        checks="XXH3 of every record by the borrower, and the lender's lease",
        durable="",
        cold="",
    ),
    Peer(
        "mooncake",
        "remote.mooncake",
        checks="nobody",
        durable="",
        cold="",
        needs=("mooncake",),
        install="pip install mooncake-transfer-engine-non-cuda (and libibverbs1, libcurl4)",
        environ={"GLOG_minloglevel": "2", "MC_TCP_SLICE_SIZE": str(1 << 20)},
    ),
    Peer(
        NIXL_UCX,
        "remote.nixl",
        checks="nobody",
        durable="",
        cold="",
        needs=("nixl_cu12",),
        install="pip install --no-deps nixl-cu12",
        environ={
            "UCX_TLS": "tcp,self",
            "UCX_TCP_TX_SEG_SIZE": "1M",  # with both, twice as fast as without
            "UCX_TCP_RX_SEG_SIZE": "1M",
            "UCX_TCP_SNDBUF": "8M",
            "UCX_TCP_RCVBUF": "8M",
            "NIXL_LOG_LEVEL": "WARN",
        },
    ),
)


@dataclass(slots=True)
class Remote:
    """What one system did: bytes/s of each get; blocks that did not come, or were wrong."""

    bytes_per_s: list[float] = field(default_factory=list)
    missed: int = 0
    wrong: int = 0


@dataclass(frozen=True, slots=True)
class RemoteCourse:
    """python: returns the one that runs a peer."""

    plan: PeersPlan
    python: Callable[[Peer], str]

    def run(self, peers: Sequence[Peer], absent: Mapping[str, str], say: Say) -> dict[str, Any]:
        """Measure. absent: of those that are not installed, how to get them. Raises Unavailable if
        this store fails; a peer that does takes no more turns."""
        records = {peer.name: Remote() for peer in peers}
        failed: dict[str, str] = {}
        for number in range(self.plan.rounds):
            for peer in peers[:: -1 if number % 2 else 1]:
                say(f"{peer.name}, remote")
                if peer.name in failed:
                    continue
                try:
                    self._turn(peer, number, records[peer.name])
                except Unavailable as error:
                    if peer.ours:
                        raise
                    failed[peer.name] = f"round {number + 1}: {error}"
        return remote_result(peers, records, absent=absent, failed=failed)

    def _turn(self, peer: Peer, number: int, record: Remote) -> None:
        python = self.python(peer)
        with tempfile.TemporaryDirectory(prefix="kvb-") as runtime:
            about = {
                "module": f"kvstore_bench.peers.{peer.module}",
                "place": {"directory": runtime, "runtime": runtime, "threads": self.plan.threads},
                "blocks": {
                    "count": self.plan.remote_blocks,
                    "nbytes": self.plan.block_nbytes,
                    "seed": self.plan.seed,
                },
                "number": number,
            }
            with Process(peer, python, Path(runtime)) as lender:
                where = lender.ask("lend", **about)["where"]
                with Process(peer, python, Path(runtime)) as borrower:
                    borrower.ask("borrow", where=where, **about)
                    for timed in range(-1, self.plan.remote_gets):
                        self._get(borrower, record, number, counts=timed >= 0)
                    borrower.end()
                lender.end()

    def _get(self, borrower: Process, record: Remote, number: int, *, counts: bool) -> None:
        got = borrower.ask("fetch", number=number)
        missed = self.plan.remote_blocks - got["found"]
        record.missed += missed
        record.wrong += got["wrong"]
        if counts and not missed:
            nbytes = self.plan.remote_blocks * self.plan.block_nbytes
            record.bytes_per_s.append(nbytes / got["seconds"])


def remote_result(
    peers: Sequence[Peer],
    records: Mapping[str, Remote],
    *,
    absent: Mapping[str, str],
    failed: Mapping[str, str],
) -> dict[str, Any]:
    """Sum up: medians and ranges of all gets, and ours over the best of the others."""
    rows: dict[str, Any] = {}
    for peer in peers:
        record = records[peer.name]
        rows[peer.name] = {
            "bytes_per_s": summed_up({"": record.bytes_per_s})[""] if record.bytes_per_s else None,
            "gets": len(record.bytes_per_s),
            "missed": record.missed,
            "wrong": record.wrong,
            "checks": peer.checks,
            "status": failed.get(peer.name, "measured"),
        }
    rows |= {name: {"status": "not installed", "install": line} for name, line in absent.items()}
    medians = {name: row["bytes_per_s"]["p50"] for name, row in rows.items() if row.get("gets")}
    ours = medians.pop(OURS, None)
    best = max(medians, key=lambda name: medians[name], default=None)
    return {
        "remote_get_best": best,
        "remote_get_vs_best": ours / medians[best] if ours and best else None,
        "remote_wrong": sum(record.wrong for record in records.values()),
        "remote": rows,
    }
