"""`kvstore bench tier --record l3`: coded records in the file tier.

Prefixes of KV, a model's or made up, are encoded and written, and come back cold: promoted, then
copied from their slots, verified and decoded into an engine's pages, one window while the next
ones are read. Bytes are those that the engine has: what fio would have to move without the codec.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kvstore import Client, Grant, Group, Part, Span
from kvstore.model.block import PAGE_NBYTES
from kvstore.model.checksum import checksum, copies_in
from kvstore.model.errors import InvalidRequest, Unavailable
from kvstore_bench.codec.kv import Blocks
from kvstore_bench.codec.supply import blocks_of
from kvstore_bench.tiers.tier import WAIT_S, WINDOW_BLOCKS, Prefixes, Say, TierPlan
from kvstore_bench.tiers.tier import run as run_raw
from kvstore_kernels import native
from kvstore_kernels.codec.copies import CodedCopies, Scratch

DISTINCT_BLOCKS = 64


def run(plan: TierPlan, model: Path | None, directory: Path, say: Say) -> dict[str, Any]:
    """Measure the file tier with L3 records. Raises InvalidRequest without the native library."""
    if native.library() is None:
        raise InvalidRequest(f"there is no native library to code with: {native.reason()}")
    wanted = DISTINCT_BLOCKS * plan.record_nbytes
    blocks = blocks_of(wanted, model, say, block_nbytes=plan.record_nbytes)
    if blocks.record_nbytes % PAGE_NBYTES:
        raise InvalidRequest(f"blocks of {blocks.record_nbytes:,} bytes are no whole pages")
    plan = replace(plan, record_nbytes=blocks.record_nbytes)
    say(f"L3 records of blocks of {blocks.record_nbytes >> 10} KiB")
    result = run_raw(plan, directory, say, lambda client, each: L3Prefixes(client, each, blocks))
    return {"raw_gb_s_vs_fio": result["read_vs_fio"], **result, "plan": asdict(plan)}


class L3Prefixes(Prefixes):
    """Prefixes whose blocks are those of `blocks`, again and again."""

    def __init__(self, client: Client, plan: TierPlan, blocks: Blocks) -> None:
        self._copies = CodedCopies(blocks.coder(), checksum, Scratch())
        self._count = blocks.count
        super().__init__(client, plan, Group("all", self._copies.record_nbytes, varies=True))

    def put(self, number: int) -> int:
        """Encode and store a prefix, window by window."""
        keys, committed = self.keys(number), 0
        for first in range(0, len(keys), WINDOW_BLOCKS):
            window = keys[first : first + WINDOW_BLOCKS]
            records = [each.base for each in self._copies.encode(self._ids(first, len(window)))]
            grant = self.client.reserve(
                self.namespace_id,
                window,
                first_block=first,
                parent=keys[first - 1] if first else None,
                spans=[Span(Part(0, 0), 0, len(window))],
                sizes=[len(record) for record in records],
                wait_s=WAIT_S,
            )
            slots = [slot for slot in grant.slots if slot is not None]
            if len(slots) != len(window):
                raise Unavailable(f"room for {len(slots)} of {len(window)} blocks")
            sums = copies_in(records, [self.client.view(slot) for slot in slots])
            committed += self.client.commit(grant.lease_id, sums).committed
        return committed

    def take(self, grant: Grant, first: int) -> None:
        """Decode a window into pages. Raises Unavailable if it is not what was put."""
        slots = [slot for slot in grant.slots if slot is not None]
        records = [self.client.view(slot) for slot in slots]
        found = self._copies.decode(self._ids(first, len(records)), records)
        if found != list(grant.checksums):
            raise Unavailable("what came up is not what was put")

    def _ids(self, first: int, count: int) -> list[int]:
        return [index % self._count for index in range(first, first + count)]
