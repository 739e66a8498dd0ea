"""One workload through one node: what it hit, and how far that is from the best there could be."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kvstore.decide.policy import Choice
from kvstore.replay.bounds import Bounds
from kvstore.replay.models import TOKENS, ModelHits
from kvstore.replay.node import Node, Setup, Traffic
from kvstore.replay.workload import Request, Workload

PROGRESS_REQUESTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One replay. Ratios are of all prompt tokens; `optimum` is of the room of all tiers together.

    saved_flops: operations of prefill that hits made needless; None if nobody said what it takes.
    blocks_per_s: blocks asked for per second of this process, bounds not included. models: what
    each hit, if it was said what they cost. choices: which order each tier follows at the end.
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
    models: Sequence[ModelHits] = ()
    choices: Mapping[str, Choice | None] = field(default_factory=dict)

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
    def saved_s(self) -> float | None:
        """Seconds of prefill that hits made needless; None if nobody said what it takes."""
        return sum(each.saved_s for each in self.models) if self.models else None

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
            "saved_s": self.saved_s,
            "models": [each.to_dict() for each in self.models],
            **self._choices(),
            **asdict(self.setup),
            **asdict(traffic),
        }

    def _choices(self) -> dict[str, Any]:
        """Return, of the tiers whose policy has more than one order, which it follows and why."""
        return {
            f"{tier}_{name}": value
            for tier, choice in self.choices.items()
            if choice is not None
            for name, value in choice.to_dict().items()
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
    mix: Mapping[str, float] | None = None,
    watch: Callable[[float, Traffic], None] = lambda at_s, traffic: None,
    progress: Callable[[int], None] = lambda requests: None,
) -> Result:
    """Send every request of a workload to a new node; what warms it up is not counted.

    end_hints: share of the sessions that say so when they end, drawn with `seed`. restart_at: after
    this share of the requests, the node restarts: its file tier stays. prefill_flops: operations of
    computing so many tokens of a prompt. mix: seconds of prefill of 1,000 tokens, by model, that
    `check_mix` has seen. watch: told the time of the trace and what was counted so far, after each
    request that counts. progress: told how many requests were answered, now and then.
    """
    hits = _Hits(workload.block_tokens, mix or {}, prefill_flops)
    node = Node(setup, workload.block_tokens, hits.costs)
    ending = ending_requests(workload, end_hints, seed)
    restart = -1 if restart_at is None else int(restart_at * len(workload.requests))
    asked, began = 0, time.perf_counter()
    for number, request in enumerate(workload.requests):
        node.clock.now_s = request.at_s
        if number == restart:
            node.restart()
        if number == workload.warmup:
            node.count_anew()
        prompt = [workload.keys[block] for block in request.blocks]
        asked += len(prompt)
        hit = node.ask(prompt, model=request.model)
        if number >= workload.warmup:
            hits.note(request, hit)
            watch(request.at_s, node.traffic)
        if number in ending:
            node.end(prompt)
        if number % PROGRESS_REQUESTS == 0:
            progress(number)
    node.settle()
    node_s = time.perf_counter() - began
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
        blocks_per_s=asked / max(node_s, 1e-9),
        saved_flops=hits.saved_flops,
        hit_requests=hits.requests,
        models=tuple(hits.models.values()),
        choices=_choices(node, setup),
    )


class _Hits:
    """What the requests that count have hit, and what that saved. costs: seconds of a block."""

    def __init__(
        self,
        block_tokens: int,
        mix: Mapping[str, float],
        prefill_flops: Callable[[float], float] | None,
    ) -> None:
        self.requests = 0
        self.saved_flops = 0.0 if prefill_flops is not None else None
        self.models = {name: ModelHits(name, cost) for name, cost in mix.items()}
        self.costs = {name: cost * block_tokens / TOKENS for name, cost in mix.items()}
        self._block_tokens = block_tokens
        self._prefill_flops = prefill_flops

    def note(self, request: Request, hit: int) -> None:
        """Count a request that hit so many blocks."""
        self.requests += hit > 0
        if self.models:
            self.models[request.model].note(request.tokens, hit * self._block_tokens)
        if self._prefill_flops is not None and self.saved_flops is not None:
            self.saved_flops += self._prefill_flops(hit * self._block_tokens)


def _choices(node: Node, setup: Setup) -> dict[str, Choice | None]:
    choices = node.planner.policies.choices
    return choices if setup.file_blocks else {"dram": choices["dram"]}


def ending_requests(workload: Workload, share: float, seed: int) -> set[int]:
    """Return the numbers of the requests after which a session says that it ends."""
    last: dict[Any, int] = {}
    for number, request in enumerate(workload.requests):
        if request.session is not None:
            last[request.session] = number
    draw = random.Random(seed)
    return {number for number in last.values() if draw.random() < share}
