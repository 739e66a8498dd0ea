"""What the scheduler side tells the workers with every step, and what workers tell it at start.

Only plain values: vLLM pickles these between its own processes. That they are vLLM's kinds of
metadata is declared in `connector`, so that deciding and moving can be tested without vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, zip_longest
from typing import NamedTuple

from kvstore.model.block import BlockKey, Group, Namespace, NamespaceId, Slot
from kvstore.model.tokens import BlockTokens
from kvstore_vllm.prefill import Computed, Step

PIPELINE = "pipeline"
"""The field of a namespace's identity that says how layers are dealt out to stages."""


@dataclass(frozen=True, slots=True)
class SaveSpan:
    """Consecutive blocks of one group: blocks [begin, begin + len(device_blocks)) of `keys`."""

    group: int
    begin: int
    device_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Blocks of one prefix whose KV is complete. Every worker saves its own shard of them.

    spans: one per engine group at most. session_id: the conversation they belong to, "" unknown.
    refined: blocks that are stored without their fine parts are replaced. tokens: of the blocks, if
    the daemon wants them. reused: the engine had some of them before the request came, so they may
    be stored.
    """

    keys: tuple[BlockKey, ...]
    first_block: int
    parent: BlockKey | None
    spans: tuple[SaveSpan, ...]
    session_id: str = ""
    refined: bool = False
    tokens: BlockTokens | None = None
    reused: bool = False


def pieces(order: SaveOrder, record_nbytes: Sequence[int], nbytes_max: int) -> list[SaveOrder]:
    """Cut an order into consecutive ones of at most `nbytes_max` each, but one block at least.

    record_nbytes: the most of a record of each group.
    """
    each = sum(record_nbytes[span.group] for span in order.spans)
    step = max(1, nbytes_max // max(1, each))
    if len(order.keys) <= step:
        return [order]
    cut = []
    for begin in range(0, len(order.keys), step):
        end = min(begin + step, len(order.keys))
        spans = []
        for span in order.spans:
            low = max(begin, span.begin)
            high = min(end, span.begin + len(span.device_blocks))
            if low < high:
                blocks = span.device_blocks[low - span.begin : high - span.begin]
                spans.append(SaveSpan(span.group, low - begin, blocks))
        if spans:
            part = replace(
                order,
                keys=order.keys[begin:end],
                first_block=order.first_block + begin,
                parent=order.keys[begin - 1] if begin else order.parent,
                spans=tuple(spans),
                tokens=order.tokens.part(begin, end, len(order.keys)) if order.tokens else None,
            )
            cut.append(part)
    return cut


def lacking(order: SaveOrder, present: Sequence[bool]) -> list[SaveOrder]:
    """Return orders for those records of an order that are not present.

    present: of each record, over the spans in order.
    """
    runs: list[list[SaveSpan]] = []
    at = 0
    for span in order.spans:
        count = len(span.device_blocks)
        runs.append(list(_absent(span, present[at : at + count])))
        at += count
    # Nearly always one run per group; an order names each group once at most.
    return [
        replace(order, spans=tuple(span for span in nth if span is not None))
        for nth in zip_longest(*runs)
    ]


def _absent(span: SaveSpan, present: Sequence[bool]) -> Iterator[SaveSpan]:
    """Yield the runs of consecutive blocks of a span that are not present."""
    for is_present, run in groupby(range(len(present)), key=lambda at: present[at]):
        if not is_present:
            found = list(run)
            blocks = span.device_blocks[found[0] : found[-1] + 1]
            yield replace(span, begin=span.begin + found[0], device_blocks=blocks)


class LossySizes(NamedTuple):
    """Sizes of a lossy group's records in bytes: what a base part that has a fine part has, and its
    fine part."""

    base_nbytes: int
    fine_nbytes: int


class FinePart(NamedTuple):
    """Where the fine part of a leased record is, and its checksum."""

    slot: Slot
    checksum: int


@dataclass(frozen=True, slots=True)
class LoadSpan:
    """Leased slots of one part, with the device block each is to be copied to.

    fines: the fine part of each, None where there is none; nothing in an exact namespace. blocks:
    the index of each in the prefix.
    """

    group: int
    shard: int
    keys: tuple[BlockKey, ...]
    slots: tuple[Slot, ...]
    checksums: tuple[int, ...]
    device_blocks: tuple[int, ...]
    fines: tuple[FinePart | None, ...] = ()
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """One request's leased blocks. Every worker loads its own shard, then releases once.

    instance: the life of the daemon that granted the lease; slots mean nothing in another.
    first_block: the device block at which a request whose load failed has to start again.
    complete: False if the lease does not cover every device block; such a load must fail.
    deadline: time.monotonic() until when the lease is surely held; no copy begins past it.
    refined: the load fails if a fine part is wrong; else the base part alone is used.
    lossy_blocks: the device blocks that will hold what the engine did not compute just so.
    ready_blocks: the slots of the first so many blocks of the prefix are filled, the others are
    still read into; None: all are filled. give_up_at: time.monotonic() until when to wait for that.
    """

    request_id: str
    namespace_id: NamespaceId
    lease_id: int
    instance: str
    deadline: float
    spans: tuple[LoadSpan, ...]
    first_block: int
    complete: bool
    refined: bool = False
    lossy_blocks: tuple[int, ...] = ()
    ready_blocks: int | None = None
    give_up_at: float = 0.0


@dataclass(slots=True)
class StepMetadata:
    """One engine step.

    handed_out: device blocks that this step, or a load it starts, may overwrite.
    epoch: changes when weights may have been changed in place; the namespace follows it.
    step: what it computes.
    """

    saves: list[SaveOrder] = field(default_factory=list)
    loads: list[LoadOrder] = field(default_factory=list)
    handed_out: list[int] = field(default_factory=list)
    epoch: str = ""
    step: Step = field(default_factory=Step)


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What a worker tells: the namespace as it sees it, once its weights are known, and how long
    its last large steps took. namespace: None if it was told before; all workers must agree."""

    namespace: str | None = None
    computed: Computed = field(default_factory=Computed)

    def aggregate(self, other: WorkerFacts) -> WorkerFacts:
        """Return what both say; an empty namespace if they do not agree."""
        told = {self.namespace, other.namespace} - {None}
        return WorkerFacts(
            namespace=None if not told else told.pop() if len(told) == 1 else "",
            computed=self.computed.and_(other.computed),
        )


def in_epoch(namespace: Namespace, epoch: str) -> Namespace:
    """Return `namespace` under weights that were changed in place; shares nothing with it.

    epoch: "" as long as none were.
    """
    if not epoch:
        return namespace
    identity = {**dict(namespace.identity), "epoch": epoch}
    return replace(namespace, identity=tuple(sorted(identity.items())))


def stage_group(table: int, stage: int) -> str:
    """Return the name of the part of an engine's group that one stage of a pipeline stores."""
    return f"{table}@{stage}"


def tables_of(namespace: Namespace) -> tuple[int, ...]:
    """Return which of the engine's block tables tells the device blocks of each group.

    Fine parts, which come behind all others, have none of their own.
    """
    groups = [group for group in namespace.groups if group.refines == -1]
    if PIPELINE not in dict(namespace.identity):
        return tuple(range(len(groups)))
    return tuple(int(group.name.partition("@")[0]) for group in groups)


def engine_groups(namespace: Namespace) -> tuple[Group, ...]:
    """Return a group for each block table of the engine, by its index: of those that several stages
    of a pipeline store, the first."""
    first: dict[int, Group] = {}
    for table, group in zip(tables_of(namespace), namespace.groups, strict=False):
        first.setdefault(table, group)
    return tuple(first[table] for table in sorted(first))
