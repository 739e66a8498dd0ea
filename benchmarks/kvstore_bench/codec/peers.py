"""What else could make KV smaller, each on the bytes of whole records.

None of them knows that the bytes are KV, but zipnn, which knows bfloat16. They are shown because
people ask: most gain nothing that L3 does not, and cost more.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import lz4.frame
import numpy as np
import zstandard

Codes = Callable[[bytes], Any]
DICTIONARY_NBYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Peer:
    """One of them. Both functions take and return bytes of one record."""

    encode: Codes
    decode: Codes


def peers(samples: Sequence[bytes]) -> dict[str, Peer]:
    """Return those that are installed. samples: records to train a dictionary on."""
    found = {
        "lz4": Peer(lz4.frame.compress, lz4.frame.decompress),
        "zstd": _zstd(None),
        "zstd_dictionary": _zstd(samples),
        "zstd_split": _split(len(samples[0]) // 2),
    }
    if find_spec("zipnn"):
        found["zipnn"] = _zipnn()
    if find_spec("blosc2"):
        found["blosc2_shuffle_zstd"] = _blosc2()
    return found


def _zstd(samples: Sequence[bytes] | None) -> Peer:
    trained = None
    if samples is not None:
        pieces = [each[at : at + 4096] for each in samples[:64] for at in range(0, 65536, 4096)]
        trained = zstandard.train_dictionary(
            DICTIONARY_NBYTES, [piece for piece in pieces if piece]
        )
    encoder = zstandard.ZstdCompressor(level=1, dict_data=trained)
    decoder = zstandard.ZstdDecompressor(dict_data=trained)
    return Peer(encoder.compress, decoder.decompress)


def _split(values: int) -> Peer:
    """Exponents apart from the rest, and only they by zstd. values: of each record."""
    encoder, decoder = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()

    def encode(record: bytes) -> bytes:
        bits = np.frombuffer(record, np.uint16)
        exponents = ((bits >> 7) & 255).astype(np.uint8)
        rest = ((bits >> 8) & 128 | bits & 127).astype(np.uint8)
        return rest.tobytes() + encoder.compress(exponents.tobytes())

    def decode(coded: bytes) -> bytes:
        rest = np.frombuffer(coded, np.uint8, values).astype(np.uint16)
        exponents = np.frombuffer(decoder.decompress(coded[values:]), np.uint8).astype(np.uint16)
        return ((rest & 128) << 8 | exponents << 7 | rest & 127).astype(np.uint16).tobytes()

    return Peer(encode, decode)


def _zipnn() -> Peer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it imports torch, which warns about itself
        from zipnn import ZipNN

    codec = ZipNN(bytearray_dtype="bfloat16", input_format="byte")
    # It reorders its input in place, whoever else has it: so it is given a copy.
    return Peer(lambda record: codec.compress(bytearray(record)), codec.decompress)


def _blosc2() -> Peer:
    import blosc2

    def encode(record: bytes) -> bytes:
        packed: bytes = blosc2.compress2(
            record,
            typesize=2,
            codec=blosc2.Codec.ZSTD,
            clevel=1,
            filters=[blosc2.Filter.SHUFFLE],
            nthreads=1,
        )
        return packed

    return Peer(encode, lambda packed: blosc2.decompress2(packed, nthreads=1))
