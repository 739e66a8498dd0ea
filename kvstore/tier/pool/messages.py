"""What the daemon and its pool process say to each other: msgpack behind its length. Pure."""

from __future__ import annotations

import struct
from enum import StrEnum
from typing import TypeVar

import msgspec

MESSAGE_NBYTES_MAX = 4 << 20
NAMES_MAX = 8192  # in one call
LENGTH = struct.Struct("<I")

M = TypeVar("M", bound=msgspec.Struct)


class Operation(StrEnum):
    """exists: 1, 0 or an error for each name. sizes: bytes. get, put: between values and the
    buffer. remove: names. purge: what a pattern matches."""

    EXISTS = "exists"
    SIZES = "sizes"
    GET = "get"
    PUT = "put"
    REMOVE = "remove"
    PURGE = "purge"


class Setup(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The first message to the process: what Mooncake is told. buffer_bytes: of the shared memory,
    0 if it gets none. threads: calls at once."""

    master: str
    metadata: str
    address: str
    protocol: str
    device: str
    segment_bytes: int
    buffer_bytes: int
    threads: int


class Request(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """offsets, sizes: of each value in the buffer, for get and put."""

    id: int
    operation: Operation
    names: list[str]
    offsets: list[int] = []
    sizes: list[int] = []


class Reply(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """id: of the request; 0 is the answer to Setup. codes: Mooncake's, one a name; of Setup and
    purge, one. error: why there are none."""

    id: int
    codes: list[int] = []
    error: str = ""


def encode(message: msgspec.Struct) -> bytes:
    data = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(data)) + data


def decode(data: bytes, kind: type[M]) -> M | None:
    """Return the message of that kind, None if it is none."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
