"""A run of records, verified and encoded: what one frame in the file tier is made of."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.decide.index import StoredBlock
from kvstore.decide.planner import Write
from kvstore.format.codec import Codec, encode_run
from kvstore.format.frame import NO_KEY, FrameHeader, FrameKind, RunBlock
from kvstore.model.block import BlockKey, Part
from kvstore.model.checksum import checksum
from kvstore.model.errors import CorruptBlock
from kvstore.tier.dram import Arena
from kvstore.tier.file import aligned_copy


def encode_write(
    arena: Arena, codec: Codec, write: Write, sequence: int
) -> tuple[FrameHeader, list[memoryview]]:
    """Verify and encode a run. Returns its header and page-aligned payload buffers."""
    raws = [arena.view(held.slot) for held in write.held]
    corrupt = [
        block.key
        for block, raw, record in zip(write.blocks, raws, write.stored, strict=True)
        if checksum(raw) != record.checksum
    ]
    if corrupt:
        raise CorruptRun(corrupt)
    codec, stored = encode_run(codec, raws)
    checksums = [record.checksum for record in write.stored]
    if codec.id == 0:
        for held in write.held:
            arena.clear_padding(held.slot)
        payload = [arena.padded_view(held.slot) for held in write.held]
        stored_checksums = checksums
    else:
        payload = [aligned_copy(buffer) for buffer in stored]
        stored_checksums = [checksum(buffer) for buffer in stored]
    described = [
        RunBlock(block.key, len(raw), len(buffer), raw_sum, stored_sum)
        for block, raw, buffer, raw_sum, stored_sum in zip(
            write.blocks, raws, stored, checksums, stored_checksums, strict=True
        )
    ]
    return run_header(write.blocks[0], write.part, codec, described, sequence), payload


def run_header(
    first: StoredBlock, part: Part, codec: Codec, blocks: Sequence[RunBlock], sequence: int
) -> FrameHeader:
    """Return the header of the frame of a run that begins with `first`."""
    return FrameHeader(
        kind=FrameKind.RUN,
        sequence=sequence,
        namespace_id=first.namespace_id,
        part=part,
        first_block=first.block_index,
        parent=first.parent if first.parent != NO_KEY else None,
        codec_id=codec.id,
        blocks=tuple(blocks),
    )


class CorruptRun(CorruptBlock):
    """Records in the arena do not match their checksums; the others of the run are retried."""

    def __init__(self, keys: Sequence[BlockKey]) -> None:
        super().__init__(f"{len(keys)} records in the arena do not match their checksums")
        self.keys = keys
