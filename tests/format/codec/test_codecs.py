from __future__ import annotations

import struct

import pytest
import zstandard

from kvstore.format.codec import (
    CODECS,
    Codec,
    Lz4Codec,
    RawCodec,
    ZstdCodec,
    codec_by_id,
    codec_by_name,
    encode_run,
)
from kvstore.model.errors import ConfigError, CorruptBlock, Incompatible
from kvstore.testing.codec import CodecContract


class TestRaw(CodecContract):
    def make(self) -> Codec:
        return RawCodec()

    def test_it_copies_nothing(self) -> None:
        raw = memoryview(b"x" * 100)
        assert RawCodec().encode(raw) is raw


class TestLz4(CodecContract):
    def make(self) -> Codec:
        return Lz4Codec()


class TestZstd(CodecContract):
    def make(self) -> Codec:
        return ZstdCodec()

    def test_a_frame_that_claims_the_size_and_holds_more_is_corrupt(self) -> None:
        frame = bytearray(zstandard.ZstdCompressor(level=1).compress(bytes(1 << 20)))
        fields = zstandard.get_frame_parameters(bytes(frame))
        at = frame.index(struct.pack("<I", fields.content_size))
        frame[at : at + 4] = struct.pack("<I", 100_000)
        with pytest.raises(CorruptBlock):
            self.decoded(bytes(frame), 100_000)

    def test_a_frame_with_a_giant_window_is_corrupt_not_a_giant_allocation(self) -> None:
        # Magic; descriptor: 4-byte content size, no single segment; window 2^31; cut off there.
        frame = bytes.fromhex("28b52ffd") + b"\x80" + bytes([(31 - 10) << 3])
        with pytest.raises(CorruptBlock):
            self.decoded(frame + struct.pack("<I", 5000), 5000)


def test_ids_and_names_are_persistent() -> None:
    assert [(codec.id, codec.name) for codec in CODECS] == [(0, "raw"), (1, "lz4"), (2, "zstd")]


def test_an_unknown_codec_is_named_in_the_error() -> None:
    with pytest.raises(Incompatible, match="codec 99 "):
        codec_by_id(99)
    with pytest.raises(ConfigError, match="'brotli'; choose one of raw, lz4, zstd"):
        codec_by_name("brotli")


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_a_run_that_does_not_shrink_is_stored_raw(codec: Codec) -> None:
    raws = [memoryview(zstandard.ZstdCompressor().compress(bytes(range(256)) * 4)[:40])] * 2
    used, stored = encode_run(codec, raws)
    assert used.id == 0
    assert stored == raws


@pytest.mark.parametrize("codec", [Lz4Codec(), ZstdCodec()], ids=lambda codec: codec.name)
def test_a_run_that_shrinks_keeps_its_codec(codec: Codec) -> None:
    raws = [memoryview(bytes(20_000)), memoryview(b"ab" * 10_000)]
    used, stored = encode_run(codec, raws)
    assert used is codec
    for raw, block in zip(raws, stored, strict=True):
        target = bytearray(len(raw))
        codec.decode(memoryview(block), memoryview(target))
        assert target == raw
