"""Batches of KV events as bytes: the form of vLLM 0.32 (`vllm/distributed/kv_events.py`).

    PUB     [topic, sequence, payload]            sequence: 8 bytes, big-endian
    ROUTER  ["", start] -> ["", topic, sequence, payload] ..., then ["", "", END, ""]
    payload msgpack [seconds since the epoch, [event, ...], data-parallel rank]

Events are maps. Numbers of a fixed size are packed by numpy, so a batch costs no Python object for
each token.
"""

from __future__ import annotations

import struct
from typing import Any, Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.model.errors import InvalidRequest

SEQUENCE_NBYTES = 8
END: Final = (-1).to_bytes(SEQUENCE_NBYTES, "big", signed=True)
SEQUENCE_MAX = (1 << 63) - 1
PAYLOAD_NBYTES_MAX = 64 << 20  # that a reader takes
CPU, STORAGE = "CPU", "STORAGE"

Hashes = NDArray[np.uint64]
Tokens = NDArray[np.uint32]

_U32 = np.dtype([("kind", "u1"), ("value", ">u4")])
_U64 = np.dtype([("kind", "u1"), ("value", ">u8")])


class BlockStored(msgspec.Struct, tag_field="type", tag="BlockStored"):
    """Consecutive blocks are in a medium. lora_id: old, always null."""

    block_hashes: msgspec.Raw
    parent_block_hash: int | None
    token_ids: msgspec.Raw
    block_size: int
    lora_id: None
    medium: str
    lora_name: str | None
    locality: str = "LOCAL"


class BlockRemoved(msgspec.Struct, tag_field="type", tag="BlockRemoved"):
    """Blocks are not in a medium any more."""

    block_hashes: msgspec.Raw
    medium: str
    locality: str = "LOCAL"


class AllBlocksCleared(msgspec.Struct, tag_field="type", tag="AllBlocksCleared"):
    """Nothing of this stream holds any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


def stored(
    hashes: Hashes,
    parent: int | None,
    tokens: Tokens,
    *,
    block_size: int,
    medium: str,
    lora_name: str = "",
) -> BlockStored:
    """Return the event of consecutive blocks. tokens: of all of them, in order."""
    return BlockStored(
        _packed(hashes, _U64, 0xCF),
        parent,
        _packed(tokens.reshape(-1), _U32, 0xCE),
        block_size,
        None,
        medium,
        lora_name or None,
    )


def removed(hashes: Hashes, medium: str) -> BlockRemoved:
    """Return the event of blocks that left a medium."""
    return BlockRemoved(_packed(hashes, _U64, 0xCF), medium)


def _packed(numbers: NDArray[Any], form: np.dtype[Any], kind: int) -> msgspec.Raw:
    """Return an array of msgpack whose items have a fixed size."""
    items = np.empty(len(numbers), form)
    items["kind"], items["value"] = kind, numbers
    return msgspec.Raw(struct.pack(">BI", 0xDD, len(numbers)) + items.tobytes())


_encode = msgspec.msgpack.Encoder().encode


def payload(at: float, events: list[Event], dp_rank: int | None) -> bytes:
    """Return a batch. at: seconds since the epoch. dp_rank: None in a topic of an engine."""
    return _encode((at, events, dp_rank))


def sequence_bytes(sequence: int) -> bytes:
    return sequence.to_bytes(SEQUENCE_NBYTES, "big")


def sequence_of(data: bytes) -> int:
    """Read where a replay is to start. Raises InvalidRequest."""
    if len(data) != SEQUENCE_NBYTES:
        raise InvalidRequest(f"a sequence number has {SEQUENCE_NBYTES} bytes, not {len(data)}")
    found = int.from_bytes(data, "big")
    if found > SEQUENCE_MAX:
        raise InvalidRequest("not a sequence number: it is 2**63 or more")
    return found


class ReadEvent(msgspec.Struct, tag_field="type", tag=lambda name: name.removeprefix("Read")):
    """What a reader takes of any event."""


class ReadBlockStored(ReadEvent):
    """Blocks that came. Engines write hashes as numbers or as bytes."""

    block_hashes: list[int | bytes]
    token_ids: list[int]
    block_size: int
    parent_block_hash: int | bytes | None = None
    medium: str | None = None
    lora_name: str | None = None
    locality: str | None = None


class ReadBlockRemoved(ReadEvent):
    """Blocks that left."""

    block_hashes: list[int | bytes]
    medium: str | None = None
    locality: str | None = None


class ReadAllBlocksCleared(ReadEvent):
    """All left."""


class Batch(msgspec.Struct, array_like=True):
    """A payload, read."""

    at: float
    events: list[ReadBlockStored | ReadBlockRemoved | ReadAllBlocksCleared]
    dp_rank: int | None = None


_decoder = msgspec.msgpack.Decoder(Batch)


def read(data: bytes) -> Batch:
    """Read a payload that came over a network. Raises InvalidRequest."""
    if len(data) > PAYLOAD_NBYTES_MAX:
        raise InvalidRequest(f"a batch of {len(data)} bytes; {PAYLOAD_NBYTES_MAX} are allowed")
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"not a batch of KV events: {error}") from error


Kind = Literal["BlockStored", "BlockRemoved", "AllBlocksCleared"]
