"""One bulk connection, either end: frames on the event loop, records in threads, one at a time.

While the event loop has it, the socket does not block; while a thread has it, it blocks for at most
`SILENCE_S` without a byte. From the loop, frames may be sent meanwhile, and `shut` called: the
thread then ends.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
from contextlib import suppress

from kvstore.model.errors import Incompatible
from kvstore.peer.base import PeerCorrupt, PeerError, PeerGone, PeerSlow
from kvstore.peer.seal import LENGTH, TAG_NBYTES, Opener, Sealer
from kvstore.peer.wire import HEADER_NBYTES, NBYTES_MAX, Frame, parse, parse_head

SILENCE_S = 2.0
_TIMEVAL = struct.pack("@ll", int(SILENCE_S), int(SILENCE_S % 1 * 1e6))
_USER_TIMEOUT_MS = 5000  # for bytes of a control connection that the other host does not confirm
_SEALED_NBYTES_MAX = HEADER_NBYTES + max(NBYTES_MAX.values())


class Bulk:
    """One bulk connection. sealer, opener: None in clear."""

    def __init__(
        self, connection: socket.socket, sealer: Sealer | None = None, opener: Opener | None = None
    ) -> None:
        self.socket = connection
        self.sealer = sealer
        self.opener = opener
        tune(connection)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL)
        # What a call could still put into the kernel's buffer was not read by anybody.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENCE_S * 1000))

    def encode(self, frame: Frame) -> bytes:
        """Return a frame as it is sent."""
        data = frame.encode()
        if self.sealer is None:
            return data
        piece = memoryview(bytearray(LENGTH.size + len(data) + TAG_NBYTES))
        LENGTH.pack_into(piece, 0, len(data))
        self.sealer.seal(data, piece[LENGTH.size :])
        return bytes(piece)

    async def send(self, frame: Frame) -> None:
        """Send a frame. Raises PeerGone, PeerSlow."""
        await self.send_bytes(self.encode(frame))

    async def send_bytes(self, data: bytes | memoryview) -> None:
        """Send bytes. Raises PeerGone, and PeerSlow for a peer that makes no room within 2 s, even
        if it reads a little."""
        left = memoryview(data)
        try:
            while left:
                try:
                    left = left[self.socket.send(left, socket.MSG_DONTWAIT) :]
                except BlockingIOError:
                    await self._has_room()
        except OSError as error:
            raise failed_connection(error, "a bulk connection") from error

    async def _has_room(self) -> None:
        loop, fd = asyncio.get_running_loop(), self.socket.fileno()
        room = asyncio.Event()
        loop.add_writer(fd, room.set)
        try:
            async with asyncio.timeout(SILENCE_S):
                await room.wait()
        except TimeoutError:
            message = f"on a bulk connection there was no room for {SILENCE_S:g} s"
            raise PeerSlow(message) from None
        finally:
            loop.remove_writer(fd)

    async def receive(self) -> Frame | None:
        """Receive one frame, and not a byte more; None: it ended before one. Raises PeerCorrupt,
        PeerGone, PeerSlow."""
        try:
            return await self._receive()
        except Incompatible as error:
            raise PeerCorrupt(f"on a bulk connection: {error}") from error
        except OSError as error:
            raise failed_connection(error, "a bulk connection") from error

    async def _receive(self) -> Frame | None:
        if self.opener is not None:
            return await self._receive_sealed(self.opener)
        start = memoryview(bytearray(HEADER_NBYTES))
        if not await self._fill(start, may_end=True):
            return None
        whole = memoryview(bytearray(HEADER_NBYTES + parse_head(start).nbytes))
        whole[:HEADER_NBYTES] = start
        await self._fill(whole[HEADER_NBYTES:])
        return parse(whole)

    async def _receive_sealed(self, opener: Opener) -> Frame | None:
        start = memoryview(bytearray(LENGTH.size))
        if not await self._fill(start, may_end=True):
            return None
        (nbytes,) = LENGTH.unpack(start)
        if not HEADER_NBYTES <= nbytes <= _SEALED_NBYTES_MAX:
            raise Incompatible(f"a sealed frame of {nbytes} bytes")
        piece = memoryview(bytearray(nbytes + TAG_NBYTES))
        await self._fill(piece)
        plain = memoryview(bytearray(nbytes))
        opener.open(piece, plain)
        if HEADER_NBYTES + parse_head(plain).nbytes != nbytes:
            raise Incompatible("a sealed frame of another length than its header says")
        return parse(plain)

    async def _fill(self, target: memoryview, *, may_end: bool = False) -> bool:
        """Receive what fills `target`. False: it ended before. Raises PeerGone, OSError."""
        loop = asyncio.get_running_loop()
        at = 0
        while at < len(target):
            count = await loop.sock_recv_into(self.socket, target[at:])
            if not count:
                if may_end and not at:
                    return False
                raise PeerGone("a bulk connection has ended", reason="closed")
            at += count
        return True

    def lend_to_thread(self) -> None:
        """From now until `take_back`, a thread has the socket."""
        self.socket.setblocking(True)

    def take_back(self) -> None:
        self.socket.setblocking(False)

    def shut(self) -> None:
        """End it, and what a thread does with it; the descriptor stays until `close`."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.shut()
        self.socket.close()


def failed_connection(error: OSError, what: str) -> PeerError:
    """Return what to raise for a connection that has failed. One that timed out was not read."""
    if error.errno == errno.ETIMEDOUT:
        return PeerSlow(f"{what} was not read, or nothing of it confirmed, for too long")
    return PeerGone(f"{what} has failed: {error.strerror or error}")


def tune(connection: socket.socket) -> None:
    """Send at once, and notice a host that is gone."""
    with suppress(OSError):  # it has ended already
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)
