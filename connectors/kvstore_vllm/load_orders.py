"""Loads: leased slots paired with the device blocks that the engine has given out for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from kvstore.model.block import Grant, Namespace, Part, Slot
from kvstore_vllm.metadata import FinePart, LoadOrder, LoadSpan, tables_of
from kvstore_vllm.tracked import NULL_BLOCK, Tables, Tracked

_Fines = Mapping[tuple[Part, int], FinePart]
"""The fine parts of a lease, by the part that each refines and the block."""


class _Leased(NamedTuple):
    """One block of one part in a lease."""

    block: int
    slot: Slot | None
    checksum: int


def load_order(
    tracked: Tracked, tables: Tables, num_tokens: int, namespace: Namespace
) -> LoadOrder:
    """Pair the leased slots with the device blocks of [local, local + num_tokens)."""
    lookup = tracked.lookup
    grant = lookup.grant() if lookup is not None else None
    assert lookup is not None
    assert grant is not None
    first = tracked.local_blocks
    last = first + num_tokens // namespace.block_tokens
    leased = dict(_by_part(grant))
    fines = _fines(namespace, leased)
    keys, table_of = tracked.keys(), tables_of(namespace)
    spans: list[LoadSpan] = []
    covered: set[tuple[int, int, int]] = set()
    for part, records in leased.items():
        if part.group in namespace.fine:
            continue
        table = tables[table_of[part.group]]
        taken = [
            (block, slot, checksum)
            for block, slot, checksum in records
            if first <= block < min(last, len(table)) and table[block] != NULL_BLOCK and slot
        ]
        covered.update((*part, block) for block, _, _ in taken)
        found = tuple(fines.get((part, block)) for block, _, _ in taken)
        spans.append(
            LoadSpan(
                group=part.group,
                shard=part.shard,
                keys=tuple(keys[block] for block, _, _ in taken),
                slots=tuple(slot for _, slot, _ in taken),
                checksums=tuple(checksum for _, _, checksum in taken),
                device_blocks=tuple(table[block] for block, _, _ in taken),
                fines=found if namespace.fine else (),
                blocks=tuple(block for block, _, _ in taken),
            )
        )
    wanted = _wanted(namespace, tables, range(first, last))
    lossy = list(_lossy(namespace, spans))
    is_refined = all(fine is not None for _, fine in lossy)
    tracked.note_stored(lookup.skip_blocks, grant.hit_blocks)
    return LoadOrder(
        request_id=tracked.request.request_id,
        namespace_id=namespace.id,
        lease_id=grant.lease_id,
        instance=lookup.instance,
        deadline=lookup.deadline,
        spans=tuple(spans),
        first_block=tables[0][first],
        complete=wanted <= covered and (is_refined or not lookup.refined),
        refined=lookup.refined,
        lossy_blocks=tuple({block for block, _ in lossy}),
        ready_blocks=grant.ready_blocks,
        give_up_at=lookup.give_up_at,
    )


def _wanted(namespace: Namespace, tables: Tables, blocks: range) -> set[tuple[int, int, int]]:
    """Return group, shard and index of the blocks that the engine has device blocks for."""
    return {
        (index, shard, block)
        for index, table in enumerate(tables_of(namespace))
        for shard in range(namespace.groups[index].shards)
        for block in blocks
        if tables[table][block] != NULL_BLOCK
    }


def _by_part(grant: Grant) -> Iterator[tuple[Part, list[_Leased]]]:
    """Yield what a lease has of each part; it names a part once."""
    at = 0
    for part, begin, end in grant.spans:
        yield (
            part,
            [
                _Leased(block, grant.slots[at + i], grant.checksums[at + i])
                for i, block in enumerate(range(begin, end))
            ],
        )
        at += end - begin


def _fines(namespace: Namespace, leased: Mapping[Part, list[_Leased]]) -> _Fines:
    return {
        (Part(namespace.groups[index].refines, shard), block): FinePart(slot, checksum)
        for index in namespace.fine
        for shard in range(namespace.groups[index].shards)
        for block, slot, checksum in leased.get(Part(index, shard), ())
        if slot is not None
    }


def _lossy(namespace: Namespace, spans: list[LoadSpan]) -> Iterator[tuple[int, FinePart | None]]:
    """Yield the device block and the fine part of each record that is not exact."""
    sizes = {namespace.groups[i].refines: namespace.groups[i].base_nbytes for i in namespace.fine}
    for span in spans:
        for slot, device_block, fine in zip(
            span.slots, span.device_blocks, span.fines, strict=False
        ):
            if slot.nbytes == sizes.get(span.group):
                yield device_block, fine
