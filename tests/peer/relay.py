"""A TCP relay between two daemons that harms what passes, from a byte of the answers on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

CHUNK_NBYTES = 64 << 10
HOLD_S = 0.02


class Relay:
    """port: where to connect instead. Harms connections whose answers are longer than `after`.

    flip: one bit of the byte at `after`. stall: nothing more passes. cut: the end. bytes_per_s: of
    every answer, 0 for as many as come. hold_asks, hold_answers: one way nothing passes, until it
    is False again.
    """

    def __init__(self, target: int, host: str = "127.0.0.1") -> None:
        self._target = host, target
        self.port = 0
        self.after = 0
        self.flip = self.stall = self.cut = False
        self.bytes_per_s = 0
        self.hold_asks = self.hold_answers = False
        self.connections = 0
        self._loop = asyncio.get_running_loop()
        self._open: set[asyncio.StreamWriter] = set()

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            there_reader, there_writer = await asyncio.open_connection(*self._target)
        except BaseException:
            writer.transport.abort()
            raise
        both = {writer, there_writer}
        self._open |= both
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._asks(reader, there_writer))
                group.create_task(self._answers(there_reader, writer))
        except* OSError:
            pass
        finally:
            self._open -= both
            for each in both:
                each.transport.abort()

    async def _asks(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(CHUNK_NBYTES):
            await _released(lambda: self.hold_asks)
            writer.write(data)
            await writer.drain()
        writer.transport.abort()

    async def _answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        passed = 0
        while data := bytearray(await reader.read(CHUNK_NBYTES)):
            at = self.after - passed
            passed += len(data)
            await _released(lambda: self.hold_answers)
            if 0 <= at < len(data):
                if self.flip:
                    data[at] ^= 1
                if self.stall or self.cut:
                    writer.write(data[:at])
                    await writer.drain()
                    if self.cut:
                        break
                    await asyncio.Event().wait()
            writer.write(data)
            await writer.drain()
            if self.bytes_per_s:
                await asyncio.sleep(len(data) / self.bytes_per_s)
        writer.transport.abort()

    def end_soon(self) -> None:
        """End every connection, from any thread."""
        self._loop.call_soon_threadsafe(self.end)

    def end(self) -> None:
        for each in list(self._open):
            each.transport.abort()


async def _released(held: Callable[[], bool]) -> None:
    """Return when nothing is held any more, which another thread says."""
    while True:
        if not held():
            return
        await asyncio.sleep(HOLD_S)


@asynccontextmanager
async def relayed(target: int, host: str = "127.0.0.1") -> AsyncIterator[Relay]:
    """Relay to a port of an address for the time of the context."""
    relay = Relay(target, host)
    tasks: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(relay.connected(reader, writer))
        tasks.add(task)
        await asyncio.wait([task])

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    relay.port = server.sockets[0].getsockname()[1]
    try:
        yield relay
    finally:
        server.close()
        relay.end()
        for task in tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.01)  # what was aborted closes
