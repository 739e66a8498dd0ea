"""Many nodes without bytes, and what they lend each other.

A host that lacks the end of a prefix does what `kvstore.move.tenant_peers` and `kvstore.move.fetch`
do: it asks up to three others that seem to have more, all of them if they are that few, and takes
copies of what they have, in the order of a host that knows of no zones and no pace. Copies are
written to files at their second use. Lending changes nothing at the lender.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvstore.decide.heads import Heads, head_step
from kvstore.model.block import BlockKey, Span
from kvstore.peer.base import KEYS_MAX
from kvstore.peer.choice import ASKED_MAX, Offer, best_first, choose
from kvstore.replay.node import PART, Node, Setup, Traffic
from kvstore.replay.told import Told

HOSTS_MAX = 1000


@dataclass(slots=True)
class Lent:
    """What went between hosts, in blocks, and what was asked for.

    hits: of blocks that made a hit longer. from_files: of `blocks`, read in files of the lender.
    asked, vain: requests for which others were asked, and those of them that got nothing by it.
    """

    hits: int = 0
    blocks: int = 0
    from_files: int = 0
    asked: int = 0
    vain: int = 0


def all_of(setup: Setup, hosts: int) -> Setup:
    """Return what so many hosts have together, each with a setup."""
    return replace(
        setup,
        dram_blocks=setup.dram_blocks * hosts,
        file_blocks=setup.file_blocks * hosts,
        write_bytes_per_day=setup.write_bytes_per_day * hosts,
    )


class Hosts:
    """So many nodes with one setup each. Raises InvalidRequest for a setup that holds no block."""

    def __init__(
        self,
        count: int,
        setup: Setup,
        block_tokens: int,
        *,
        age_s: float,
        view_nbytes_max: int,
        seed: int,
    ) -> None:
        self.nodes = [Node(setup, block_tokens) for _ in range(count)]
        self.requests = [0] * count  # that each has answered
        self.lent = Lent()
        heads = [Heads() for _ in self.nodes]
        for node, own in zip(self.nodes, heads, strict=True):
            node.planner.index.heads = own
        self.told = Told(heads, age_s, view_nbytes_max)
        self._block_tokens = block_tokens
        self._draw = random.Random(seed)

    def tick(self, at_s: float) -> None:
        """Let it be this time of the trace."""
        if len(self.nodes) > 1:
            self.told.tell(at_s)

    def holding(self, keys: Sequence[BlockKey]) -> list[tuple[int, int]]:
        """Return the hosts that seem to have most of a prefix."""
        return self.told.holders(keys, self._block_tokens)

    def ask(self, host: int, keys: Sequence[BlockKey], at_s: float) -> int:
        """Let a host answer a request: returns how many blocks it hit."""
        node = self.nodes[host]
        node.clock.now_s = at_s
        self.requests[host] += 1
        if len(self.nodes) == 1:
            return node.ask(keys)
        hit = node.ask(keys, lambda keys, hit: self._borrow(host, keys, hit))
        self.told.note(host, at_s)
        return hit

    def count_anew(self) -> None:
        """Forget what was counted so far: that was the warm-up."""
        self.lent = Lent()
        self.requests = [0] * len(self.nodes)
        for node in self.nodes:
            node.count_anew()

    def settle(self) -> None:
        """Count what is only known of all requests together."""
        for node in self.nodes:
            node.settle()

    @property
    def traffic(self) -> Traffic:
        """Return what the tiers of all hosts did."""
        fields = Traffic.__dataclass_fields__
        return Traffic(**{f: sum(getattr(n.traffic, f) for n in self.nodes) for f in fields})

    def _borrow(self, host: int, keys: Sequence[BlockKey], hit: int) -> int:
        """Bring what others have of a prefix beyond `hit`; returns how long the hit is then."""
        others = self._to_ask(host, keys, hit)
        if not others:
            return hit
        lent, before = self.lent, hit
        lent.asked += 1
        found = {other: self._match(other, keys, hit) for other in others}
        offers = [(other, Offer(blocks)) for other, blocks in found.items()]
        step = head_step(self._block_tokens)
        for other in best_first(offers, step=step, shuffle=self._draw.shuffle):
            if found[other] > hit:
                hit = self._take(host, other, keys[: found[other]], hit)
        lent.hits += hit - before
        lent.vain += hit == before
        return hit

    def _to_ask(self, host: int, keys: Sequence[BlockKey], hit: int) -> list[int]:
        if len(self.nodes) - 1 <= ASKED_MAX:
            return [other for other in range(len(self.nodes)) if other != host]
        found = self.told.holders(keys, self._block_tokens, hit=hit, besides=host)
        return choose(found, shuffle=self._draw.shuffle)

    def _match(self, other: int, keys: Sequence[BlockKey], hit: int) -> int:
        lender = self.nodes[other]
        return lender.planner.match(lender.namespace, keys[:KEYS_MAX], hit).hit_blocks

    def _take(self, host: int, other: int, keys: Sequence[BlockKey], hit: int) -> int:
        """Copy what a host lacks of a prefix that another one has."""
        node, lender = self.nodes[host], self.nodes[other]
        spans = (Span(PART, hit, len(keys)),)
        here = node.planner.find(node.namespace, keys, spans)
        there = lender.planner.find(lender.namespace, keys, spans)
        reached = node.take(keys, hit)
        came = node.planner.find(node.namespace, keys, spans)
        for before, after, source in zip(here, came, there, strict=True):
            if before is None and after is not None and source is not None:
                self.lent.blocks += 1
                self.lent.from_files += source.resident is None
        return max(hit, reached)
