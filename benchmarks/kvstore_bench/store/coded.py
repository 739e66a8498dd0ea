"""What coded records cost in DRAM: to move and decode one, beside moving a raw one.

Pages of an engine and slots of an arena, both larger than the processor's caches; checksums on
every side, as connectors take them. And how long the interpreter's lock is held meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from kvstore.model.block import padded
from kvstore.model.checksum import checksum, copies_in
from kvstore.model.errors import InvalidRequest, Unavailable
from kvstore_bench.codec.kv import Blocks
from kvstore_bench.codec.supply import blocks_of
from kvstore_bench.lock_samples import own_watch
from kvstore_kernels import native
from kvstore_kernels.codec.copies import CodedCopies, Scratch
from kvstore_kernels.host import HostPages

Say = Callable[[str], None]
Side = Callable[[], None]

BATCH_NBYTES = 64 << 20  # coded at once, as the connectors do


@dataclass(frozen=True, slots=True)
class CodedPlan:
    """What to move: nbytes of KV as the engine has it."""

    nbytes: int = 256 << 20
    rounds: int = 11
    watch_s: float = 2.0  # of the interpreter's lock, beside each side


class Copies:
    """Every block's raw and coded record in slots, and the pages they came from."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._pages = HostPages([torch.from_numpy(page.view(np.int16)) for page in blocks.pages])
        self._coded = CodedCopies(blocks.coder(), checksum, Scratch())
        self._ids = range(blocks.count)
        step = max(1, BATCH_NBYTES // blocks.record_nbytes)
        self._batches = [self._ids[at : at + step] for at in range(0, blocks.count, step)]
        self._raw = _slots([blocks.record_nbytes] * blocks.count)
        sizes = [len(each.base) for ids in self._batches for each in self._coded.encode(ids)]
        self._l3 = _slots(sizes)
        self.nbytes = blocks.nbytes
        self.ratio = blocks.nbytes / sum(sizes)
        self.put_raw()
        self.put_l3()
        self._raw_sums = [checksum(record) for record in self._raw]
        self._l3_sums = [checksum(record) for record in self._l3]

    def put_raw(self) -> None:
        for ids in self._batches:
            self._pages.read_all(ids, self._of(self._raw, ids), checksum)

    def put_l3(self) -> None:
        for ids in self._batches:
            records = [each.base for each in self._coded.encode(ids)]
            copies_in(records, self._of(self._l3, ids))

    def get_raw(self) -> None:
        for ids in self._batches:
            found = self._pages.write_all(ids, self._of(self._raw, ids), checksum)
            self._check(found, self._raw_sums, ids)

    def get_l3(self) -> None:
        for ids in self._batches:
            found = self._coded.decode(ids, self._of(self._l3, ids))
            self._check(found, self._l3_sums, ids)

    def _of(self, slots: Sequence[memoryview], ids: range) -> Sequence[memoryview]:
        return slots[ids.start : ids.stop]

    def _check(self, found: Sequence[int | None], expected: Sequence[int], ids: range) -> None:
        if list(found) != list(expected[ids.start : ids.stop]):
            raise Unavailable("a record that was just stored is not what it was: this is a bug")


def run(plan: CodedPlan, model: Path | None, say: Say) -> dict[str, Any]:
    """Measure. Raises InvalidRequest without the native library."""
    if native.library() is None:
        raise InvalidRequest(f"there is no native library to measure: {native.reason()}")
    copies = Copies(blocks_of(plan.nbytes, model, say))
    sides: dict[str, Side] = {
        "get_raw": copies.get_raw,
        "get_l3": copies.get_l3,
        "put_raw": copies.put_raw,
        "put_l3": copies.put_l3,
    }
    say(f"coded records: {plan.nbytes >> 20} MiB of KV, {plan.rounds} rounds")
    seconds = _alternate(sides, plan.rounds)
    say("the interpreter's lock meanwhile")
    return {
        "get_vs_raw": seconds["get_l3"] / seconds["get_raw"],
        "put_vs_raw": seconds["put_l3"] / seconds["put_raw"],
        "lock_held_share": _held_shares(sides, plan),
        "coded": {
            "isa": native.use_isa().name,
            "ratio": copies.ratio,
            "gb_s": {name: copies.nbytes / each / 1e9 for name, each in seconds.items()},
        },
    }


def _slots(sizes: Sequence[int]) -> list[memoryview]:
    """Return memory for records, each from a page of memory on, all of it touched."""
    places = [padded(size) for size in sizes]
    memory = np.ones(sum(places), np.uint8)
    ends = np.cumsum(places).tolist()
    begins = [end - place for end, place in zip(ends, places, strict=True)]
    return [memory[begin : begin + size].data for begin, size in zip(begins, sizes, strict=True)]


def _alternate(sides: Mapping[str, Side], rounds: int) -> dict[str, float]:
    """Return the median seconds of each side, taken in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            began = time.perf_counter()
            side()
            seconds[name].append(time.perf_counter() - began)
    return {name: median(each) for name, each in seconds.items()}


def _held_shares(sides: Mapping[str, Side], plan: CodedPlan) -> dict[str, float]:
    """Return the share of each side's time in which the interpreter's lock is held."""
    with own_watch() as watch:
        for _ in range(plan.rounds):
            for name, side in sides.items():
                end = time.perf_counter() + plan.watch_s / plan.rounds
                while time.perf_counter() < end:
                    with watch.during(name):
                        side()
        return watch.held_shares()
