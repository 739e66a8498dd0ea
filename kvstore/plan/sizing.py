"""Tier sizes for a hit ratio, found by replays of the planner and the policies that ship."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvstore.model.errors import InvalidRequest
from kvstore.replay import Result, Setup, Traffic, Workload, replay
from kvstore.replay.bounds import Bounds
from kvstore.replay.node import Node

FOUND_RATIO = 1.05  # sizes are looked for until they are known to so much
GUESS_OFF = 1.1  # how far a first guess is from what is found, most often
MINUTE_S = 60.0
DAY_S = 86400.0
SECONDS_MIN = 1e-3  # of a trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """hits: of those an infinite cache has. dram_hits: of these, what comes from dram.
    record_nbytes, file_record_nbytes: as of a Setup."""

    hits: float
    dram_hits: float
    policy: str
    record_nbytes: int
    file_record_nbytes: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.hits <= 1 or not 0 <= self.dram_hits <= 1:
            raise InvalidRequest("shares of the hits are from 0 to 1")


@dataclass(frozen=True, slots=True)
class Sizing:
    """The replay with the sizes found. peak_reads, peak_writes: blocks of the file tier in the
    busiest minute, or in all of a shorter trace: `peak_s`. seconds: of the trace."""

    result: Result
    seconds: float
    peak_reads: int
    peak_writes: int

    @property
    def written_per_day(self) -> float:
        """Bytes written to the file tier."""
        written = self.result.written_blocks * self.result.setup.file_record_nbytes
        return written / self.seconds * DAY_S

    @property
    def peak_s(self) -> float:
        return min(MINUTE_S, self.seconds)


def size_tiers(
    workload: Workload,
    target: Target,
    *,
    prefill_flops: Callable[[float], float] | None = None,
    progress: Callable[[], None] = lambda: None,
) -> Sizing:
    """Return the smallest tiers that reach a target, to 5 %: first the file tier, which has what
    dram has as well, then dram. progress: told of each replay. Raises InvalidRequest for a
    workload without hits."""
    bounds = Bounds(workload)
    hits = bounds.infinite() * workload.tokens / workload.block_tokens
    if hits < 1:
        raise InvalidRequest("no request of this workload repeats a block of another")
    largest = max(len(request.blocks) for request in workload.requests)
    plain = Setup(
        dram_blocks=workload.unique_blocks,
        dram_policy=target.policy,
        file_policy=target.policy,
        record_nbytes=target.record_nbytes,
        file_record_nbytes=target.file_record_nbytes,
    )

    def enough_in_all(blocks: int) -> bool:
        progress()
        room = replace(plain, dram_blocks=blocks, leased_fraction=1.0)  # of files all is a hit
        return _hits(workload, room)[0] >= target.hits * hits

    room = _smallest(enough_in_all, largest, workload.unique_blocks, bounds.room_guess(target.hits))

    def enough_in_dram(blocks: int) -> bool:
        progress()
        dram, file = _hits(workload, replace(plain, dram_blocks=blocks, file_blocks=room))
        return dram >= target.dram_hits * (dram + file)

    guess = bounds.room_guess(target.hits * target.dram_hits)
    least = math.ceil(largest / plain.leased_fraction)  # with less, no hit is the largest prompt
    dram = _smallest(enough_in_dram, least, room, guess)
    found = replace(plain, dram_blocks=dram, file_blocks=room)
    progress()
    return measure(workload, found, bounds, prefill_flops=prefill_flops)


def measure(
    workload: Workload,
    setup: Setup,
    bounds: Bounds,
    *,
    prefill_flops: Callable[[float], float] | None = None,
) -> Sizing:
    """Replay a workload with given sizes."""
    reads, writes = Counter[int](), Counter[int]()
    before = Traffic()
    began_s = workload.counted[0].at_s

    def watch(at_s: float, traffic: Traffic) -> None:
        minute = int((at_s - began_s) // MINUTE_S)
        reads[minute] += traffic.file_reads - before.file_reads
        writes[minute] += traffic.file_writes - before.file_writes
        before.file_reads, before.file_writes = traffic.file_reads, traffic.file_writes

    result = replay(workload, setup, bounds, prefill_flops=prefill_flops, watch=watch)
    seconds = max(SECONDS_MIN, workload.seconds)
    return Sizing(result, seconds, max(reads.values()), max(writes.values()))


def _smallest(enough: Callable[[int], bool], least: int, most: int, guess: int) -> int:
    """Return a number that is enough, hardly more than one that is not. `most` is taken to be.
    A guess that is near saves most of the search."""
    if least >= most:
        return least
    low, high, step = least, most, GUESS_OFF
    tried = max(least, min(most, guess))
    if tried == most or enough(tried):
        high = tried
        while high > least:
            tried = max(least, int(high / step))
            if not enough(tried):
                low = tried
                break
            high, step = tried, step * step
    else:
        low = tried
        while low < most:
            tried = min(most, math.ceil(low * step))
            if tried == most or enough(tried):
                high = tried
                break
            low, step = tried, step * step
    while high > low * FOUND_RATIO and high - low > 1:
        middle = max(low + 1, min(high - 1, round((low * high) ** 0.5)))
        if enough(middle):
            high = middle
        else:
            low = middle
    return high


def _hits(workload: Workload, setup: Setup) -> tuple[int, int]:
    """Return the blocks that dram and the file tier hit."""
    node = Node(setup, workload.block_tokens)
    keys = workload.keys
    for number, request in enumerate(workload.requests):
        node.clock.now_s = request.at_s
        if number == workload.warmup:
            node.count_anew()
        node.ask([keys[block] for block in request.blocks])
    return node.traffic.dram_hits, node.traffic.file_hits
