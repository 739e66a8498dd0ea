"""The contract every codec keeps. Subclass it and say how to make one."""

from __future__ import annotations

import random
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore.format.codec import Codec, codec_by_id, codec_by_name
from kvstore.model.errors import CorruptBlock

SIZES = (1, 2, 63, 4096, 65_537, 300_000)
GUARD = 64


def sample(nbytes: int, seed: int = 0) -> bytes:
    """Return half compressible bytes: runs of random ones, some repeated."""
    draw = random.Random(seed)
    parts = [draw.randbytes(97) if draw.random() < 0.5 else bytes(113) for _ in range(8)]
    return b"".join(draw.choice(parts) for _ in range(nbytes // 97 + 1))[:nbytes]


class CodecContract:
    """Subclass and override `make`."""

    def make(self) -> Codec:
        raise NotImplementedError("return a codec")

    def decoded(self, stored: bytes, nbytes: int) -> bytes:
        """Decode into guarded memory; fail if a byte beside the target was touched."""
        memory = bytearray(b"\xa5" * (nbytes + 2 * GUARD))
        try:
            self.make().decode(memoryview(stored), memoryview(memory)[GUARD : GUARD + nbytes])
        finally:
            assert memory[:GUARD] == memory[GUARD + nbytes :] == b"\xa5" * GUARD
        return bytes(memory[GUARD : GUARD + nbytes])

    def encoded(self, raw: bytes) -> bytes:
        return bytes(self.make().encode(memoryview(raw)))

    def test_id_and_name_find_it(self) -> None:
        codec = self.make()
        assert codec_by_id(codec.id).name == codec.name
        assert codec_by_name(codec.name).id == codec.id

    def test_what_is_encoded_is_decoded(self) -> None:
        for nbytes in SIZES:
            noise = random.Random(nbytes).randbytes(nbytes)
            for raw in (bytes(nbytes), noise, sample(nbytes)):
                assert self.decoded(self.encoded(raw), nbytes) == raw

    def test_encoding_leaves_the_raw_bytes_alone(self) -> None:
        raw = sample(10_000)
        memory = bytearray(raw)
        self.make().encode(memoryview(memory))
        assert memory == raw

    def test_another_size_is_corrupt(self) -> None:
        for nbytes in (2, 4096, 20_000):
            stored = self.encoded(sample(nbytes))
            for wrong in (nbytes + 1, nbytes * 2, nbytes - 1):
                with pytest.raises(CorruptBlock):
                    self.decoded(stored, wrong)

    def test_a_cut_or_grown_block_is_corrupt(self) -> None:
        stored = self.encoded(sample(5000))
        for damaged in (b"", stored[:1], stored[:-1], stored[: len(stored) // 2], stored + b"\0"):
            with pytest.raises(CorruptBlock):
                self.decoded(damaged, 5000)

    def test_damaged_bytes_decode_to_the_size_or_are_corrupt(self) -> None:
        # That they decode to something wrong is the checksum's business, not the codec's.
        draw = random.Random(1)
        stored = self.encoded(sample(3000))
        for _ in range(500):
            damaged = bytearray(stored)
            for _ in range(draw.randint(1, 4)):
                damaged[draw.randrange(len(damaged))] = draw.randrange(256)
            self.decode_or_corrupt(bytes(damaged), 3000)

    def test_arbitrary_bytes_decode_to_the_size_or_are_corrupt(self) -> None:
        draw = random.Random(2)
        for _ in range(500):
            self.decode_or_corrupt(draw.randbytes(draw.randint(0, 200)), draw.randint(1, 2000))

    def test_memory_is_bounded_by_the_target(self) -> None:
        bomb = self.encoded(bytes(32 << 20))
        tracemalloc.start()
        try:
            with pytest.raises(CorruptBlock):
                self.decoded(bomb, 4096)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()

    def test_threads_do_not_disturb_each_other(self) -> None:
        codec = self.make()

        def there_and_back(seed: int) -> bool:
            raw = sample(50_000, seed)
            target = bytearray(len(raw))
            codec.decode(memoryview(bytes(codec.encode(memoryview(raw)))), memoryview(target))
            return target == raw

        with ThreadPoolExecutor(4) as threads:
            assert all(threads.map(there_and_back, range(40)))

    def decode_or_corrupt(self, stored: bytes, nbytes: int) -> None:
        try:
            self.decoded(stored, nbytes)
        except CorruptBlock:
            pass  # the other allowed outcome
