"""What one-sided reads have in frames: grants, and the memory they lie in. Pure."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from kvstore.model.errors import Incompatible
from kvstore.peer.messages import Keys, PartsBody, ReadAnswer, decode_parts, decoder, encode


class GrantBody(msgspec.Struct, frozen=True, kw_only=True):
    """GRANT. link: by which driver it is to be read. parts: an encoded `PartsBody`."""

    link: str
    parts: bytes


class GrantReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to GRANT. grant: its number; 0: not all of it lies in memory that peers can read.
    addresses: u64 each, of the lender's; version: of the memory they are in, see `Memory`."""

    grant: int
    instance: str = ""
    sizes: bytes = b""
    checksums: bytes = b""
    addresses: bytes = b""
    version: int = 0


class HeldBody(msgspec.Struct, frozen=True, kw_only=True):
    """HELD: the grant is given back."""

    grant: int


class MemoryBody(msgspec.Struct, frozen=True, kw_only=True):
    """MEMORY: of which driver."""

    link: str


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to MEMORY. offer: of the driver, for its counterpart."""

    version: int
    offer: bytes


_grant_body = decoder(GrantBody)
_grant_reply = decoder(GrantReply)
_held_body = decoder(HeldBody)
_memory_body = decoder(MemoryBody)
_memory = decoder(Memory)


class GrantAnswer(NamedTuple):
    """What a GRANT brings. read: as of a READ. addresses: 0 for a record that is not there."""

    grant: int
    read: ReadAnswer
    addresses: tuple[int, ...]
    version: int


def encode_grant_reply(
    grant: int, answer: ReadAnswer, addresses: Sequence[int], version: int
) -> bytes:
    return encode(
        GrantReply(
            grant=grant,
            instance=answer.instance,
            sizes=struct.pack(f"<{len(answer.sizes)}I", *answer.sizes),
            checksums=struct.pack(f"<{len(answer.sizes)}Q", *answer.checksums),
            addresses=struct.pack(f"<{len(answer.sizes)}Q", *addresses),
            version=version,
        )
    )


def decode_grant(body: bytes) -> tuple[str, Keys, PartsBody]:
    """Read a GRANT: the driver, and what a READ would ask. Raises Incompatible, InvalidRequest."""
    found = _grant_body(body)
    return found.link, *decode_parts(found.parts)


def decode_grant_reply(body: bytes, *, records: int) -> GrantAnswer | None:
    """Read the answer to a GRANT of so many records; None: to be read in another way. Raises
    Incompatible. Whether the addresses are the lender's, its driver's counterpart looks at."""
    reply = _grant_reply(body)
    if reply.grant == 0:
        return None
    lengths = len(reply.sizes), len(reply.checksums), len(reply.addresses)
    if lengths != (4 * records, 8 * records, 8 * records) or not 0 < reply.grant < 1 << 63:
        raise Incompatible(f"not a grant of {records} records")
    answer = ReadAnswer(
        reply.instance,
        struct.unpack(f"<{records}I", reply.sizes),
        struct.unpack(f"<{records}Q", reply.checksums),
    )
    addresses = struct.unpack(f"<{records}Q", reply.addresses)
    if any(
        nbytes and address + nbytes > 1 << 64
        for nbytes, address in zip(answer.sizes, addresses, strict=True)
    ):
        raise Incompatible("a record beyond the end of memory")
    return GrantAnswer(reply.grant, answer, addresses, reply.version)


def decode_held(body: bytes) -> int:
    """Read a HELD. Raises Incompatible."""
    return _held_body(body).grant


def decode_memory_ask(body: bytes) -> str:
    """Read a MEMORY. Raises Incompatible."""
    return _memory_body(body).link


def decode_memory(body: bytes) -> Memory:
    """Read the answer to a MEMORY. Raises Incompatible."""
    return _memory(body)
