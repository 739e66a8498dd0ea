"""`kvstore bench index`: what a block costs in memory, and what a policy costs in time.

The planner that ships, over an arena that only counts, is filled with prefixes of 64 blocks. Memory
is what the process has grown by: index, policy and ghosts, with everything Python adds. Then
prefixes are matched, and new ones put, which evicts as many: each policy in turn, so that whatever
else the machine does slows all of them. Beside each there is a planner with a tenth of the blocks:
what grows with their number shows. A pause is a put or a match with what runs inside of it, such as
a collection of garbage: nothing else runs on the daemon's event loop meanwhile.
"""

from __future__ import annotations

import gc
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from kvstore.decide.planner import Planner, Reservation, Steps
from kvstore.decide.policy import policy_by_name
from kvstore.model.block import BlockKey, Group, Namespace, Part, Slot, Span
from kvstore.model.errors import InvalidRequest
from kvstore.system.garbage import bound_collections

PREFIX_BLOCKS = 64
RECORD_NBYTES = 64 << 10
SPANS = (Span(Part(0, 0), 0, PREFIX_BLOCKS),)
SPEC = Namespace(16, (Group("all", RECORD_NBYTES),), ())
LAST_PREFIXES = 1000
SHARE = 10  # of the blocks has the planner beside
CLOCK_STEP_S = 0.1  # between two prefixes, on the policies' clock

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class IndexPlan:
    """How many blocks are resident, how many prefixes are matched and put then, in what order."""

    blocks: int = 1_000_000
    policies: tuple[str, ...] = ("lru", "hz")
    samples: int = 2000
    seed: int = 0


class _Room:
    """An arena's slots without an arena."""

    def __init__(self, blocks: int) -> None:
        self._left = blocks
        self._number = 0

    def allocate(self, nbytes: int) -> Slot | None:
        if not self._left:
            return None
        self._left -= 1
        self._number += 1
        return Slot(self._number >> 14, (self._number & 0x3FFF) * RECORD_NBYTES, nbytes)

    def free(self, place: Slot) -> None:
        self._left += 1


class _Watch:
    """Times calls. took_s: of the last one. longest_s, longest_cpu_s: of all; the latter is
    processor time of this thread, without what the machine gave to others meanwhile."""

    def __init__(self) -> None:
        self.took_s = self.longest_s = self.longest_cpu_s = 0.0

    def __enter__(self) -> None:
        self._began_cpu_s, self._began_s = time.thread_time(), time.perf_counter()

    def __exit__(self, *raised: object) -> None:
        self.took_s = time.perf_counter() - self._began_s
        self.longest_s = max(self.longest_s, self.took_s)
        self.longest_cpu_s = max(self.longest_cpu_s, time.thread_time() - self._began_cpu_s)


class _Node:
    """A planner with one policy, full after `fill`."""

    def __init__(self, policy: str, plan: IndexPlan, share: int = 1) -> None:
        self._draw = random.Random(plan.seed)
        self._now = 0.0
        self._prefixes = max(2, plan.blocks // share // PREFIX_BLOCKS)
        self._planner = Planner(
            _Room(self._prefixes * PREFIX_BLOCKS),
            None,
            now=lambda: self._now,
            dram_policy=policy_by_name(policy),
        )
        self._namespace = self._planner.index.register(SPEC)
        self._last: deque[tuple[BlockKey, ...]] = deque(maxlen=LAST_PREFIXES)
        self.match_s: list[float] = []
        self.put_s: list[float] = []
        self.calls = _Watch()

    def fill(self) -> int:
        """Put as much as there is room for; returns how many blocks are there."""
        for _ in range(self._prefixes):
            new = self._new()
            with self.calls:
                self._put(new)
        return len(self._planner.index)

    def sample(self) -> None:
        """Match one of the last prefixes, and put a new one."""
        asked, new = self._draw.choice(self._last), self._new()
        self._planner.touch(asked)
        with self.calls:
            match = self._planner.match(self._namespace, asked)
        if match.resident_blocks == PREFIX_BLOCKS:  # else it has left: a policy may prefer others
            self.match_s.append(self.calls.took_s)
        with self.calls:
            self._put(new)
        self.put_s.append(self.calls.took_s)

    def _new(self) -> tuple[BlockKey, ...]:
        """Return a prefix that was asked for just now, in vain."""
        self._now += CLOCK_STEP_S
        keys = tuple(BlockKey(self._draw.randbytes(32)) for _ in range(PREFIX_BLOCKS))
        self._planner.touch(keys)
        self._last.append(keys)
        return keys

    def _put(self, keys: Sequence[BlockKey]) -> None:
        planner, namespace_id = self._planner, self._namespace
        placed = _at_once(planner.puts.place(namespace_id, keys, SPANS))
        write = Reservation(namespace_id, keys, 0, None, SPANS, placed.refused)
        checksums = [self._draw.getrandbits(64) for _ in keys]
        with planner.pinned([slot for slot in placed.held if slot is not None]):
            _at_once(planner.puts.commit(write, placed.held, checksums))


def run(plan: IndexPlan, say: Say) -> dict[str, Any]:
    """Measure. Raises InvalidRequest where there is no /proc to read memory from."""
    with _collected_as_in_a_daemon():
        return _measured(plan, say)


@contextmanager
def _collected_as_in_a_daemon() -> Iterator[None]:
    """Bound garbage collections as the daemon does; as they were, afterwards."""
    before, callbacks = gc.get_threshold(), list(gc.callbacks)
    bound_collections()
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.callbacks[:] = callbacks
        gc.unfreeze()


def _measured(plan: IndexPlan, say: Say) -> dict[str, Any]:
    nodes: dict[str, _Node] = {}
    tenths: dict[str, _Node] = {}
    bytes_per_block = {}
    for policy in plan.policies:
        say(f"{policy}: {plan.blocks:,} blocks")
        node, tenth = _Node(policy, plan), _Node(policy, plan, share=SHARE)
        gc.collect()
        before = _resident_nbytes()
        blocks = node.fill()
        gc.collect()
        bytes_per_block[policy] = (_resident_nbytes() - before) / blocks
        tenth.fill()
        nodes[policy], tenths[policy] = node, tenth
    say(f"{plan.samples:,} prefixes of {PREFIX_BLOCKS} blocks, matched and put")
    gc.freeze()
    for _ in range(plan.samples):
        for node in (*nodes.values(), *tenths.values()):
            node.sample()
    matches = {name: median(node.match_s) for name, node in nodes.items()}
    growth = {name: matches[name] / median(tenth.match_s) for name, tenth in tenths.items()}
    p99 = {name: 1e3 * quantiles(node.match_s, n=100)[98] for name, node in nodes.items()}
    pauses = {name: 1e3 * node.calls.longest_s for name, node in nodes.items()}
    cpu_pauses = {name: 1e3 * node.calls.longest_cpu_s for name, node in nodes.items()}
    return {
        **{f"bytes_per_block_{name}": each for name, each in bytes_per_block.items()},
        **named(plan.blocks, max(growth.values()), max(p99.values())),
        "longest_pause_ms": max(pauses.values()),
        "longest_pause_cpu_ms": max(cpu_pauses.values()),
        "bytes_per_block": bytes_per_block,
        "match_p50_us": {name: 1e6 * each for name, each in matches.items()},
        "match_p99_ms": p99,
        "match_p50_vs_tenth": growth,
        "put_p50_us": {name: 1e6 * median(node.put_s) for name, node in nodes.items()},
        "pause_ms": pauses,
        "pause_cpu_ms": cpu_pauses,
        "plan": asdict(plan),
    }


def named(blocks: int, growth: float, p99_ms: float) -> dict[str, float]:
    """Name a match's time over that with a tenth of the blocks, and its p99, by their number: of
    10,000,000 blocks they are match_p50_10m_vs_1m and match_p99_10m_ms."""
    here, tenth = _short(blocks), _short(blocks // SHARE)
    return {f"match_p50_{here}_vs_{tenth}": growth, f"match_p99_{here}_ms": p99_ms}


def _short(blocks: int) -> str:
    for unit, name in ((1_000_000, "m"), (1000, "k")):
        if blocks and blocks % unit == 0:
            return f"{blocks // unit}{name}"
    return str(blocks)


def _resident_nbytes() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError as error:
        raise InvalidRequest("memory is read from /proc, which is not here") from error
    return pages * 4096


def _at_once(steps: Steps[Any]) -> Any:
    while True:
        try:
            next(steps)
        except StopIteration as done:
            return done.value
