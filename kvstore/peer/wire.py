"""The frames between two daemons. Pure: bytes in, values out; every size is bounded first.

    control   HELLO, then any number of requests at once; REPLY or ERROR has the id of its request
    bulk      the opening (magic, token), then one READ at a time:
              READ -> REPLY(instance, sizes, checksums), the records back to back, then `held`

A frame is a header (bytes of the body, id, kind, timeout, checksum) and a body: see `messages.py`.
A kind that is not known is refused by an ERROR, a field that is not known is ignored: a newer peer
may say more. The checksum is of all the rest: without it, a flipped bit makes a READ of one shard
one of another shard, whose own checksums fit, and a DELETE one of nothing.
One-sided reads need no bulk connection: GRANT leases records and says where in memory they are,
MEMORY how to reach that; HELD gives the grant back and says whether it was held until then.
Sealed bulk connections carry the same bytes in pieces: see `seal.py`.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

from kvstore.model.block import KEY_NBYTES, SPEC_CHARS_MAX
from kvstore.model.checksum import checksum
from kvstore.model.errors import Incompatible
from kvstore.peer.base import HEAD_NBYTES, HEADS_MAX, KEYS_MAX, NAMED_KEYS_MAX

PROTOCOL = (1, 2)
"""The lowest and the highest version that this code speaks. 2: requests name a tenant, which a peer
of version 1 would not look at."""
TENANTS_SINCE = 2

BULK_MAGIC = b"KVSB"  # as the length of a frame it would be far beyond its bound
TOKEN_NBYTES = 32
OPENING = struct.Struct(f"<4s{TOKEN_NBYTES}s")
HELD, NOT_HELD = b"\1", b"\0"
SPANS_MAX = 4096
TIMEOUT_S_MAX = 3600.0
_ROOM = 1 << 10  # for what a body has beside its largest field
_KEYS_NBYTES = KEYS_MAX * KEY_NBYTES
_START = struct.Struct("<IIB3xd")
_SUM = struct.Struct("<Q")
HEADER_NBYTES = _START.size + _SUM.size
_SPAN_NBYTES_MAX = 24


class Kind(enum.IntEnum):
    """Numbers are never used again."""

    HELLO = 1
    NAMESPACE = 2
    MATCH = 3
    ARRIVAL = 4
    BULK = 5
    READ = 6
    HEADS = 7
    CORRUPT = 8
    DELETE = 9
    PING = 10
    CANCEL = 11
    GRANT = 12
    HELD = 13
    MEMORY = 14
    REPLY = 64
    ERROR = 65


_UNKNOWN_NBYTES_MAX = 64 << 10
_ASK_NBYTES_MAX = _KEYS_NBYTES + SPANS_MAX * _SPAN_NBYTES_MAX + _ROOM
NBYTES_MAX: dict[int, int] = {
    Kind.HELLO: 32 << 10,
    Kind.NAMESPACE: SPEC_CHARS_MAX + _ROOM,
    Kind.MATCH: _KEYS_NBYTES + _ROOM,
    Kind.ARRIVAL: _ASK_NBYTES_MAX,
    Kind.BULK: _ROOM,
    Kind.READ: _ASK_NBYTES_MAX,
    Kind.HEADS: _ROOM,
    Kind.CORRUPT: NAMED_KEYS_MAX * KEY_NBYTES + _ROOM,
    Kind.DELETE: NAMED_KEYS_MAX * KEY_NBYTES + _ROOM,
    Kind.PING: _ROOM,
    Kind.CANCEL: 0,
    Kind.GRANT: _ASK_NBYTES_MAX,
    Kind.HELD: _ROOM,
    Kind.MEMORY: _ROOM,
    Kind.REPLY: HEADS_MAX * HEAD_NBYTES + _ROOM,
    Kind.ERROR: 4 * _ROOM,
}
"""Of a body, by kind. The largest answers are the heads."""


class Frame(NamedTuple):
    """One frame. kind: a number that may be no `Kind`. timeout_s: how long the asker waits."""

    kind: int
    id: int
    body: bytes = b""
    timeout_s: float = 0.0

    def encode(self) -> bytes:
        start = _START.pack(len(self.body), self.id, self.kind, self.timeout_s)
        return b"".join((start, _SUM.pack(checksum(start + self.body)), self.body))


class Head(NamedTuple):
    """The header of a frame."""

    nbytes: int
    id: int
    kind: int
    timeout_s: float


def parse_head(data: bytes | bytearray | memoryview) -> Head:
    """Read a header. Raises Incompatible for one that cannot be. It is believed as far as to wait
    for the body, and not further: see `parse`."""
    nbytes, number, kind, timeout_s = _START.unpack_from(data)
    if nbytes > NBYTES_MAX.get(kind, _UNKNOWN_NBYTES_MAX):
        raise Incompatible(f"a frame of kind {kind} with {nbytes} bytes")
    if not 0.0 <= timeout_s <= TIMEOUT_S_MAX:  # which NaN is not, either
        raise Incompatible("a frame with an impossible timeout")
    return Head(nbytes, number, kind, timeout_s)


def parse(data: bytes | bytearray | memoryview) -> Frame:
    """Read a whole frame. Raises Incompatible for one that is not what was sent."""
    head = parse_head(data)
    start, body = bytes(data[: _START.size]), bytes(data[HEADER_NBYTES:])
    (expected,) = _SUM.unpack_from(data, _START.size)
    if checksum(start + body) != expected:
        raise Incompatible("a frame that does not match its checksum")
    return Frame(head.kind, head.id, body, head.timeout_s)


class Frames:
    """Cuts what arrives into frames. It holds no more than one frame and what came with it."""

    def __init__(self) -> None:
        self._received = bytearray()

    @property
    def waiting_nbytes(self) -> int:
        return len(self._received)

    def feed(self, data: bytes) -> list[Frame]:
        """Return the frames that are complete now. Raises Incompatible; then the link is over."""
        self._received += data
        frames = []
        at = 0
        with memoryview(self._received) as received:
            while len(received) - at >= HEADER_NBYTES:
                end = at + HEADER_NBYTES + parse_head(received[at : at + HEADER_NBYTES]).nbytes
                if end > len(received):
                    break
                frames.append(parse(received[at:end]))
                at = end
        del self._received[:at]
        return frames
