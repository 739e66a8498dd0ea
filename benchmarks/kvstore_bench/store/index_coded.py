"""What coded records cost the daemon: memory a block, gaps in the arena, and time to match.

The planner that ships, over the allocator that ships; only the bytes are not there. Records have
the sizes of Gemma 3 270M's: L3's vary as they do on its KV, a lossy block has a base part and a
fine part, and the first block of a prefix is exact. A hybrid model has records of two sizes: its
layers with windows, stored at the end of a prefix alone, are five times as many as the others.
Prefixes come, are asked for again, and leave.
"""

from __future__ import annotations

import gc
import multiprocessing
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from kvstore.decide.planner import Planner, Reservation, Steps
from kvstore.decide.planner.moves import Space
from kvstore.decide.policy import policy_by_name
from kvstore.model.block import (
    PAGE_NBYTES,
    BlockKey,
    Group,
    Namespace,
    Part,
    Slot,
    Span,
    padded,
)
from kvstore.model.errors import InvalidRequest
from kvstore.tier.dram.allocator import ExtentAllocator
from kvstore_kernels.codec.coder import BASE_PLANES, FINE_PLANES, stored_nbytes
from kvstore_kernels.codec.places import Axis, Place, Shape
from kvstore_kernels.codec.record import DType

Say = Callable[[str], None]

LAYERS, CHANNELS, TOKENS = 18, 256, 16  # Gemma 3 270M, one head
L3_MEAN = 45.89 / 64  # of raw: its records, as three texts have them
BETWEEN = 52 / 72  # of its 72 pages: the worst mean, between two slots, so that records have either
L3_SPREAD = 0.0016  # standard deviation of its records' sizes
HYBRID_TOKENS = 32
HYBRID_PAGES = 18, 87  # L3 of 3 layers and of 15: 0.72 of their 24 and 120 pages, rounded up
HYBRID_WINDOW = 512
FIRST_IS_LARGER = 0.008  # by so much is a sequence's first record larger than others
PREFIX_BLOCKS = (16, 112)  # from, to
LAST_PREFIXES = 1000
CLOCK_STEP_S = 0.1
EXTENT_NBYTES = 1 << 30
SMALL_ARENA_NBYTES = 60 << 20  # a few prefixes: gaps weigh more
SMALL_LAST_PREFIXES = 8  # so that most of what is asked for again is there, and stays longer
SMALL_TURNOVERS = 30  # gaps become more for so long
TURNOVERS = 6
MATCH_KEYS = 1000


@dataclass(frozen=True, slots=True)
class CodedIndexPlan:
    """blocks: resident, for their memory. arena_nbytes: for its gaps. last_prefixes: of which some
    are asked for again meanwhile. turnovers: times an arena's bytes are put; of these, what is
    counted begins after half. matches: timed."""

    blocks: int = 250_000
    arena_nbytes: int = 4 << 30
    last_prefixes: int = LAST_PREFIXES
    turnovers: int = TURNOVERS
    matches: int = 500
    seed: int = 0

    def small(self) -> CodedIndexPlan:
        """Return the same for a small arena."""
        return replace(
            self,
            arena_nbytes=min(self.arena_nbytes, SMALL_ARENA_NBYTES),
            last_prefixes=SMALL_LAST_PREFIXES,
            turnovers=SMALL_TURNOVERS,
        )


class Sizes:
    """Bytes of records, as a worker stores them."""

    def __init__(self, seed: int, l3_mean: float = L3_MEAN) -> None:
        self._mean = l3_mean
        heads, tokens, channels = (
            Axis(1, TOKENS * CHANNELS),
            Axis(TOKENS, CHANNELS),
            Axis(CHANNELS, 1),
        )
        layer = [[Place(kind, heads, tokens, channels)] for kind in "KV"]
        self.shape = Shape(layer * LAYERS, DType.BF16)
        self.base = self.shape.ep_nbytes(BASE_PLANES, base=True)
        self.fine = self.shape.ep_nbytes(FINE_PLANES, base=False)
        self._draw = random.Random(seed)

    def l3(self, *, first: bool) -> int:
        mean = self.shape.raw_nbytes * self._mean * (1 + FIRST_IS_LARGER * first)
        return stored_nbytes(int(self._draw.gauss(mean, mean * L3_SPREAD)), self.shape)

    def a_page_or_none(self) -> int:
        return self._draw.choice((-1, 0, 0, 1))


class Kind(NamedTuple):
    """A namespace, and the records of a prefix in it: a span each, and the sizes over the spans."""

    spec: Namespace
    records: Callable[[int], tuple[tuple[Span, ...], list[int]]]


def l3_kind(sizes: Sizes, name: str = "l3") -> Kind:
    spec = Namespace(
        TOKENS, (Group("all", sizes.shape.record_nbytes, varies=True),), (("bench", name),)
    )

    def records(count: int) -> tuple[tuple[Span, ...], list[int]]:
        spans = (Span(Part(0, 0), 0, count),)
        return spans, [sizes.l3(first=not block) for block in range(count)]

    return Kind(spec, records)


def ep_kind(sizes: Sizes) -> Kind:
    groups = (
        Group("all", sizes.shape.record_nbytes, varies=True),
        Group("all.fine", sizes.fine, refines=0, base_nbytes=sizes.base),
    )
    spec = Namespace(TOKENS, groups, (("bench", "ep"),), fidelity="ep")

    def records(count: int) -> tuple[tuple[Span, ...], list[int]]:
        spans = (Span(Part(0, 0), 0, count), Span(Part(1, 0), 0, count))
        bases = [sizes.base if block else sizes.l3(first=True) for block in range(count)]
        return spans, bases + [sizes.fine] * count

    return Kind(spec, records)


def hybrid_kind(sizes: Sizes) -> Kind:
    """Records are a page smaller or larger than most, some of them."""
    full, windows = HYBRID_PAGES
    groups = (
        Group("full", (full + 1) * PAGE_NBYTES, varies=True),
        Group("windows", (windows + 1) * PAGE_NBYTES, HYBRID_WINDOW, varies=True),
    )
    spec = Namespace(HYBRID_TOKENS, groups, (("bench", "hybrid"),))

    def records(count: int) -> tuple[tuple[Span, ...], list[int]]:
        begin = max(0, count - HYBRID_WINDOW // HYBRID_TOKENS)
        spans = (Span(Part(0, 0), 0, count), Span(Part(1, 0), begin, count))
        pages = [full] * count + [windows] * (count - begin)
        return spans, [(each + sizes.a_page_or_none()) * PAGE_NBYTES for each in pages]

    return Kind(spec, records)


KINDS: dict[str, Callable[[Sizes], Kind]] = {"l3": l3_kind, "ep": ep_kind, "hybrid": hybrid_kind}
FORMS = ("l3", "ep")  # of a model without windows


class Extents:
    """An arena's slots without an arena: its allocators, first extent first."""

    def __init__(self, nbytes: int) -> None:
        self.capacity = nbytes
        self._extents = [
            ExtentAllocator(min(EXTENT_NBYTES, nbytes - begin))
            for begin in range(0, nbytes, EXTENT_NBYTES)
        ]

    @property
    def used(self) -> int:
        return sum(extent.used for extent in self._extents)

    def allocate(self, nbytes: int) -> Slot | None:
        for number, extent in enumerate(self._extents):
            offset = extent.allocate(nbytes)
            if offset is not None:
                return Slot(number, offset, nbytes)
        return None

    def free(self, place: Slot) -> None:
        self._extents[place.extent].free(place.offset, place.nbytes)


class Endless:
    """Slots without end, that cost nothing: the memory of an allocator is not a block's."""

    def __init__(self) -> None:
        self._number = 0

    def allocate(self, nbytes: int) -> Slot:
        self._number += padded(nbytes)
        return Slot(self._number >> 30, self._number & ((1 << 30) - 1), nbytes)

    def free(self, place: Slot) -> None: ...


class Node:
    """A planner with one policy."""

    def __init__(
        self, dram: Space, policy: str, seed: int, last_prefixes: int = LAST_PREFIXES
    ) -> None:
        self._draw = random.Random(seed)
        self._now = 0.0
        self.planner = Planner(
            dram, None, now=lambda: self._now, dram_policy=policy_by_name(policy)
        )
        self._last: deque[tuple[BlockKey, ...]] = deque(maxlen=last_prefixes)

    def resize(self, nbytes: int) -> None:
        self.planner.eviction.fine_parts.resize(nbytes)

    def put(self, kind: Kind, count: int) -> tuple[BlockKey, ...]:
        """Put a new prefix, which somebody has just asked for in vain."""
        self._now += CLOCK_STEP_S
        planner = self.planner
        namespace_id = planner.index.register(kind.spec)
        keys = tuple(BlockKey(self._draw.randbytes(32)) for _ in range(count))
        planner.touch(keys)
        self._last.append(keys)
        spans, sizes = kind.records(count)
        placed = _at_once(planner.puts.place(namespace_id, keys, spans, sizes=sizes))
        write = Reservation(namespace_id, keys, 0, None, spans, placed.refused)
        sums = [self._draw.getrandbits(64) for _ in placed.held]
        with planner.pinned([slot for slot in placed.held if slot is not None]):
            _at_once(planner.puts.commit(write, placed.held, sums))
        return keys

    def ask(self) -> None:
        """Ask for one of the last prefixes again."""
        self.planner.touch(self._draw.choice(self._last))

    def length(self) -> int:
        return self._draw.randint(*PREFIX_BLOCKS)


def run(plan: CodedIndexPlan, policies: Sequence[str], say: Say) -> dict[str, Any]:
    """Measure. Raises InvalidRequest where there is no /proc to read memory from."""
    result: dict[str, Any] = {}
    small = plan.small()
    for name in KINDS:
        say(f"{name}: gaps of {plan.arena_nbytes >> 20} MiB and of {small.arena_nbytes >> 20} MiB")
        result[name] = {
            "arena_fill": {policy: arena_fill(name, policy, plan) for policy in policies},
            "arena_fill_small": {policy: arena_fill(name, policy, small) for policy in policies},
        }
    for name in FORMS:
        say(f"{name}: memory of {plan.blocks:,} blocks")
        result[name]["bytes_per_block"] = {
            policy: _in_own_process(bytes_per_block, name, policy, plan) for policy in policies
        }
    result["l3"]["arena_fill_two_sizes"] = {
        policy: arena_fill("l3", policy, plan, BETWEEN) for policy in policies
    }
    say(f"match of {MATCH_KEYS} keys, {plan.matches} rounds")
    return {**result, **match_ratios(plan)}


# Memory -------------------------------------------------------------------------------------------


def bytes_per_block(name: str, policy: str, plan: CodedIndexPlan) -> float:
    """Return what this process grows by for each block; it must have done nothing else."""
    kind = KINDS[name](Sizes(plan.seed))
    node = Node(Endless(), policy, plan.seed)
    node.put(kind, 64)  # what is loaded at the first use is no block's
    gc.collect()
    before, there = resident_nbytes(), len(node.planner.index)
    while len(node.planner.index) < plan.blocks + there:
        node.put(kind, 64)
    gc.collect()
    return (resident_nbytes() - before) / (len(node.planner.index) - there)


def _in_own_process(
    measure: Callable[[str, str, CodedIndexPlan], float],
    name: str,
    policy: str,
    plan: CodedIndexPlan,
) -> float:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, (name, policy, plan))


def resident_nbytes() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError as error:
        raise InvalidRequest("memory is read from /proc, which is not here") from error
    return pages * 4096


# Gaps ---------------------------------------------------------------------------------------------


def arena_fill(name: str, policy: str, plan: CodedIndexPlan, l3_mean: float = L3_MEAN) -> float:
    """Return the share of an arena that is slots, on average, while prefixes come and leave."""
    kind = KINDS[name](Sizes(plan.seed, l3_mean))
    space = Extents(plan.arena_nbytes)
    node = Node(space, policy, plan.seed, plan.last_prefixes)
    node.resize(plan.arena_nbytes)
    put, fills = 0, []
    while put < plan.turnovers * plan.arena_nbytes:
        count = node.length()
        node.put(kind, count)
        node.ask()
        put += sum(kind.records(count)[1])
        if put > plan.turnovers * plan.arena_nbytes // 2:
            fills.append(space.used / space.capacity)
    return fmean(fills)


# Match --------------------------------------------------------------------------------------------


def match_ratios(plan: CodedIndexPlan) -> dict[str, float]:
    """Time matches of blocks of which every second one has its fine part, beside blocks that are
    the same but have none to have."""
    node = Node(Endless(), "lru", plan.seed)
    kinds = {"fine": ep_kind(Sizes(plan.seed)), "plain": l3_kind(Sizes(plan.seed), "plain")}
    keys = {name: node.put(kind, MATCH_KEYS) for name, kind in kinds.items()}
    ids = {name: kind.spec.id for name, kind in kinds.items()}
    planner, fine = node.planner, Part(1, 0)
    for key in keys["fine"][::2]:
        block = planner.index.by_key(key)
        assert block is not None
        if (record := block.record(fine)) is not None:
            assert planner.eviction.drop_fine(block, record)
    seconds: dict[str, list[float]] = {"fine": [], "plain": [], "refined": []}
    for _ in range(plan.matches):
        for name, took in seconds.items():
            which = "plain" if name == "plain" else "fine"
            began = time.perf_counter()
            match = planner.match(ids[which], keys[which], refined=name == "refined")
            took.append(time.perf_counter() - began)
            if name != "refined" and match.resident_blocks != MATCH_KEYS:
                raise InvalidRequest("blocks that were just put are missing: this is a bug")
    p50 = {name: median(each) for name, each in seconds.items()}
    return {
        "match_fine_vs_plain": p50["fine"] / p50["plain"],
        "match_1000_plain_p50_us": 1e6 * p50["plain"],
        "match_1000_refined_p50_us": 1e6 * p50["refined"],
    }


def _at_once(steps: Steps[Any]) -> Any:
    while True:
        try:
            next(steps)
        except StopIteration as done:
            return done.value
