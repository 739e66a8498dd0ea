"""Records that are put honestly, their forgeries, and which of them a reader is served."""

from __future__ import annotations

from kvstore import BlockKey, Client
from kvstore.model.block import Namespace
from kvstore.testing.samples import sample_keys, sample_namespace, sample_record
from tests.hostile.forge import LEAF_NBYTES, forged

SPACE: Namespace = sample_namespace("forged", LEAF_NBYTES)
POISON = b"POISON! " * 112


def fill(client: Client, count: int) -> None:
    """Store records durably."""
    keys = sample_keys("forged", count)
    client.register(SPACE)
    records = [sample_record(key, LEAF_NBYTES) for key in keys]
    assert client.put(SPACE.id, keys, records, durable=True).durable


def served(client: Client, count: int) -> tuple[int, int, int]:
    """Return how many records are served forged, as they were put, and wrong in another way."""
    bad = good = other = 0
    client.register(SPACE)
    for key in sample_keys("forged", count):  # one by one: a miss must not hide what follows
        (found,) = client.get(SPACE.id, [key])
        if found is not None:
            good += found == sample_record(key, LEAF_NBYTES)
            bad += POISON[:64] in found
            other += found != sample_record(key, LEAF_NBYTES) and POISON[:64] not in found
    return bad, good, other


def poisoned(key: BlockKey) -> bytes:
    """Return other bytes with the checksum of what `fill` stores under a key."""
    return forged(sample_record(key, LEAF_NBYTES), POISON)
