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

    saved_flops: operations of prefill that hits made needless; None if nobody said what it takes.
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
    saved_flops: float | None = None
    hit_requests: int = 0

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
        return self.written_blocks / max(1, self.unique_blocks)

    @property
    def written_blocks(self) -> int:
        """To the file tier, those that moved to win space back included."""
        return self.traffic.file_writes + self.traffic.file_moved

    def _ratio(self, blocks: int) -> float:
        return blocks * self.block_tokens / max(1, self.tokens)

    def to_dict(self) -> dict[str, Any]:
        """Return everything, flat, ratios first."""
        record, in_files = self.setup.record_nbytes, self.setup.file_record_nbytes
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
            "hit_requests": self.hit_requests,
            "tokens": self.tokens,
            "block_tokens": self.block_tokens,
            "unique_blocks": self.unique_blocks,
            "hinted_sessions": self.hinted_sessions,
            "dram_read_bytes": (traffic.dram_hits + traffic.file_hits) * record,
            "dram_written_bytes": (traffic.dram_writes + traffic.file_reads) * record,
            "file_read_bytes": traffic.file_reads * in_files,
            "file_written_bytes": self.written_blocks * in_files,
            "saved_flops": self.saved_flops,
            **asdict(self.setup),
            **asdict(traffic),
        }


def replay(
    workload: Workload,
    setup: Setup,
    bounds: Bounds,
    *,
    end_hints: float = 0.0,
    restart_at: float | None = None,
    seed: int = 1,
    prefill_flops: Callable[[float], float] | None = None,
    watch: Callable[[float, Traffic], None] = lambda at_s, traffic: None,
    progress: Callable[[int], None] = lambda requests: None,
) -> Result:
    """Send every request of a workload to a new node; what warms it up is not counted.

    end_hints: share of the sessions that say so when they end, drawn with `seed`. restart_at: after
    this share of the requests, the node restarts: its file tier stays. prefill_flops: operations
    that computing so many tokens of a prompt takes. watch: told the time of the trace and what was
    counted so far, after every request that counts. progress: told how many requests were answered,
    now and then.
    """
    node = Node(setup, workload.block_tokens)
    ending = ending_requests(workload, end_hints, seed)
    keys = workload.keys
    asked, saved, hit_requests = 0, 0.0, 0
    restart = -1 if restart_at is None else int(restart_at * len(workload.requests))
    began = time.perf_counter()
    for number, request in enumerate(workload.requests):
        node.clock.now_s = request.at_s
        if number == restart:
            node.restart()
        if number == workload.warmup:
            node.count_anew()
        prompt = [keys[block] for block in request.blocks]
        asked += len(prompt)
        hit = node.ask(prompt)
        if number >= workload.warmup:
            hit_requests += hit > 0
            if prefill_flops is not None:
                saved += prefill_flops(hit * workload.block_tokens)
            watch(request.at_s, node.traffic)
        if number in ending:
            node.end(prompt)
        if number % PROGRESS_REQUESTS == 0:
            progress(number)
    node.settle()
    took_s = time.perf_counter() - began
    return Result(
        setup=setup,
        requests=len(workload.counted),
        tokens=workload.tokens,
        block_tokens=workload.block_tokens,
        unique_blocks=workload.unique_blocks,
        hinted_sessions=len(ending),
        traffic=node.traffic,
        infinite=bounds.infinite(),
        optimum=bounds.optimum(setup.dram_blocks + setup.file_blocks),
        blocks_per_s=asked / max(took_s, 1e-9),
        saved_flops=saved if prefill_flops is not None else None,
        hit_requests=hit_requests,
    )


def ending_requests(workload: Workload, share: float, seed: int) -> set[int]:
    """Return the numbers of the requests after which a session says that it ends."""
    last: dict[Any, int] = {}
    for number, request in enumerate(workload.requests):
        if request.session is not None:
            last[request.session] = number
    draw = random.Random(seed)
    return {number for number in last.values() if draw.random() < share}
