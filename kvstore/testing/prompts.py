"""Prompts whose blocks are stored with their tokens, as an engine's connector does it."""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvstore.client import Client
from kvstore.model.block import BlockKey, Committed, Namespace, Part, Span
from kvstore.model.checksum import checksum
from kvstore.model.keys import KeyChain, root_key
from kvstore.model.tokens import BlockTokens


def prompt(seed: int, tokens: int, vocabulary: int = 50_000) -> list[int]:
    """Return the token ids of a prompt, the same for the same seed."""
    draw = random.Random(seed)
    return [draw.randrange(vocabulary) for _ in range(tokens)]


def keys_of(namespace: Namespace, tokens: Sequence[int]) -> list[BlockKey]:
    return KeyChain(root_key(namespace.id), namespace.block_tokens).update(tokens)


def store_prompt(
    client: Client,
    namespace: Namespace,
    tokens: Sequence[int],
    *,
    first_block: int = 0,
    durable: bool = False,
    lora_name: str = "",
    told: bool = True,
) -> list[BlockKey]:
    """Store the blocks of a prompt from `first_block` on; returns the keys of all of it.

    The namespace has one group and one shard, and is registered.
    """
    keys = keys_of(namespace, tokens)
    new, size = keys[first_block:], namespace.block_tokens
    nbytes = namespace.groups[0].record_nbytes
    grant = client.reserve(
        namespace.id,
        new,
        first_block=first_block,
        parent=keys[first_block - 1] if first_block else None,
        spans=[Span(Part(0, 0), 0, len(new))],
        wait_s=5.0,
        tokens=BlockTokens.of(tokens[first_block * size : len(keys) * size], lora_name)
        if told
        else None,
    )
    sums = []
    for key, slot in zip(new, grant.slots, strict=True):
        record = (key * (nbytes // len(key) + 1))[:nbytes]
        sums.append(checksum(record))
        if slot is not None:
            client.view(slot)[:nbytes] = record
    if any(grant.slots):
        committed: Committed = client.commit(grant.lease_id, sums, durable=durable)
        assert committed.committed
    elif grant.lease_id:
        client.release(grant.lease_id)
    return keys
