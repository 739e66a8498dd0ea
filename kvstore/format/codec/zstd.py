"""Zstandard frames, decoded into exactly the raw size."""

from __future__ import annotations

import threading

import zstandard

from kvstore.format.codec.base import fill
from kvstore.model.errors import CorruptBlock

LEVEL = 1  # the fastest regular level: this sits on the way to a disk, not to an archive
WINDOW_NBYTES_MAX = 1 << 23  # what level 1 needs at most; a forged frame may ask for 2 GiB


class _Contexts(threading.local):
    """zstandard's contexts are expensive to make and must not be shared between threads."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=LEVEL, write_content_size=True)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=WINDOW_NBYTES_MAX)


class ZstdCodec:
    """One Zstandard frame with its content size, level 1, without zstd's own checksum."""

    id = 2
    name = "zstd"

    def __init__(self) -> None:
        self._contexts = _Contexts()

    def encode(self, raw: memoryview) -> bytes:
        return self._contexts.compressor.compress(raw)

    def decode(self, stored: memoryview, target: memoryview) -> None:
        try:
            # `decompress` allocates whatever size the frame claims, so the claim is checked first.
            claimed = zstandard.get_frame_parameters(stored).content_size
            if claimed != len(target):
                raise CorruptBlock(f"a zstd frame of {claimed} bytes, not {len(target)}")
            decoded = self._contexts.decompressor.decompress(stored, allow_extra_data=False)
        except (zstandard.ZstdError, ValueError) as error:
            raise CorruptBlock(f"not a zstd frame of {len(target)} bytes: {error}") from error
        fill(target, decoded)
