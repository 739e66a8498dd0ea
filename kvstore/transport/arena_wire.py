"""The packets of the arena socket: msgpack on SOCK_SEQPACKET, at most one descriptor in each.

    client -> daemon   Hello
    daemon -> client   Welcome(extents), then each Extent with its memfd; more as the arena grows
                       or Refused, and the end
    either end closes  the member is gone

A sequenced-packet socket keeps packets and the descriptors in them together, so nothing has to be
framed; a packet over PACKET_NBYTES_MAX is cut by the kernel, noticed and refused.
"""

from __future__ import annotations

import array
import asyncio
import os
import socket
from collections.abc import Sequence

import msgspec

from kvstore.errors import Incompatible

PACKET_NBYTES_MAX = 4096


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A process joins a session it has opened by RPC; `token` proves which engine it is of."""

    rpc_version: int
    session: int
    token: str


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The member is in; this many Extent packets follow at once."""

    extents: int


class Extent(msgspec.Struct, frozen=True, tag="extent"):
    """One memfd of the arena, attached."""

    id: int
    nbytes: int


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Not let in: the error's class name and message."""

    error: str
    message: str


Packet = Hello | Welcome | Extent | Refused
_decoder = msgspec.msgpack.Decoder(Packet)
_encode = msgspec.msgpack.Encoder().encode


async def send(connection: socket.socket, packet: Packet, fds: Sequence[int] = ()) -> None:
    """Send one packet on a non-blocking socket. Raises OSError."""
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    while True:
        try:
            connection.sendmsg([_encode(packet)], ancillary, socket.MSG_NOSIGNAL)
            return
        except BlockingIOError:
            await _ready(connection.fileno(), write=True)


async def receive(connection: socket.socket) -> tuple[Packet | None, int | None]:
    """Receive one packet and its descriptor, which then is the caller's; (None, None) at the end.

    Raises Incompatible if the peer sends something else, and OSError.
    """
    while True:
        try:
            data, fds, flags, _ = socket.recv_fds(
                connection, PACKET_NBYTES_MAX, 1, socket.MSG_CMSG_CLOEXEC
            )
            break
        except BlockingIOError:
            await readable(connection.fileno())
    if not data and not fds:
        return None, None
    try:
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise Incompatible("an arena packet is too long, or has too many descriptors")
        return _decoder.decode(data), (fds[0] if fds else None)
    except (msgspec.DecodeError, Incompatible) as error:
        for fd in fds:
            os.close(fd)
        raise Incompatible(f"not an arena packet: {error}") from error


async def readable(fd: int) -> None:
    """Wait until `fd` can be read, or has ended."""
    await _ready(fd, write=False)


async def _ready(fd: int, *, write: bool) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    add, remove = (
        (loop.add_writer, loop.remove_writer) if write else (loop.add_reader, loop.remove_reader)
    )
    add(fd, _resolve, ready)
    try:
        await ready
    finally:
        remove(fd)


def _resolve(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
