"""Loads: leased slots -> pages of a new cache, verified; they count only if the lease was held."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from kvstore import BlockKey, Client, CorruptBlock, Grant, KVStoreError, Namespace, Unavailable
from kvstore import checksum as checksum_of
from kvstore_transformers.cache import Pages, empty_pages
from kvstore_transformers.copying import Copier
from kvstore_transformers.namespace import LayerGroup, Layout

logger = logging.getLogger(__name__)


def load_blocks(
    client: Client,
    copier: Copier,
    layout: Layout,
    namespace: Namespace,
    *,
    keys: Sequence[BlockKey],
    grant: Grant,
    deadline: float,
) -> list[tuple[LayerGroup, Pages]]:
    """Return the pages of every group: the blocks a resume after grant.hit_blocks needs.

    deadline: time.monotonic() until when the lease is surely held. The lease is given back.
    Raises CorruptBlock (and has the daemon drop it), Unavailable if the lease ended too early.
    """
    corrupt: list[BlockKey] = []
    loaded: list[tuple[LayerGroup, Pages]] = []
    try:
        after, seen = 0, set[int]()
        for span in grant.spans:
            index = span.part.group
            group, size = layout.groups[index], namespace.groups[index].record_nbytes
            count = span.end - span.begin
            slots = grant.slots[after : after + count]
            sums = grant.checksums[after : after + count]
            after += count
            needed = namespace.groups[index].blocks_needed(grant.hit_blocks, namespace.block_tokens)
            if range(span.begin, span.end) != needed or None in slots or index in seen:
                raise Unavailable("the lease does not cover every block that was found")
            seen.add(index)
            records = [client.view(slot)[:size] for slot in slots if slot is not None]
            pages = empty_pages(group, count, namespace.block_tokens)
            copier.write(pages, range(count), records, copier.mark())
            # After the copy, so that a slot that changed under it is noticed too.
            found = map(checksum_of, records)
            asked = keys[span.begin : span.end]
            corrupt += [key for key, a, b in zip(asked, found, sums, strict=True) if a != b]
            loaded.append((group, pages))
        if len(seen) != len(layout.groups) or grant.hit_blocks > len(keys):
            raise Unavailable("the lease is not for what was asked")
        in_time = time.monotonic() < deadline
    finally:
        release = client.submit(lambda remote: remote.release(grant.lease_id))
    # A block is accused of being corrupt only if the daemon says that the slot was its own.
    if (corrupt or not in_time) and not all(release.result()):
        raise Unavailable("the lease ended during the load")
    if corrupt:
        _drop(client, namespace, corrupt)
        raise CorruptBlock(f"{len(corrupt)} records do not match their checksums")
    return loaded


def _drop(client: Client, namespace: Namespace, keys: Sequence[BlockKey]) -> None:
    """Delete blocks found corrupt, so that nobody is offered them again. Best effort."""
    try:
        client.delete(namespace.id, sorted(set(keys)), corrupt=True)
    except KVStoreError as error:
        logger.warning("drop=failed blocks=%d error=%r", len(keys), error)
