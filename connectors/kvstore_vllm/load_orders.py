"""Loads: leased slots paired with the device blocks that the engine has given out for them."""

from __future__ import annotations

from kvstore.model.block import Namespace
from kvstore_vllm.metadata import LoadOrder, LoadSpan
from kvstore_vllm.tracked import NULL_BLOCK, Tables, Tracked


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
    keys = tracked.keys()
    spans: list[LoadSpan] = []
    covered: set[tuple[int, int, int]] = set()
    at = 0
    for (group, shard), begin, end in grant.spans:
        table = tables[group]
        taken = [
            (block, grant.slots[at + block - begin], grant.checksums[at + block - begin])
            for block in range(max(begin, first), min(end, last, len(table)))
            if table[block] != NULL_BLOCK
        ]
        at += end - begin
        pairs = [(block, slot, checksum) for block, slot, checksum in taken if slot is not None]
        covered.update((group, shard, block) for block, _, _ in pairs)
        spans.append(
            LoadSpan(
                group=group,
                shard=shard,
                keys=tuple(keys[block] for block, _, _ in pairs),
                slots=tuple(slot for _, slot, _ in pairs),
                checksums=tuple(checksum for _, _, checksum in pairs),
                device_blocks=tuple(table[block] for block, _, _ in pairs),
            )
        )
    wanted = {
        (index, shard, block)
        for index, group in enumerate(namespace.groups)
        for shard in range(group.shards)
        for block in range(first, last)
        if tables[index][block] != NULL_BLOCK
    }
    tracked.note_stored(lookup.skip_blocks, grant.hit_blocks)
    return LoadOrder(
        request_id=tracked.request.request_id,
        namespace_id=namespace.id,
        lease_id=grant.lease_id,
        instance=lookup.instance,
        deadline=lookup.deadline,
        spans=tuple(spans),
        first_block=tables[0][first],
        complete=wanted <= covered,
    )
