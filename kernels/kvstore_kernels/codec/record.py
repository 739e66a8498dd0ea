"""The format of a coded record, version 1: a header of 64 bytes, little-endian, then the form.

offset, bytes, field:
0, 4    magic "KVR1"
4, 1    form: 1 raw, 2 L3, 3 EP base, 4 EP fine
5, 1    dtype: 1 bfloat16, 2 float16, 3 float8, 4 float32
6, 2    EP: planes of keys and of values in this record
8, 2    EP: planes of keys and of values before them; 0 in a base part
10, 2   tokens of the block
12, 4   number of tiles
16, 8   shape: XXH3-64 of the canonical text (`places.Shape`)
24, 8   pair: of a fine part, the checksum of its base part; else 0
32, 4   where L3's tail begins; else 0
36, 4   bytes of the record, without the zeros behind it
40, 24  zero

A record may be followed by zeros, so that slots have few sizes. Nothing of a stored record is
trusted: what does not fit the reader's own shape is a BadRecord.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

HEADER_NBYTES = 64
_MAGIC = b"KVR1"
_FIELDS = struct.Struct("<4sBB2B2BHIQQII24x")
assert _FIELDS.size == HEADER_NBYTES


_PAIR = struct.Struct("<Q")
_PAIR_AT = 24
_NBYTES = struct.Struct("<I")
_NBYTES_AT = 36


class BadRecord(ValueError):
    """These bytes are no record of this shape; whoever reads them treats them as corrupt."""


class Form(IntEnum):
    """How the body is written."""

    RAW = 1
    L3 = 2
    EP_BASE = 3
    EP_FINE = 4


class DType(IntEnum):
    """What a value is in the engine's memory."""

    BF16 = 1
    FP16 = 2
    FP8 = 3
    FP32 = 4

    @property
    def nbytes(self) -> int:
        return {DType.BF16: 2, DType.FP16: 2, DType.FP8: 1, DType.FP32: 4}[self]


@dataclass(frozen=True, slots=True)
class Header:
    """What the first 64 bytes of a record say.

    planes, before: EP's planes of (keys, values) in this record, and in front of them. tokens: of
    the block. tail_at: offset in bytes. nbytes: of the record, header included.
    """

    form: Form
    dtype: DType
    tokens: int
    tiles: int
    shape: int
    nbytes: int
    planes: tuple[int, int] = (0, 0)
    before: tuple[int, int] = (0, 0)
    pair: int = 0
    tail_at: int = 0

    def pack(self) -> bytes:
        """Return the 64 bytes."""
        return _FIELDS.pack(
            _MAGIC,
            self.form,
            self.dtype,
            *self.planes,
            *self.before,
            self.tokens,
            self.tiles,
            self.shape,
            self.pair,
            self.tail_at,
            self.nbytes,
        )

    @classmethod
    def parse(cls, record: bytes | bytearray | memoryview) -> Header:
        """Read the header of `record`. Raises BadRecord for what no writer writes."""
        if len(record) < HEADER_NBYTES:
            raise BadRecord(f"a record of {len(record)} bytes has no header")
        magic, form, dtype, k, v, k0, v0, tokens, tiles, shape, pair, tail_at, nbytes = (
            _FIELDS.unpack_from(record)
        )
        if magic != _MAGIC:
            raise BadRecord(f"a record begins with {magic!r}, not {_MAGIC!r}")
        if any(record[40:HEADER_NBYTES]):
            raise BadRecord("a record of a later version: its header has fields unknown here")
        try:
            header = cls(
                form=Form(form),
                dtype=DType(dtype),
                tokens=tokens,
                tiles=tiles,
                shape=shape,
                nbytes=nbytes,
                planes=(k, v),
                before=(k0, v0),
                pair=pair,
                tail_at=tail_at,
            )
        except ValueError as error:
            raise BadRecord(f"a record of an unknown kind: {error}") from None
        if not HEADER_NBYTES <= nbytes <= len(record):
            raise BadRecord(f"a record of {nbytes} bytes in {len(record)}")
        return header


def put_pair(record: memoryview, pair: int) -> None:
    """Write the checksum of the base part into the header of a fine one."""
    _PAIR.pack_into(record, _PAIR_AT, pair)


def put_nbytes(record: memoryview, nbytes: int) -> None:
    """Write the size of a record into its header."""
    _NBYTES.pack_into(record, _NBYTES_AT, nbytes)


def same_but_for_sizes(record: memoryview, header: bytes) -> bool:
    """Return whether `record` begins with `header`, its pair and its size aside."""
    return record[:24] == header[:24] and record[32:36] == header[32:36]
