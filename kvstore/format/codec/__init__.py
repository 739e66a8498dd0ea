"""Codecs: how the bytes of a block are stored. Ids are persistent and never reused.

| id | name | for |
| -: | ---- | --- |
| 0 | raw | the bytes themselves; reads land in their slots without a copy |
| 1 | lz4 | light on the CPU; finds repeated bytes only |
| 2 | zstd | smaller, for disks that are slower than the CPU |
"""

from kvstore.format.codec.base import Codec
from kvstore.format.codec.lz4 import Lz4Codec
from kvstore.format.codec.raw import RawCodec
from kvstore.format.codec.registry import CODECS, codec_by_id, codec_by_name
from kvstore.format.codec.run import decodes_to, encode_run
from kvstore.format.codec.zstd import ZstdCodec

__all__ = [
    "CODECS",
    "Codec",
    "Lz4Codec",
    "RawCodec",
    "ZstdCodec",
    "codec_by_id",
    "codec_by_name",
    "decodes_to",
    "encode_run",
]
