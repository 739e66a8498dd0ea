"""The daemon's end of the arena socket: lets processes in, hands out extents, notices deaths."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias

from kvstore.model.errors import Incompatible, KVStoreError, Unauthorized, Unavailable
from kvstore.rpc import RPC_VERSION
from kvstore.system.background import keep_running
from kvstore.system.descriptors import LinkCount, LinkPool
from kvstore.transport.arena_wire import (
    Ended,
    Extent,
    Hello,
    Packet,
    Refused,
    Retired,
    Use,
    Welcome,
    readable,
    receive,
    send,
)
from kvstore.transport.messages import Epoch
from kvstore.transport.unix_sockets import peer_name, peer_of

logger = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 2.0
SEND_TIMEOUT_S = 10.0
LINKS_MAX = 4096
LINK_DESCRIPTORS = 2  # the socket, and one of its peer's process
LINK = "ArenaLink"  # where refusals are counted
ACCEPT_PAUSE_S = 0.1


CheckPeer: TypeAlias = Callable[[socket.socket], int]
"""Returns the process id of a link's peer. Raises Unauthorized."""


class ArenaExtent(Protocol):
    """An extent as the arena describes it. The descriptor stays the arena's."""

    @property
    def id(self) -> int: ...
    @property
    def fd(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def closed(self) -> bool:
        """Whether it was retired: its descriptor is closed then, or another file's."""


# Extents, ids of those that were retired, and None when the session has ended. There are as many
# items as the arena has extents, and has had since the link was read last, and one more, so the
# queue needs no other bound.
News: TypeAlias = "asyncio.Queue[tuple[Epoch, Use, ArenaExtent | int] | None]"


class Processes(Protocol):
    """What the store does about processes; a process is opaque here."""

    def join(self, session: Any, token: str, pid: int) -> Any:
        """Let a process into its session. Raises SessionEnded."""

    def leave(self, process: Any) -> None:
        """Note that a process is gone."""

    def memory(self, session: Any) -> Any:
        """Return the extents that this session alone maps. Raises Unavailable."""


class Extents(Protocol):
    """Where extents come from."""

    def handles(self) -> Any:
        """Return the extents there are, oldest first."""

    def on_extent(self, callback: Callable[[Any], None]) -> Callable[[], None]:
        """Call back for each new one, until the returned function is called."""

    def on_retired(self, callback: Callable[[int], None]) -> Callable[[], None]:
        """Call back with the id of each that is given back, until the same."""


class ArenaHost:
    """Serves one listening SOCK_SEQPACKET socket until `close`."""

    def __init__(
        self,
        listener: socket.socket,
        processes: Processes,
        extents: Extents,
        epoch: Epoch,
        refused: Callable[[str, KVStoreError, str], None],
        *,
        task_failed: Callable[[str], None],
        check_peer: CheckPeer | None = None,
        also: Sequence[tuple[Extents, Epoch]] = (),
        count: LinkCount | None = None,
    ) -> None:
        """also: extents of others that these clients read, with the epochs of their numbers.
        refused: is told of each link that is not let in, and whose it was. task_failed: see
        `keep_running`.
        check_peer: who is let in, if not this user alone. count: of its links, where there are
        other listeners."""
        self._count = count or LinkPool(LINKS_MAX, LINK_DESCRIPTORS).listener()
        self._check_peer = check_peer or check_own_user
        self._task_failed = task_failed
        self._listener = listener
        self._processes = processes
        self._epoch = epoch
        self._sources = [(extents, epoch, Use.ARENA), *((*each, Use.SHARED) for each in also)]
        self._refused = refused
        self._links: set[asyncio.Task[None]] = set()
        self._news: dict[int, set[News]] = {}  # of the links of each session
        self._accepting: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._listener.setblocking(False)
        self._accepting = asyncio.create_task(
            keep_running("arena_links", self._accept, self._task_failed)
        )

    async def close(self) -> None:
        """Stop accepting and close every link, which ends the sessions."""
        tasks = [task for task in (self._accepting, *self._links) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()
        self._count.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:  # no descriptor is left, most likely
                logger.warning("arena_link=not_accepted reason=%r", str(error))
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            if not self._count.take():
                logger.warning("arena_link=refused links=%d", len(self._links))
                too_many = Unavailable("too many links", reason="links")
                self._refused(LINK, too_many, peer_name(connection))
                connection.close()
                continue
            task = asyncio.create_task(self._serve(connection))
            self._links.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._links.discard(task)
        self._count.give_back()

    async def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                pid = self._check_peer(connection)
                async with asyncio.timeout(HELLO_TIMEOUT_S):
                    hello, fd = await receive(connection)
                if fd is not None:
                    os.close(fd)
                with self._joined(hello, pid) as (news, own):
                    logger.info("arena_link=open pid=%d", pid)
                    await self._hand_out(connection, pid, news, own)
            except KVStoreError as error:
                await self._refuse(connection, error)
            except (OSError, TimeoutError) as error:
                logger.info("arena_link=lost reason=%r", str(error))

    @contextlib.contextmanager
    def _joined(self, hello: Any, pid: int) -> Iterator[tuple[News, Sequence[ArenaExtent]]]:
        """Be a process of the session for the time of the context; its end is news to the others.
        Yields news, and the extents that are the session's own."""
        if not isinstance(hello, Hello):
            raise Incompatible("the first arena packet has to be Hello")
        check_version(hello.rpc_version)
        process = self._processes.join(hello.session, hello.token, pid)
        news: News = asyncio.Queue()
        links = self._news.setdefault(hello.session, set())
        links.add(news)
        try:
            yield news, self._processes.memory(hello.session)
        finally:
            self._processes.leave(process)
            links.discard(news)
            # No new link can join what has ended, so this is told once.
            for other in self._news.pop(hello.session, ()):
                other.put_nowait(None)

    async def _hand_out(
        self, connection: socket.socket, pid: int, news: News, own: Sequence[ArenaExtent]
    ) -> None:
        """Send the extents, the session's own first, and what is new, until the peer is gone."""
        known = [(self._epoch, Use.STAGING, extent) for extent in own]
        stops: list[Callable[[], None]] = []
        for extents, epoch, use in self._sources:
            known += [(epoch, use, extent) for extent in extents.handles()]
        for item in known:
            news.put_nowait(item)
        for extents, epoch, use in self._sources:
            tell = partial(_tell, news, epoch, use)
            stops += [extents.on_extent(tell), extents.on_retired(tell)]
        try:
            await send(connection, Welcome(len(known)))
            tasks = (
                asyncio.create_task(_gone(connection, pid)),
                asyncio.create_task(self._send_news(connection, news)),
            )
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            for stop in stops:
                stop()

    async def _send_news(self, connection: socket.socket, news: News) -> None:
        while True:
            item = await news.get()
            packet: Packet = Ended()
            fds: list[int] = []
            epoch, use, extent = item if item is not None else (self._epoch, Use.ARENA, None)
            if isinstance(extent, int):
                packet = Retired(epoch.extent_out(extent))
            elif extent is not None:
                if extent.closed:
                    continue  # that it was retired is the next they hear of it
                packet = Extent(epoch.extent_out(extent.id), extent.nbytes, use)
                fds = [os.dup(extent.fd)]  # it may be retired before the peer reads
            try:
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    await send(connection, packet, fds)
            finally:
                for fd in fds:
                    os.close(fd)

    async def _refuse(self, connection: socket.socket, error: KVStoreError) -> None:
        logger.info("arena_link=refused reason=%r", str(error))
        self._refused(LINK, error, peer_name(connection))
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                await send(connection, Refused(type(error).__name__, str(error)[:1000]))


def _tell(news: News, epoch: Epoch, use: Use, extent: ArenaExtent | int) -> None:
    news.put_nowait((epoch, use, extent))


def check_version(rpc_version: int) -> None:
    """Raise Incompatible unless the client speaks this daemon's version."""
    if rpc_version != RPC_VERSION:
        raise Incompatible(
            f"the client speaks RPC version {rpc_version}, this daemon {RPC_VERSION}: "
            "upgrade the older of the two"
        )


def check_own_user(connection: socket.socket) -> int:
    """Return the peer's process id. Raises Unauthorized for another user's process."""
    peer = peer_of(connection)
    if peer.uid != os.getuid():
        raise Unauthorized(f"user {peer.uid} may not map the arena of user {os.getuid()}")
    return peer.pid


async def _gone(connection: socket.socket, pid: int) -> None:
    """Return when the peer closes the link, or its process ends.

    The process too, because a fork of it that inherited the socket would keep the link open.
    """
    with contextlib.ExitStack() as stack:
        waits = {asyncio.create_task(_closed(connection))}
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:  # another PID namespace, or just gone: the end of the link must do
            pass
        else:
            stack.callback(os.close, pidfd)
            waits.add(asyncio.create_task(readable(pidfd)))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
            await asyncio.gather(*waits, return_exceptions=True)


async def _closed(connection: socket.socket) -> None:
    """Return at the end of the link; a second packet, which no client sends, ends it too."""
    with contextlib.suppress(OSError, Incompatible):
        _, fd = await receive(connection)
        if fd is not None:
            os.close(fd)
