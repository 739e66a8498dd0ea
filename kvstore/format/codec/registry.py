"""Which codecs there are. A new one gets the next free id here; no id is ever given twice."""

from __future__ import annotations

from kvstore.format.codec.base import Codec
from kvstore.format.codec.lz4 import Lz4Codec
from kvstore.format.codec.raw import RawCodec
from kvstore.format.codec.zstd import ZstdCodec
from kvstore.model.errors import ConfigError, Incompatible

CODECS: tuple[Codec, ...] = (RawCodec(), Lz4Codec(), ZstdCodec())
_BY_ID = {codec.id: codec for codec in CODECS}
_BY_NAME = {codec.name: codec for codec in CODECS}


def codec_by_id(codec_id: int) -> Codec:
    """Return the codec a frame names. Raises Incompatible for one this release does not have."""
    codec = _BY_ID.get(codec_id)
    if codec is None:
        raise Incompatible(f"codec {codec_id} is unknown; this release has {sorted(_BY_ID)}")
    return codec


def codec_by_name(name: str) -> Codec:
    """Return the codec a setting names. Raises ConfigError with the names there are."""
    codec = _BY_NAME.get(name)
    if codec is None:
        raise ConfigError(f"no codec {name!r}; choose one of {', '.join(_BY_NAME)}")
    return codec
