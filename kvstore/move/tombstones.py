"""Tombstones: frames that kill what was written before them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvstore.format.frame import KILLED_MAX, FrameHeader, FrameKind
from kvstore.model.block import BlockKey, NamespaceId
from kvstore.tier.file import Devices


def tombstones(
    file: Devices, namespaces: Collection[NamespaceId], keys: Sequence[BlockKey] | None
) -> list[FrameHeader]:
    """Return tombstones for keys, or (None) for whole namespaces, with their sequences taken."""
    batches: list[tuple[BlockKey, ...]] = [()]
    kind = FrameKind.TOMBSTONE_NAMESPACE
    if keys is not None:
        kind = FrameKind.TOMBSTONE_KEYS
        batches = [tuple(keys[i : i + KILLED_MAX]) for i in range(0, len(keys), KILLED_MAX)]
    # All sequences at once: what is put while this waits for the disk is not to be killed.
    return [
        FrameHeader(
            kind=kind,
            sequence=file.sequences.take(),
            namespace_id=namespace_id,
            killed=killed,
        )
        for namespace_id in namespaces
        for killed in batches
    ]
