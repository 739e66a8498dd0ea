"""Damage what a daemon holds, as rotten memory does."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.client import Client
from kvstore.model.block import BlockKey, NamespaceId, Part, Span


def damage_resident(client: Client, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> None:
    """Flip a bit of the arena's record of each key, all of one group and shard. They have to be
    there."""
    grant = client.acquire(namespace_id, keys, spans=[Span(Part(0, 0), 0, len(keys))])
    try:
        for slot in grant.slots:
            assert slot is not None
            client.view(slot)[99] ^= 0x10
    finally:
        client.release(grant.lease_id)
