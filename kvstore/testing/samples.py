"""Blocks to put, the same in every process: record `i` of a prefix is a function of its key."""

from __future__ import annotations

import hashlib

import numpy as np

from kvstore.model.block import BlockKey, Group, Namespace

RECORD_NBYTES = 20_000  # not a multiple of a page


def sample_namespace(model: str = "sample", record_nbytes: int = RECORD_NBYTES) -> Namespace:
    """Return a namespace of one full-attention group and one shard."""
    return Namespace(
        block_tokens=16, groups=(Group("full", record_nbytes),), identity=(("model", model),)
    )


def sample_keys(prefix: str, count: int) -> list[BlockKey]:
    """Return the keys of a prefix of `count` blocks."""
    return [
        BlockKey(hashlib.sha256(f"{prefix} {index}".encode()).digest()) for index in range(count)
    ]


def sample_record(key: BlockKey, nbytes: int = RECORD_NBYTES) -> bytes:
    """Return the record of a key: incompressible bytes."""
    return np.random.default_rng(int.from_bytes(key[:8], "little")).bytes(nbytes)


def sample_records(keys: list[BlockKey], nbytes: int = RECORD_NBYTES) -> list[bytes]:
    return [sample_record(key, nbytes) for key in keys]
