"""A TCP relay between two daemons that harms what passes: that of one connection's answers, from a
byte of them on, or of all.

`relayed` runs on the caller's event loop, `relay_to` in a thread of its own.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import TypeAlias

from kvstore.peer.wire import BULK_MAGIC, OPENING

KIND_AT = 8  # in the header of a frame
CHUNK_NBYTES = 64 << 10
HOLD_S = 0.02
START_S = 10.0
LOOPBACK = "127.0.0.1"
CHUNKS_MAX = 1024  # on their way at once

Read: TypeAlias = Callable[[], Awaitable[bytes]]


class Relay:
    """port: where to connect instead. Harms connections whose answers are longer than `after`.

    flip: one bit of the byte at `after`. flip_every: one bit of every so many bytes of all answers,
    0 for none. stall: nothing more passes. cut: the end. bytes_per_s: of every answer, 0 for as
    many as come. flip_ask: a kind, and a byte of the next request of it: its lowest bit is flipped,
    once. hold_asks, hold_answers: one way nothing passes, until it is False again. delay_s: how
    long what passes takes, each way, on connections that are made from now on.
    """

    def __init__(self, host: str, target: int) -> None:
        self._host = host
        self._target = target
        self.port = 0
        self.after = 0
        self.flip = self.stall = self.cut = False
        self.flip_every = 0
        self.bytes_per_s = 0
        self.hold_asks = self.hold_answers = False
        self.flip_ask: tuple[int, int] | None = None
        self.delay_s = 0.0
        self.connections = 0
        self.passed = 0  # bytes of answers
        self._loop = asyncio.get_running_loop()
        self._open: set[asyncio.StreamWriter] = set()

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            there_reader, there_writer = await asyncio.open_connection(self._host, self._target)
        except OSError:  # nobody is there
            writer.transport.abort()
            return
        except BaseException:
            writer.transport.abort()
            raise
        both = {writer, there_writer}
        self._open |= both
        try:
            async with asyncio.TaskGroup() as group:
                asks, answers = (self._on_its_way(each, group) for each in (reader, there_reader))
                group.create_task(self._asks(asks, there_writer))
                group.create_task(self._answers(answers, writer))
        except* OSError:
            pass
        finally:
            self._open -= both
            for each in both:
                each.transport.abort()

    def _on_its_way(self, reader: asyncio.StreamReader, group: asyncio.TaskGroup) -> Read:
        """Return what reads the next bytes that come, b"" at the end."""
        delay_s = self.delay_s
        if not delay_s:
            return partial(reader.read, CHUNK_NBYTES)
        under_way = asyncio.Queue[tuple[float, bytes]](CHUNKS_MAX)

        async def take() -> None:
            data = b"..."
            while data:
                data = await reader.read(CHUNK_NBYTES)
                await under_way.put((self._loop.time() + delay_s, data))

        async def read() -> bytes:
            due, data = await under_way.get()
            await asyncio.sleep(due - self._loop.time())
            return data

        group.create_task(take())
        return read

    async def _asks(self, read: Read, writer: asyncio.StreamWriter) -> None:
        while data := await read():
            await _released(lambda: self.hold_asks)
            writer.write(self._flipped(data))
            await writer.drain()
        writer.transport.abort()

    def _flipped(self, data: bytes) -> bytes:
        """Return what passes on of bytes that were sent at once."""
        begin = OPENING.size if data.startswith(BULK_MAGIC) else 0
        if self.flip_ask is None or data[begin + KIND_AT : begin + KIND_AT + 1] != bytes(
            self.flip_ask[:1]
        ):
            return data
        harmed = bytearray(data)
        harmed[begin + self.flip_ask[1]] ^= 1
        self.flip_ask = None
        return bytes(harmed)

    async def _answers(self, read: Read, writer: asyncio.StreamWriter) -> None:
        passed = 0
        while data := bytearray(await read()):
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
            self._flip_some(data)
            writer.write(data)
            await writer.drain()
            if self.bytes_per_s:
                await asyncio.sleep(len(data) / self.bytes_per_s)
        writer.transport.abort()

    def _flip_some(self, data: bytearray) -> None:
        before, self.passed = self.passed, self.passed + len(data)
        if self.flip_every:
            next_one = -before % self.flip_every
            for at in range(next_one, len(data), self.flip_every):
                data[at] ^= 1

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
async def relayed(
    target: int, host: str = LOOPBACK, *, here: str = LOOPBACK
) -> AsyncIterator[Relay]:
    """Relay to a port of `host` for the time of the context. here: the address to listen at."""
    relay = Relay(host, target)
    tasks: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(relay.connected(reader, writer))
        tasks.add(task)
        await asyncio.wait([task])

    server = await asyncio.start_server(connected, here, 0)
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


@contextmanager
def relay_to(target: int, host: str = LOOPBACK, *, here: str = LOOPBACK) -> Iterator[Relay]:
    """The same in a thread of its own; its faults are set while it runs. Raises TimeoutError."""
    ready, done = threading.Event(), threading.Event()
    found: list[Relay] = []

    async def run() -> None:
        async with relayed(target, host=host, here=here) as relay:
            found.append(relay)
            ready.set()
            await asyncio.to_thread(done.wait)

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    if not ready.wait(START_S):
        raise TimeoutError(f"no relay to {host}:{target} within {START_S:.0f} s")
    try:
        yield found[0]
    finally:
        done.set()
        thread.join(START_S)
