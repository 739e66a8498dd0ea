"""The packets of the arena socket: msgpack on SOCK_SEQPACKET, at most one descriptor in each.

    client -> daemon   Hello
    daemon -> client   Welcome(extents), then each Extent with its memfd; more as the arena grows
                       Retired, when an extent is given back
                       Ended, when another process of the session is gone
                       or Refused, and the end
    either end closes  the process is gone

A sequenced-packet socket keeps packets and the descriptors in them together, so nothing has to be
framed; a packet over PACKET_NBYTES_MAX is cut by the kernel, noticed and refused.
"""

from __future__ import annotations

import array
import asyncio
import enum
import os
import socket
from collections.abc import Sequence
from typing import Annotated

import msgspec

from kvstore.model.errors import Incompatible

PACKET_NBYTES_MAX = 4096
_FD_NBYTES = array.array("i").itemsize


class Use(enum.IntEnum):
    """What a client does with an extent."""

    ARENA = 0  # it reads there, and writes if the arena is not sealed
    STAGING = 1  # its session writes there, beside a sealed arena
    SHARED = 2  # it reads what the shared tenant has


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A process joins a session it has opened by RPC; `token` proves which engine it is of."""

    rpc_version: int
    session: Annotated[int, msgspec.Meta(gt=0)]
    token: str


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The process is in; this many Extent packets follow at once."""

    extents: int


class Extent(msgspec.Struct, frozen=True, tag="extent"):
    """One memfd of the arena, attached."""

    id: int
    nbytes: int
    use: Use = Use.ARENA


class Retired(msgspec.Struct, frozen=True, tag="retired"):
    """An extent in which nothing is, and nothing will be: unmap it when no view of it is left."""

    id: int


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The session is over, because another process of it is gone: open a new one.

    This link stays open until copies that are under way have ended: it vouches for their slots.
    """


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Not let in: the error's class name and message."""

    error: str
    message: str


Packet = Hello | Welcome | Extent | Retired | Ended | Refused
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


def decode(data: bytes) -> Packet:
    """Read a packet. Raises Incompatible for anything else."""
    try:
        packet: Packet = _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: no UTF-8
        raise Incompatible(f"not an arena packet: {error}") from error
    return packet


async def receive(connection: socket.socket) -> tuple[Packet | None, int | None]:
    """Receive one packet and its descriptor, which then is the caller's; (None, None) at the end.

    Raises Incompatible if the peer sends something else, and OSError.
    """
    while True:
        try:
            # Not socket.recv_fds: before Python 3.13 it drops the flags, and forks would inherit.
            data, ancillary, flags, _ = connection.recvmsg(
                PACKET_NBYTES_MAX, socket.CMSG_LEN(_FD_NBYTES), socket.MSG_CMSG_CLOEXEC
            )
            break
        except BlockingIOError:
            await readable(connection.fileno())
    fds = _descriptors(ancillary)
    if not data and not fds:
        return None, None
    try:
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise Incompatible("an arena packet is too long, or has too many descriptors")
        return decode(data), (fds[0] if fds else None)
    except Incompatible:
        for fd in fds:
            os.close(fd)
        raise


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)


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
