"""One workload through many hosts: what each source gave, and how far that is from one host with
all the room."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvstore.move.peer_heads import pause_s
from kvstore.peer.view import BYTES_A_HEAD
from kvstore.replay.hosts import Hosts, Lent
from kvstore.replay.node import Setup, Traffic
from kvstore.replay.routers import LOAD_BOUND, Router, make_router
from kvstore.replay.run import PROGRESS_REQUESTS, Result, ending_requests
from kvstore.replay.told import Staleness
from kvstore.replay.workload import Workload
from kvstore.settings import ClusterSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """What is replayed. router: of ROUTERS. view_age_s: seconds between two answers of a host to
    one that follows its heads; None: as daemons do. load_bound: of the router `kv`."""

    hosts: int
    router: str = "random"
    view_age_s: float | None = None
    load_bound: float = LOAD_BOUND
    seed: int = 1

    @property
    def age_s(self) -> float:
        return pause_s(self.hosts - 1) if self.view_age_s is None else self.view_age_s


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsResult:
    """One replay over many hosts. setup: of each of them. one: one host with all the room.

    view_heads: known to the host that knows most. busiest: requests of the busiest host.
    """

    fleet: Fleet
    setup: Setup
    one: Result
    traffic: Traffic
    lent: Lent
    staleness: Staleness
    view_heads: int
    view_level: int
    busiest: int
    hit_requests: int
    blocks_per_s: float
    saved_flops: float | None

    @property
    def own_tokens(self) -> int:
        return (self.traffic.dram_hits + self.traffic.file_hits) * self.one.block_tokens

    @property
    def peer_tokens(self) -> int:
        return self.lent.hits * self.one.block_tokens

    @property
    def hit_tokens(self) -> float:
        """Tokens that were hit, at their own host or at peers, over those of one host with all the
        room."""
        of_one = self.one.token_hit_ratio * self.one.tokens
        return (self.own_tokens + self.peer_tokens) / of_one if of_one else 1.0

    @property
    def peer_bytes(self) -> int:
        """What went from host to host."""
        lent, setup = self.lent, self.setup
        in_dram = (lent.blocks - lent.from_files) * setup.record_nbytes
        return in_dram + lent.from_files * setup.file_record_nbytes

    @property
    def view_bytes(self) -> int:
        return self.view_heads * BYTES_A_HEAD

    @property
    def own_hit_ratio(self) -> float:
        return self.own_tokens / max(1, self.one.tokens)

    @property
    def peer_hit_ratio(self) -> float:
        return self.peer_tokens / max(1, self.one.tokens)

    def to_dict(self) -> dict[str, Any]:
        """Return everything, flat."""
        setup, traffic, one, lent = self.setup, self.traffic, self.one, self.lent
        return {
            "hosts": self.fleet.hosts,
            "router": self.fleet.router,
            "hit_tokens": self.hit_tokens,
            "token_hit_ratio": self.own_hit_ratio + self.peer_hit_ratio,
            "own_hit_ratio": self.own_hit_ratio,
            "peer_hit_ratio": self.peer_hit_ratio,
            "own_tokens": self.own_tokens,
            "peer_tokens": self.peer_tokens,
            "computed_tokens": one.tokens - self.own_tokens - self.peer_tokens,
            "one_host_tokens": round(one.token_hit_ratio * one.tokens),
            "one_host_hit_ratio": one.token_hit_ratio,
            "infinite": one.infinite,
            "optimum": one.optimum,
            "peer_bytes": self.peer_bytes,
            "peer_bytes_from_files": lent.from_files * setup.file_record_nbytes,
            "asked_requests": lent.asked,
            "vain_requests": lent.vain,
            "view_heads": self.view_heads,
            "view_bytes": self.view_bytes,
            "view_bytes_per_head": BYTES_A_HEAD,
            "view_level": self.view_level,
            "view_age_s": self.fleet.age_s,
            "staleness_mean_s": self.staleness.mean_s,
            "staleness_max_s": self.staleness.max_s,
            "busiest_host_requests": self.busiest,
            "load_bound": self.fleet.load_bound if self.fleet.router == "kv" else None,
            "requests": one.requests,
            "hit_requests": self.hit_requests,
            "tokens": one.tokens,
            "block_tokens": one.block_tokens,
            "unique_blocks": one.unique_blocks,
            "hinted_sessions": one.hinted_sessions,
            "file_written_bytes": (traffic.file_writes + traffic.file_moved)
            * setup.file_record_nbytes,
            "dram_policy": setup.dram_policy,
            "file_policy": setup.file_policy,
            "host_dram_blocks": setup.dram_blocks,
            "host_file_blocks": setup.file_blocks,
            "record_nbytes": setup.record_nbytes,
            "refused": traffic.refused,
            "blocks_per_s": self.blocks_per_s,
            "saved_flops": self.saved_flops,
        }


def replay_hosts(
    workload: Workload,
    setup: Setup,
    fleet: Fleet,
    one: Result,
    *,
    end_hints: float = 0.0,
    prefill_flops: Callable[[float], float] | None = None,
    progress: Callable[[int], None] = lambda requests: None,
) -> HostsResult:
    """Send every request of a workload to one of many new hosts.

    setup: of each of them. one: what one host did with the room of all: see `all_of`. The rest is
    as in `replay`. Raises InvalidRequest for a setup that holds no block, or a router that is none.
    """
    hosts, router = _begin(setup, fleet, workload.block_tokens)
    ending = ending_requests(workload, end_hints, fleet.seed)
    keys = workload.keys
    asked, hit_requests, saved = 0, 0, 0.0
    began = time.perf_counter()
    for number, request in enumerate(workload.requests):
        if number == workload.warmup:
            hosts.count_anew()
        hosts.tick(request.at_s)
        prompt = [keys[block] for block in request.blocks]
        asked += len(prompt)
        host = router.route(request, prompt)
        hit = hosts.ask(host, prompt, request.at_s)
        if number >= workload.warmup:
            hit_requests += hit > 0
            if prefill_flops is not None:
                saved += prefill_flops(hit * workload.block_tokens)
        if number in ending:
            hosts.nodes[host].end(prompt)
        if number % PROGRESS_REQUESTS == 0:
            progress(number)
    hosts.settle()
    took_s = time.perf_counter() - began
    return HostsResult(
        fleet=fleet,
        setup=setup,
        one=one,
        traffic=hosts.traffic,
        lent=hosts.lent,
        staleness=hosts.told.staleness,
        view_heads=hosts.told.heads_known() if fleet.hosts > 1 else 0,
        view_level=hosts.told.level,
        busiest=max(hosts.requests),
        hit_requests=hit_requests,
        blocks_per_s=asked / max(took_s, 1e-9),
        saved_flops=saved if prefill_flops is not None else None,
    )


def _begin(setup: Setup, fleet: Fleet, block_tokens: int) -> tuple[Hosts, Router]:
    hosts = Hosts(
        fleet.hosts,
        setup,
        block_tokens,
        age_s=fleet.age_s,
        view_nbytes_max=ClusterSettings().view_bytes,
        seed=fleet.seed,
    )
    router = make_router(
        fleet.router,
        fleet.hosts,
        seed=fleet.seed,
        holding=hosts.holding,
        load_bound=fleet.load_bound,
    )
    return hosts, router
