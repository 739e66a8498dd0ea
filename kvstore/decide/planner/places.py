"""Which records a client may read in their files by itself, instead of having them promoted."""

from __future__ import annotations

from collections.abc import Iterable

from kvstore.decide.index import StoredBlock, StoredFrame, StoredPart
from kvstore.model.block import Namespace

RAW = 0
"""Id of the codec that stores bytes as they are."""


def is_readable(record: StoredPart | None) -> bool:
    """Say whether the bytes of a record lie in a file as they were put."""
    frame = record.frame if record is not None else None
    return frame is not None and frame.codec_id == RAW and not frame.is_out


def reachable_groups(block: StoredBlock, namespace: Namespace) -> int:
    """Return, as `StoredBlock.resident_groups` does, which groups are in the arena or readable."""
    if block.resident_groups == block.complete:
        return block.resident_groups
    groups = namespace.groups
    there, mask = [0] * len(groups), 0
    for record in block.records:
        group = record.part.group
        if group < len(groups) and (record.resident is not None or is_readable(record)):
            there[group] += 1
            if there[group] == groups[group].shards:
                mask |= 1 << group
    for index in namespace.fine:  # nobody waits for these: see `StoredBlock`
        mask &= ~(1 << index)
        mask |= (mask >> groups[index].refines & 1) << index
    return mask


def frames_of(records: Iterable[StoredPart]) -> tuple[StoredFrame, ...]:
    """Return the frames in which readable records lie, each once."""
    frames = (record.frame for record in records if is_readable(record))
    return tuple(dict.fromkeys(frame for frame in frames if frame is not None))
