"""What `kvstore bench cluster` measures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore_bench.store.store import EXTENT_NBYTES

FLEET = "bench"
WAIT_S = 60.0
FIRST_NBYTES = 16 << 20  # of the prefix: what an engine can begin with


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """streams: threads of a daemon for peers, and streams of iperf3. seconds: of a round of local
    gets. peers, peer_blocks: how many, of which all heads are known, and what each has; of
    changes_per_s heads a second. hosts, puts: of each, whose being found is timed. asks: of what
    nobody has. view_s: for which processor time is looked at."""

    record_nbytes: int = 2 << 20
    small_nbytes: int = 256 << 10
    blocks: int = 64
    rounds: int = 15
    streams: int = 4
    seconds: float = 1.0
    peers: int = 100
    peer_blocks: int = 1_000_000
    changes_per_s: int = 62
    asks: int = 6000
    view_s: float = 10.0
    hosts: int = 8
    puts: int = 15

    @property
    def nbytes(self) -> int:
        """Bytes of every prefix."""
        return self.blocks * self.record_nbytes

    @property
    def first_blocks(self) -> int:
        return min(self.blocks, -(-FIRST_NBYTES // self.record_nbytes))

    @property
    def arena_nbytes(self) -> int:
        """Room in which nothing that is measured gets evicted."""
        return -(-4 * self.nbytes // EXTENT_NBYTES) * EXTENT_NBYTES

    def settings(self, ports: Sequence[int]) -> list[str]:
        """Return what all daemons have."""
        return [
            f"dram.capacity={self.arena_nbytes}",
            f"dram.extent={EXTENT_NBYTES}",
            f"cluster.fleet={FLEET}",
            "cluster.membership=static",
            f"cluster.static={json.dumps([f'127.0.0.1:{port}' for port in ports])}",
            f"cluster.threads={self.streams}",
        ]
