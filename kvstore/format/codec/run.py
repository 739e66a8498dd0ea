"""Encode the blocks of one frame."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.format.codec.base import Codec
from kvstore.format.codec.registry import codec_by_id
from kvstore.model.block import Buffer, padded
from kvstore.model.checksum import checksum
from kvstore.model.errors import CorruptBlock, Incompatible


def encode_run(codec: Codec, raws: Sequence[memoryview]) -> tuple[Codec, list[Buffer]]:
    """Return the codec to name in the frame header and the stored bytes of each block.

    A run that takes as many pages encoded as raw is stored raw: it is then read without a decode.
    Blocking: call it in a thread pool. Raw results alias `raws`.
    """
    if codec.id != 0:
        stored = [codec.encode(raw) for raw in raws]
        if _pages_nbytes(stored) < _pages_nbytes(raws):
            return codec, stored
    return codec_by_id(0), list(raws)


def decodes_to(codec_id: int, stored: memoryview, target: memoryview, expected: int) -> bool:
    """Decode a block into `target`; return whether it has the checksum expected. Blocking."""
    try:
        codec_by_id(codec_id).decode(stored, target)
    except (CorruptBlock, Incompatible):
        return False
    return checksum(target) == expected


def _pages_nbytes(buffers: Sequence[Buffer]) -> int:
    return sum(padded(memoryview(buffer).nbytes) for buffer in buffers)
