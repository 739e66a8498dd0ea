"""One pool process: started, asked, and ended for good.

What it was asked and has not answered is `pending`. It is over when the process has answered, or
has ended: its transfers end with it, for nothing else runs them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import sys
from collections import deque
from pathlib import Path

from kvstore.tier.pool.failure import PoolFailed
from kvstore.tier.pool.memory import Memory
from kvstore.tier.pool.messages import (
    LENGTH,
    MESSAGE_NBYTES_MAX,
    Reply,
    Request,
    Setup,
    decode,
    encode,
)

WORKER = "kvstore.tier.pool.worker"
START_S = 20.0  # Python and Mooncake's libraries take a second; a master that hangs, for ever
LEAVE_S = 3.0
END_S = 5.0  # from SIGKILL to the end of a process
TOLD_LINES = 8  # of what it has printed, to be told when it ends
QUIET = {"GLOG_minloglevel": "3", "MC_LOG_LEVEL": "ERROR", "PYTHONFAULTHANDLER": "1"}


class PoolProcess:
    """Made by `start`."""

    def __init__(self, child: asyncio.subprocess.Process, memory: Memory | None) -> None:
        self.memory = memory
        self.pending: dict[int, tuple[float, asyncio.Future[Reply]]] = {}  # -> since when
        self._child = child
        self._numbers = itertools.count(1)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._told: deque[str] = deque(maxlen=TOLD_LINES)
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def start(cls, setup: Setup) -> PoolProcess:
        """Start one, and wait until it has met the master. Raises PoolFailed, and then nothing of
        it is left."""
        memory = Memory(setup.buffer_bytes) if setup.buffer_bytes else None
        if memory is not None:
            setup.buffer_bytes = memory.nbytes
        ours, theirs = socket.socketpair()
        descriptor = memory.descriptor if memory is not None else -1
        arguments = (sys.executable, "-m", WORKER, str(theirs.fileno()), str(descriptor))
        inherited = [theirs.fileno(), *([descriptor] if memory is not None else [])]
        try:
            child = await asyncio.create_subprocess_exec(
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=inherited,
                env={**os.environ, **QUIET, "PYTHONPATH": _path()},
            )
        except OSError as error:
            ours.close()
            raise PoolFailed(f"its process does not start: {error}", reason="gone") from error
        finally:
            theirs.close()
            if memory is not None:
                memory.sent()
        process = cls(child, memory)
        try:
            await process._meet(ours, setup)
        except BaseException:
            await process.end()
            raise
        return process

    async def _meet(self, link: socket.socket, setup: Setup) -> None:
        self._reader, self._writer = await asyncio.open_connection(sock=link)
        self._tasks.append(asyncio.create_task(self._listen_to_errors()))
        try:
            async with asyncio.timeout(START_S):
                self._writer.write(encode(setup))
                reply = await self._receive()
        except TimeoutError as error:
            raise PoolFailed(f"no answer within {START_S:g} s", reason="slow") from error
        if reply is None or reply.error:
            raise PoolFailed(reply.error if reply else self.last_words(), reason="gone")
        self._tasks.append(asyncio.create_task(self._take_replies()))

    def send(self, request: Request, now: float) -> asyncio.Future[Reply]:
        """Ask; the future ends with the answer, or with the process, which raises PoolFailed."""
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        future.add_done_callback(_look_at)
        if self._writer is None or self._child.returncode is not None:
            future.set_exception(PoolFailed("its process has ended", reason="gone"))
            return future
        request.id = next(self._numbers)
        data = encode(request)
        if len(data) > MESSAGE_NBYTES_MAX:
            future.set_exception(PoolFailed("too much in one call", reason="busy"))
            return future
        self.pending[request.id] = (now, future)
        self._writer.write(data)
        return future

    @property
    def waits_since(self) -> float | None:
        """Since when its oldest call waits for an answer."""
        return min((since for since, _ in self.pending.values()), default=None)

    async def ended(self, timeout_s: float) -> bool:
        """Wait until it ends by itself, at most so long; say whether it has."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._child.wait()
        except TimeoutError:
            return False
        return True

    async def leave(self) -> None:
        """Let it take its memory out of the pool by itself: else the master offers it to others
        until it misses the process."""
        for task in self._tasks[1:]:  # its errors are read on, or it might wait for that
            task.cancel()
        if self._writer is not None:
            self._writer.close()
        await self.ended(LEAVE_S)

    async def end(self) -> None:
        """Kill it, and wait until it is gone: then nothing writes into its memory any more."""
        with contextlib.suppress(ProcessLookupError):
            self._child.kill()
        for task in self._tasks:
            task.cancel()
        if self._writer is not None:
            self._writer.close()
        if not await self.ended(END_S):
            return  # in the kernel still: its calls, and their lanes, stay as they are
        for _, future in list(self.pending.values()):
            if not future.done():
                future.set_exception(PoolFailed("its process has ended", reason="gone"))
        self.pending.clear()

    def last_words(self) -> str:
        """Return what it has printed at last."""
        return f"its process has ended: {' | '.join(self._told)[-500:] or 'it said nothing'}"

    async def _take_replies(self) -> None:
        while (reply := await self._receive()) is not None:
            _, future = self.pending.pop(reply.id, (0.0, None))
            if future is None or future.done():
                continue
            if reply.error:
                future.set_exception(PoolFailed(reply.error, reason="gone"))
            else:
                future.set_result(reply)
        with contextlib.suppress(ProcessLookupError):
            self._child.kill()  # what it sends is no reply, or it has ended

    async def _receive(self) -> Reply | None:
        assert self._reader is not None
        try:
            (nbytes,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            if nbytes > MESSAGE_NBYTES_MAX:
                return None
            return decode(await self._reader.readexactly(nbytes), Reply)
        except (asyncio.IncompleteReadError, OSError):
            return None

    async def _listen_to_errors(self) -> None:
        """Read all that it prints, and keep the end of it."""
        errors = self._child.stderr
        assert errors is not None
        while data := await errors.read(4096):
            self._told.extend(data.decode(errors="replace").splitlines()[-TOLD_LINES:])


def _look_at(future: asyncio.Future[Reply]) -> None:
    """Nobody may be waiting for it any more: its error is no news then."""
    if not future.cancelled():
        future.exception()


def _path() -> str:
    """Return where the process finds this very package."""
    here = str(Path(__file__).parents[3])
    return os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH", ""))))
