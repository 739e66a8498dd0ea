"""One workload through one node: what it hit, and how far that is from the best there could be."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from kvstore.replay.bounds import Bounds
from kvstore.replay.node import Node, Setup, Traffic
from kvstore.replay.workload import Workload

PROGRESS_REQUESTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One replay. Ratios are of all prompt tokens; `optimum` is of the room of all tiers together.

    blocks_per_s: blocks asked for per second of this process, bounds not included.
    """

    setup: Setup
    requests: int
    tokens: int
    block_tokens: int
    unique_blocks: int
    hinted_sessions: int
    traffic: Traffic
    infinite: float
    optimum: float
    blocks_per_s: float

    @property
    def dram_hit_ratio(self) -> float:
        return self._ratio(self.traffic.dram_hits)

    @property
    def file_hit_ratio(self) -> float:
        return self._ratio(self.traffic.file_hits)

    @property
    def token_hit_ratio(self) -> float:
        return self._ratio(self.traffic.dram_hits + self.traffic.file_hits)

    @property
    def writes_per_unique(self) -> float:
        """Blocks written to the file tier, per block there is in the trace."""
        return self.traffic.file_writes / max(1, self.unique_blocks)

    def _ratio(self, blocks: int) -> float:
        return blocks * self.block_tokens / max(1, self.tokens)

    def to_dict(self) -> dict[str, Any]:
        """Return everything, flat, ratios first."""
        record = self.setup.record_nbytes
        traffic = self.traffic
        return {
            "token_hit_ratio": self.token_hit_ratio,
            "dram_hit_ratio": self.dram_hit_ratio,
            "file_hit_ratio": self.file_hit_ratio,
            "infinite": self.infinite,
            "optimum": self.optimum,
            "writes_per_unique": self.writes_per_unique,
            "blocks_per_s": self.blocks_per_s,
            "requests": self.requests,
            "tokens": self.tokens,
            "block_tokens": self.block_tokens,
            "unique_blocks": self.unique_blocks,
            "hinted_sessions": self.hinted_sessions,
            "dram_read_bytes": (traffic.dram_hits + traffic.file_hits) * record,
            "dram_written_bytes": (traffic.dram_writes + traffic.file_reads) * record,
            "file_read_bytes": traffic.file_reads * record,
            "file_written_bytes": traffic.file_writes * record,
            **asdict(self.setup),
            **asdict(traffic),
        }


def replay(
    workload: Workload,
    setup: Setup,
    bounds: Bounds,
    *,
    end_hints: float = 0.0,
    seed: int = 1,
    progress: Callable[[int], None] = lambda requests: None,
) -> Result:
    """Send every request of a workload to a new node.

    end_hints: share of the sessions that say so when they end, drawn with `seed`. progress: told
    how many requests were answered, now and then.
    """
    node = Node(setup, workload.block_tokens)
    ending = _ending(workload, end_hints, seed)
    keys = workload.keys
    asked = 0
    began = time.perf_counter()
    for number, request in enumerate(workload.requests):
        node.clock.now_s = request.at_s
        prompt = [keys[block] for block in request.blocks]
        asked += len(prompt)
        node.ask(prompt)
        if number in ending:
            node.end(prompt)
        if number % PROGRESS_REQUESTS == 0:
            progress(number)
    took_s = time.perf_counter() - began
    return Result(
        setup=setup,
        requests=len(workload.requests),
        tokens=workload.tokens,
        block_tokens=workload.block_tokens,
        unique_blocks=workload.unique_blocks,
        hinted_sessions=len(ending),
        traffic=node.traffic,
        infinite=bounds.infinite(),
        optimum=bounds.optimum(setup.dram_blocks + setup.file_blocks),
        blocks_per_s=asked / max(took_s, 1e-9),
    )


def _ending(workload: Workload, share: float, seed: int) -> set[int]:
    """Return the numbers of the requests after which a session says that it ends."""
    last: dict[Any, int] = {}
    for number, request in enumerate(workload.requests):
        if request.session is not None:
            last[request.session] = number
    draw = random.Random(seed)
    return {number for number in last.values() if draw.random() < share}
