"""Moves records that have sizes of their own: a put is reserved and committed, a get is leased."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvstore import Client, Grant, Span, checksum
from kvstore.model.block import BlockKey, Committed, Namespace, Part
from tests.torture.spaces import LOSSY, PARTS, Item, record_bytes, size_of


class Put(NamedTuple):
    """Records of consecutive blocks of a prefix, all parts of them, and the slots they are in."""

    grant: Grant
    items: list[Item]
    sums: list[int]


def reserve(
    client: Client,
    namespace: Namespace,
    chain: Sequence[BlockKey],
    blocks: range,
    number: int,
    *,
    fine: bool = True,
    refined: bool = False,
) -> Put:
    """Reserve slots for some blocks of a chain and write into them what put `number` makes."""
    keys = chain[blocks.start : blocks.stop]
    parts = [p for p in PARTS[namespace.id] if fine or p.group not in namespace.fine]
    items = [Item(namespace.id, key, part) for part in parts for key in keys]
    sizes = [
        size_of(Item(namespace.id, key, part), block, number)
        for part in parts
        for block, key in zip(blocks, keys, strict=False)
    ]
    grant = client.reserve(
        namespace.id,
        keys,
        first_block=blocks.start,
        parent=chain[blocks.start - 1] if blocks.start else None,
        spans=[Span(part, 0, len(keys)) for part in parts],
        sizes=sizes,
        refined=refined,
    )
    sums = []
    for item, nbytes, slot in zip(items, sizes, grant.slots, strict=True):
        data = record_bytes(item, number, nbytes) if slot is not None else b""
        if slot is not None:
            client.view(slot)[:] = data
        sums.append(checksum(data) if slot is not None else 0)
    return Put(grant, items, sums)


def commit(client: Client, put: Put, *, durable: bool) -> Committed:
    return client.commit(put.grant.lease_id, put.sums, durable=durable)


def get(
    client: Client, namespace: Namespace, keys: Sequence[BlockKey], part: Part, wait_s: float = 0.0
) -> list[bytes | None]:
    """Return records by name, None where one is missing."""
    if not namespace.varies:
        return list(
            client.get(namespace.id, keys, group=part.group, shard=part.shard, wait_s=wait_s)
        )
    spans = [Span(part, 0, len(keys))]
    grant = client.acquire(namespace.id, keys, spans=spans, wait_s=wait_s)
    found = [bytes(client.view(slot)) if slot is not None else None for slot in grant.slots]
    held = client.release(grant.lease_id) == [True]
    return found if held else [None] * len(keys)


def coarse_and_mixed(copies: Sequence[tuple[Item, int, bytes]], *, refined: bool) -> list[str]:
    """Return what is wrong with the parts of a lossy prefix that were served together, each with
    its block and bytes, beside their bytes."""
    if not copies or copies[0][0].namespace_id != LOSSY.id:
        return []
    found = []
    bases = {
        (item.key, item.part): data for item, _, data in copies if item.part.group not in LOSSY.fine
    }
    fines = {
        (item.key, Part(LOSSY.groups[item.part.group].refines, item.part.shard)): data
        for item, _, data in copies
        if item.part.group in LOSSY.fine
    }
    first = {item.key for item, block, _ in copies if block == 0}
    for (key, part), base in bases.items():
        lossy = len(base) == next(g.base_nbytes for g in LOSSY.groups if g.refines == part.group)
        fine = fines.get((key, part))
        if lossy and key in first:
            found.append("wrong: the first block is not exact")
        if lossy and refined and fine is None:
            found.append("wrong: a block without its fine part for who insists on it")
        if fine is not None and int.from_bytes(fine[24:32], "little") != checksum(base):
            found.append("wrong: a fine part beside the base of another put")
    return found
