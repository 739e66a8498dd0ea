"""The client's end of the arena: extents mapped as they arrive, and the link that says we live."""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import logging
import mmap
import os
import queue
import socket
import threading
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvstore.client.trust import check_daemon
from kvstore.model import errors
from kvstore.model.block import Slot
from kvstore.model.errors import Incompatible, InvalidRequest, KVStoreError, Unavailable
from kvstore.system.shared_mapping import SharedMapping
from kvstore.transport.arena_wire import (
    Ended,
    Extent,
    Hello,
    Refused,
    Retired,
    Use,
    Welcome,
    receive,
    send,
)

logger = logging.getLogger(__name__)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
F_SEAL_FUTURE_WRITE = 0x10  # of extents that only the daemon may write to
TOUCH_STEP_NBYTES = 8 << 20
TOUCH_PAUSES = 9  # as long as a step, after it: whoever copies has better uses for the core


class ClientArena:
    """The mapped extents of one daemon. Views stay valid as long as anybody keeps them."""

    def __init__(
        self,
        connection: socket.socket,
        on_lost: Callable[[], None],
        on_ended: Callable[[], None],
    ) -> None:
        self._connection = connection
        self._on_lost = on_lost
        self._on_ended = on_ended
        self._maps: dict[int, SharedMapping] = {}
        self._views: dict[int, memoryview] = {}
        self._uses: dict[int, Use] = {}
        self._retired: list[SharedMapping] = []
        self._toucher = _Toucher()
        self._listening: asyncio.Task[None] | None = None

    @classmethod
    async def join(
        cls,
        path: str,
        hello: Hello,
        timeout_s: float,
        *,
        daemon_uid: int | None = None,
        on_lost: Callable[[], None],
        on_ended: Callable[[], None],
    ) -> ClientArena:
        """Join the session and map the extents there are.

        on_lost is called when the link ends, on_ended when the daemon says that the session has.
        Raises what the daemon refused with, Incompatible, Unavailable, or Unauthorized if it is
        another user's.
        """
        try:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise Unavailable(f"cannot map the arena at {path}: {error!r}") from error
        connection.setblocking(False)
        arena = cls(connection, on_lost, on_ended)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.get_running_loop().sock_connect(connection, path)
                check_daemon(connection, path, daemon_uid)
                await send(connection, hello)
                await arena._welcome()
        except (OSError, TimeoutError) as error:
            await arena.close()
            raise Unavailable(f"cannot map the arena at {path}: {error!r}") from error
        except BaseException:
            await arena.close()
            raise
        arena._listening = asyncio.create_task(arena._listen())
        return arena

    def view(self, slot: Slot) -> memoryview:
        """Return the slot's bytes, writable unless the arena is sealed. Raises Unavailable if its
        extent is not mapped."""
        extent = self._views.get(slot.extent)
        if extent is None:
            raise Unavailable(f"extent {slot.extent} is not mapped, or of a daemon that is gone")
        end = slot.offset + slot.nbytes
        if not 0 <= slot.offset <= end <= len(extent):
            raise InvalidRequest(f"slot {slot.offset}:{end} is outside of its extent")
        return extent[slot.offset : end]

    def extents(self) -> dict[int, memoryview]:
        """Return the extents mapped now, by id."""
        return dict(self._views)

    @property
    def staging_nbytes(self) -> int:
        """Bytes that this session writes into, if the arena is sealed; else 0."""
        return self._nbytes_of(Use.STAGING)

    @property
    def arena_nbytes(self) -> int:
        """Bytes of the tenant's own arena that are mapped now."""
        return self._nbytes_of(Use.ARENA)

    def _nbytes_of(self, use: Use) -> int:
        return sum(len(view) for id, view in self._views.items() if self._uses[id] is use)

    def viewed(self) -> bool:
        """Unmap what nobody has a view of; return whether anything is left. No views after it."""
        self._toucher.stop()
        self._retired += self._maps.values()
        self._maps.clear()
        self._views.clear()
        self._retired = [mapped for mapped in self._retired if not mapped.close()]
        return bool(self._retired)

    async def close(self) -> None:
        """End the link, which ends the session; mappings live on while views of them do."""
        try:
            if self._listening is not None:
                # First the reader, then the descriptor: its number may be somebody else's at once.
                self._listening.cancel()
                await asyncio.gather(self._listening, return_exceptions=True)
        finally:
            self._toucher.stop()
            self._maps.clear()
            self._views.clear()
            self._connection.close()

    async def _welcome(self) -> None:
        packet, fd = await receive(self._connection)
        if isinstance(packet, Refused):
            kind = getattr(errors, packet.error, Unavailable)
            raise (
                kind(packet.message)
                if issubclass(kind, KVStoreError)
                else Unavailable(packet.message)
            )
        if not isinstance(packet, Welcome) or fd is not None:
            raise Unavailable("the daemon closed the arena socket")
        for _ in range(packet.extents):
            await self._receive()

    async def _receive(self) -> None:
        """Take one packet: an extent to map, or the end of the session."""
        packet, fd = await receive(self._connection)
        if isinstance(packet, Ended):
            self._on_ended()
            return
        if isinstance(packet, Retired):
            self._retire(packet.id)
            return
        try:
            if packet is None:
                raise ConnectionResetError("the daemon closed the arena socket")
            if not isinstance(packet, Extent) or fd is None:
                raise Incompatible("the daemon sent something else than an extent")
            mapped = _mapped(fd, packet.nbytes)
        finally:
            if fd is not None:
                os.close(fd)
        self._maps[packet.id] = mapped
        self._uses[packet.id] = packet.use
        self._views[packet.id] = mapped.view()
        self._toucher.add(mapped)

    def _retire(self, extent: int) -> None:
        """Unmap an extent that the daemon gave back, now or when the last view of it is gone."""
        self._views.pop(extent, None)
        mapped = self._maps.pop(extent, None)
        if mapped is not None:
            self._retired.append(mapped)
        self._retired = [each for each in self._retired if not each.close()]

    async def _listen(self) -> None:
        """Map new extents until the link ends."""
        try:
            while True:
                await self._receive()
        except (OSError, ValueError, KVStoreError) as error:
            logger.info("arena_link=lost reason=%r", str(error))
            self._on_lost()


def _mapped(fd: int, nbytes: int) -> SharedMapping:
    """Map an extent. Raises Incompatible for what could not be touched safely.

    Without the seal the daemon's side could shrink it, and the engine would die of SIGBUS.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        if not seals & fcntl.F_SEAL_SHRINK or not 0 < nbytes <= os.fstat(fd).st_size:
            raise Incompatible(f"not a sealed extent of {nbytes} bytes")
        return SharedMapping(fd, nbytes, writable=not seals & F_SEAL_FUTURE_WRITE)
    except (OSError, ValueError, OverflowError) as error:
        raise Incompatible(f"not an arena extent: {error}") from error


def _touch(step: npt.NDArray[np.uint8]) -> None:
    """Read a byte of every page that is there.

    What the daemon has given back to the system is not: reading it would take it anew.
    """
    pages = step[:: mmap.PAGESIZE]
    there = np.empty(len(pages), np.uint8)
    if _libc.mincore(step.ctypes.data, step.nbytes, there.ctypes.data) == 0:
        pages = pages[(there & 1).astype(bool)]
    if len(pages):
        pages.max()


class _Toucher:
    """Fills page tables ahead of use, in a thread and in steps, with most of a core left to others.

    By reading a byte of every page, which the kernel answers by mapping those around it as well, to
    be written to, too: a quarter of what MADV_POPULATE_WRITE takes for pages that exist.
    """

    def __init__(self) -> None:
        self._mappings: queue.SimpleQueue[SharedMapping | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, mapped: SharedMapping) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="kvstore-touch", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no thread can be started now: pages are mapped when used
                return
            self._thread = thread
        self._mappings.put(mapped)

    def stop(self) -> None:
        self._stopped.set()
        self._mappings.put(None)

    def _run(self) -> None:
        took_s = 0.0
        while (mapped := self._mappings.get()) is not None:
            offset = 0
            while True:
                if self._stopped.wait(TOUCH_PAUSES * took_s):
                    return
                began = time.monotonic()
                try:
                    nbytes = min(TOUCH_STEP_NBYTES, mapped.nbytes - offset)
                    if nbytes <= 0:
                        break
                    _touch(np.frombuffer(mapped.view(), np.uint8, nbytes, offset))
                except ValueError:  # unmapped by now
                    break
                offset += nbytes
                took_s = time.monotonic() - began
