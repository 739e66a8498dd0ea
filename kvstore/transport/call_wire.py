"""The frames of the call socket: the hot calls of local clients, without gRPC's threads.

    client -> daemon   REQUEST(id, method, timeout_s, message)   CANCEL(id): nobody waits any more
    daemon -> client   REPLY(id, message)                        ERROR(id, status)

Messages are those of the proto file. A unary call of grpc.aio hands over between four threads,
which takes longer than most answers; here it is one write and one read on either side.
"""

from __future__ import annotations

import asyncio
import enum
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from kvstore.model.errors import Incompatible
from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.transport.messages import MESSAGE_NBYTES_MAX

_HEADER = struct.Struct("<IQBBxxd")
BUFFERED_NBYTES_MAX = 4 * MESSAGE_NBYTES_MAX
"""What may wait to be written to a peer that does not read."""


class Method(NamedTuple):
    """A call that may come this way. Its number is its place in METHODS, never reused.

    at_once: its handler never waits for anything.
    """

    name: str
    request: Any
    reply: Any
    at_once: bool = False

    @property
    def names_session(self) -> bool:
        return "session" in self.request.DESCRIPTOR.fields_by_name


METHODS = (
    Method("Match", pb.MatchRequest, pb.MatchReply, at_once=True),
    Method("Acquire", pb.AcquireRequest, pb.GrantReply),
    Method("Reserve", pb.ReserveRequest, pb.GrantReply),
    Method("Commit", pb.CommitRequest, pb.CommitReply),
    Method("Release", pb.ReleaseRequest, pb.ReleaseReply, at_once=True),
    Method("Await", pb.AwaitRequest, pb.AwaitReply),
)


class Kind(enum.IntEnum):
    REQUEST = 0
    REPLY = 1
    ERROR = 2
    CANCEL = 3


class Status(msgspec.Struct, frozen=True, array_like=True):
    """An error on the wire: gRPC's code, and what travels in its trailing metadata."""

    code: int
    message: str
    metadata: tuple[tuple[str, str], ...] = ()


class Frame(NamedTuple):
    """One frame. method and timeout_s mean something in a REQUEST."""

    kind: Kind
    id: int
    body: bytes = b""
    method: int = 0
    timeout_s: float = 0.0

    def encode(self) -> bytes:
        header = _HEADER.pack(len(self.body), self.id, self.kind, self.method, self.timeout_s)
        return header + self.body


_status = msgspec.msgpack.Decoder(Status)
encode_status = msgspec.msgpack.Encoder().encode


def decode_status(body: bytes) -> Status:
    """Read an error. Raises Incompatible."""
    try:
        return _status.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: no UTF-8
        raise Incompatible(f"not the status of a call: {error}") from error


class FrameLink(asyncio.Protocol):
    """One end of a call socket. Frames in, frames out; the first thing it cannot read ends it.

    clogged: the peer does not read, and enough is waiting for it.
    """

    def __init__(self, on_frame: Callable[[Frame], None], on_lost: Callable[[], None]) -> None:
        self._on_frame = on_frame
        self._on_lost = on_lost
        self.clogged = False
        self._is_held = False
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None

    @property
    def open(self) -> bool:
        return self._transport is not None

    @property
    def buffered_nbytes(self) -> int:
        """What this end holds for the link: a frame that is not all there, and what is not read."""
        unread = self._transport.get_write_buffer_size() if self._transport is not None else 0
        return len(self._received) + unread

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(BUFFERED_NBYTES_MAX)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._on_lost()

    def pause_writing(self) -> None:
        self.clogged = True

    def resume_writing(self) -> None:
        self.clogged = False

    def data_received(self, data: bytes) -> None:
        self._received += data
        self._hand_over()

    def hold(self) -> None:
        """Take no more frames, and read nothing more, until `go_on`."""
        self._is_held = True
        if self._transport is not None:
            self._transport.pause_reading()

    def go_on(self) -> None:
        """Take the frames that have come, unless one of them holds the link again."""
        self._is_held = False
        self._hand_over()
        if not self._is_held and self._transport is not None:
            self._transport.resume_reading()

    def _hand_over(self) -> None:
        try:
            while not self._is_held and (frame := self._next()) is not None:
                self._on_frame(frame)
        except Incompatible:
            self.close()

    def send(self, frame: Frame) -> None:
        """Send, unless the link is gone; then `on_lost` has been, or will be, called."""
        if self._transport is not None:
            self._transport.write(frame.encode())

    def close(self) -> None:
        self._received.clear()
        if self._transport is not None:
            self._transport.abort()

    def _next(self) -> Frame | None:
        """Take one frame off what was received. Raises Incompatible for what cannot be one."""
        if len(self._received) < _HEADER.size:
            return None
        nbytes, call, kind, method, timeout_s = _HEADER.unpack_from(self._received)
        if nbytes > MESSAGE_NBYTES_MAX or kind not in Kind._value2member_map_:
            raise Incompatible("not a frame of the call socket")
        end = _HEADER.size + nbytes
        if len(self._received) < end:
            return None
        body = bytes(memoryview(self._received)[_HEADER.size : end])
        del self._received[:end]
        return Frame(Kind(kind), call, body, method, timeout_s)
