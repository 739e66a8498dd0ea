"""Encode the blocks of one frame."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.block import Buffer, padded
from kvstore.codec.base import Codec
from kvstore.codec.registry import codec_by_id


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


def _pages_nbytes(buffers: Sequence[Buffer]) -> int:
    return sum(padded(memoryview(buffer).nbytes) for buffer in buffers)
