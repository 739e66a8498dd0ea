"""What records are called in the pool: kvstore1/<namespace>/<key>/<group>.<shard>, in hex. Pure.

The first part tells them from what others keep in the same pool, and has the version of the value.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.model.block import BlockKey, NamespaceId, Part

PREFIX = "kvstore1"
EVERYTHING = f"^{PREFIX}/"
PATTERN_KEYS_MAX = 64  # in one pattern: the master tries it on every name
PROBE = f"{PREFIX}/probe"


def record_name(namespace_id: NamespaceId, key: BlockKey, part: Part) -> str:
    return f"{PREFIX}/{namespace_id.hex()}/{key.hex()}/{part.group}.{part.shard}"


def namespace_pattern(namespace_id: NamespaceId) -> str:
    """Return the regular expression of all records of a namespace."""
    return f"^{PREFIX}/{namespace_id.hex()}/"


def keys_pattern(namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> str:
    """Return that of all records of at most PATTERN_KEYS_MAX keys."""
    return f"{namespace_pattern(namespace_id)}({'|'.join(key.hex() for key in keys)})/"
