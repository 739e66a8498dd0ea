"""Carries out calls: with a deadline each, through the breaker, over one connection.

After the daemon has been away, the connection is renewed in the background.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import grpc.aio

from kvstore.client.arena import ClientArena
from kvstore.client.connection import NO_DAEMON, Connection, Daemon
from kvstore.client.credentials import NO_CREDENTIALS, Certificates, ClientCredentials
from kvstore.model.block import BlockKey, Namespace, NamespaceId, check_keys
from kvstore.model.errors import (
    InvalidRequest,
    KVStoreError,
    SessionEnded,
    Unauthorized,
    Unavailable,
    UnknownNamespace,
)
from kvstore.rpc.status import error_of, is_answer
from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.system.breaker import Breaker

if TYPE_CHECKING:  # the stub's asyncio type exists for type checkers only
    from kvstore.rpc.v1.kvstore_pb2_grpc import KVStoreAsyncStub

logger = logging.getLogger(__name__)

T = TypeVar("T")
Call = Callable[["KVStoreAsyncStub", int, float], Awaitable[T]]  # (stub, session, timeout_s)

# The link is how the daemon knows that nobody touches an ended session's slots any more: it stays
# open while somebody has views of its arena, or a reservation to write into, at most this long.
RETIRED_LINK_S = 60.0
RETIRED_LINK_MIN_S = 1.0  # what is granted now is viewed by then
RETIRED_POLL_S = 0.1
RETIRED_MAX = 8

DURABLE_WAIT_S = 30.0  # for a put to be synced to disk, beyond the deadline of the call

NAMESPACES_MAX = 4096  # that a client remembers: an engine that trains makes ever more
NAMESPACES_TOLD = 8  # to a new daemon at once, the others when it asks for them


class Caller:
    """The connection of one client, whichever daemon it leads to at the moment."""

    def __init__(
        self,
        target: str,
        *,
        token: str,
        name: str,
        timeout_s: float,
        connect_timeout_s: float,
        daemon_uid: int | None,
        credentials: ClientCredentials = NO_CREDENTIALS,
        engines: Sequence[str] = (),
    ) -> None:
        self._namespaces: OrderedDict[NamespaceId, Namespace] = OrderedDict()  # used last: last
        self.target = target
        self._token = token
        self._name = name
        self._engines = engines
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._daemon_uid = daemon_uid
        self._credentials = credentials
        self._certificates = Certificates(credentials) if credentials.tls_files else None
        self._refused = ""  # why the daemon that is there is not asked
        self._breaker = Breaker(time.monotonic)
        self._connection: Connection | None = None
        self._connecting = asyncio.Lock()
        self._recovering: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._reserved: dict[int, float] = {}  # reservations not settled -> when to forget them
        self._retired: dict[asyncio.Task[None], Connection] = {}
        self._closed = False

    @property
    def available(self) -> bool:
        return self._breaker.closed and not self._closed

    @property
    def breaker_trips(self) -> int:
        return self._breaker.trips

    @property
    def arena(self) -> ClientArena | None:
        return self._connection.arena if self._connection else None

    @property
    def daemon(self) -> Daemon:
        """What the daemon says of itself."""
        return self._connection.daemon if self._connection else NO_DAEMON

    async def call(
        self,
        call: Call[T],
        *,
        wait_s: float = 0.0,
        timeout_s: float | None = None,
        repeat: bool = False,
        namespace_id: NamespaceId | None = None,
    ) -> T:
        """Carry out one call within `timeout_s` + `wait_s`.

        `repeat`: once more, in a new session, if the daemon answers that the session has ended.
        `namespace_id`: tell the daemon what that is, and repeat, if it answers that it does not
        know (any more).
        """
        deadline_s = (self._timeout_s if timeout_s is None else timeout_s) + wait_s
        told = False
        while True:
            connection = await self.connected()
            try:
                reply = await call(connection.stub, connection.session, deadline_s)
            except grpc.aio.AioRpcError as error:
                failure = error_of(error, self.target)
                self._judge(connection, error)
                again = False
                if isinstance(failure, SessionEnded):
                    await self._renew(connection)
                    again, repeat = repeat, False
                elif isinstance(failure, UnknownNamespace) and not told:
                    again = told = await self._tell(connection, namespace_id)
                if not again:
                    raise failure from error
            except asyncio.CancelledError:
                # Closing a channel cancels its calls; that must not look as if the task were.
                task = asyncio.current_task()
                if self._closed and task is not None and not task.cancelling():
                    raise Unavailable("this client was closed during the call") from None
                raise
            else:
                self._breaker.success()
                return reply

    async def connected(self) -> Connection:
        """Return the connection, making it if there is none yet. Raises Unavailable at once while
        the breaker is open, or Unauthorized, if that is why."""
        if self._closed:
            raise InvalidRequest("this client is closed")
        if not self._breaker.closed:
            if self._refused:
                raise Unauthorized(self._refused)
            raise Unavailable(
                f"no kvstore daemon answers at {self.target}",
                retry_after_s=self._breaker.retry_after_s,
            )
        if self._connection is not None:
            if self._certificates is not None and self._certificates.changed():
                self._start(self._replace(self._connection))
            return self._connection
        async with self._connecting:
            if self._connection is not None:
                return self._connection
            try:
                return await self._open()
            except KVStoreError:
                self._breaker.trip()
                self._recover()
                raise

    def namespace(self, namespace_id: NamespaceId) -> Namespace | None:
        """Return a namespace that is remembered; it was used last."""
        namespace = self._namespaces.get(namespace_id)
        if namespace is not None:
            self._namespaces.move_to_end(namespace_id)
        return namespace

    def remember(self, namespace_id: NamespaceId, namespace: Namespace) -> None:
        """Keep what has to be told to a daemon that does not know it."""
        self._namespaces[namespace_id] = namespace
        self._namespaces.move_to_end(namespace_id)
        if len(self._namespaces) > NAMESPACES_MAX:
            self._namespaces.popitem(last=False)

    async def _tell(self, connection: Connection, namespace_id: NamespaceId | None) -> bool:
        """Say what a namespace is; False if that is not known here either."""
        if namespace_id is None or namespace_id not in self._namespaces:
            return False
        try:
            await self._register(connection, namespace_id)
        except grpc.aio.AioRpcError as error:
            self._judge(connection, error)
            raise error_of(error, self.target) from error
        return True

    async def _register(self, connection: Connection, namespace_id: NamespaceId) -> None:
        spec = self._namespaces[namespace_id]
        request = pb.RegisterNamespaceRequest(spec_json=spec.to_json(), name=spec.name)
        await connection.stub.RegisterNamespace(request, timeout=self._connect_timeout_s)

    def check_may_lease(self) -> None:
        """Raise InvalidRequest for a client that could not touch what it leases."""
        if not self._token:
            raise InvalidRequest(
                f"leases need the daemon's arena, which {self.target} does not give: connect to "
                "its unix socket, or use put and get"
            )

    def joined(self, keys: Sequence[BlockKey]) -> bytes:
        """Return keys back to back. Raises InvalidRequest before anything is sent."""
        check_keys(keys)
        keys_max = self._connection.batch_keys_max if self._connection else 0
        if keys_max and len(keys) > keys_max:
            raise InvalidRequest(
                f"{len(keys)} keys in one batch; the limit is {keys_max}: split it"
            )
        return b"".join(keys)

    async def close(self) -> None:
        self._closed = True
        tasks = [
            task
            for task in (self._recovering, *self._background, *self._retired)
            if task is not None
        ]
        connections = [*self._retired.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._connection is not None:
            connections.append(self._connection)
            self._connection = None
        for connection in connections:
            await connection.close()

    def lost(self, connection: Connection) -> None:
        """The daemon is gone: refuse calls from now on and look for it in the background."""
        if self._connection is not connection or self._closed:
            return
        logger.warning("client=disconnected target=%s", self.target)
        self._connection = None
        self._retire(connection)
        self._breaker.trip()
        self._recover()

    def ended(self, connection: Connection) -> None:
        """The session has ended: open the next one before anybody asks."""
        if not self._closed:
            self._start(self._renew(connection))

    def reserved(self, lease_id: int) -> None:
        """Note a reservation: its slots will be written to."""
        now = time.monotonic()
        self._reserved = {lease: end for lease, end in self._reserved.items() if end > now}
        self._reserved[lease_id] = now + RETIRED_LINK_S

    def settled(self, *lease_ids: int) -> None:
        """Note that nobody writes into the slots of these reservations any more."""
        for lease_id in lease_ids:
            self._reserved.pop(lease_id, None)

    def _judge(self, connection: Connection, error: grpc.aio.AioRpcError) -> None:
        """Learn from a failed call whether the daemon is gone."""
        if is_answer(error):
            self._breaker.success()
        elif error.code() == grpc.StatusCode.UNAVAILABLE:
            self.lost(connection)
        elif error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
            self._suspect(connection)

    def doubt(self) -> None:
        """Find out whether the daemon still answers, and refuse calls until it has."""
        if self._connection is not None and not self._closed:
            self._suspect(self._connection)

    def _suspect(self, connection: Connection) -> None:
        """Refuse calls until the daemon has answered a ping: one that is stopped then costs one
        deadline, and one that was only slow is back within a round trip."""
        if self._connection is connection and self._breaker.closed:
            self._breaker.trip()
            self._start(self._ping(connection))

    async def _ping(self, connection: Connection) -> None:
        try:
            await connection.ping(self._connect_timeout_s)
        except grpc.aio.AioRpcError:
            self.lost(connection)
        else:
            if self._connection is connection:
                self._breaker.success()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _renew(self, stale: Connection) -> None:
        """Replace a connection whose session has ended; until then its arena stays in use."""
        async with self._connecting:
            if self._connection is not stale or self._closed:
                return
            try:
                await self._open()
            except KVStoreError as error:
                logger.warning("client=session_lost reason=%r", str(error))
                self.lost(stale)
                return
        self._retire(stale)

    async def _replace(self, old: Connection) -> None:
        """Connect with certificates that have changed. If that fails, the old ones stay in use."""
        async with self._connecting:
            if self._connection is not old or self._closed:
                return
            try:
                await self._open()
            except KVStoreError as error:
                logger.warning("client=certificates_not_taken reason=%r", str(error))
                return
        self._retire(old)

    async def _open(self) -> Connection:
        """Connect, and tell a daemon that may be new what the old one knew."""
        try:
            connection = await Connection.open(
                self.target,
                token=self._token,
                name=self._name,
                timeout_s=self._connect_timeout_s,
                watcher=self,
                daemon_uid=self._daemon_uid,
                credentials=self._credentials,
                engines=self._engines,
            )
        except KVStoreError as error:
            refused = str(error) if isinstance(error, Unauthorized) else ""
            if refused and refused != self._refused:
                logger.warning("client=refused reason=%r", refused)
            self._refused = refused
            raise
        self._refused = ""
        try:
            for namespace_id in [*self._namespaces][-NAMESPACES_TOLD:]:
                await self._register(connection, namespace_id)
        except grpc.aio.AioRpcError as error:
            await connection.close()
            raise error_of(error, self.target) from error
        except BaseException:
            await connection.close()
            raise
        self._connection = connection
        self._breaker.success()
        logger.info(
            "client=connected target=%s instance=%s", self.target, connection.daemon.instance
        )
        return connection

    def _retire(self, connection: Connection) -> None:
        """Use a connection no more, but keep its link for copies that are under way."""
        if len(self._retired) >= RETIRED_MAX:
            next(iter(self._retired)).cancel()
        task = asyncio.create_task(self._close_later(connection))
        self._retired[task] = connection
        task.add_done_callback(lambda done: self._retired.pop(done, None))

    def _recover(self) -> None:
        if self._recovering is None or self._recovering.done():
            self._recovering = asyncio.create_task(self._probe())

    async def _probe(self) -> None:
        """Try to connect until it works, with growing pauses."""
        while not self._breaker.closed:
            await asyncio.sleep(self._breaker.retry_after_s)
            async with self._connecting:
                try:
                    await self._open()
                except KVStoreError as error:
                    logger.debug("client=probe_failed reason=%r", str(error))
                    self._breaker.probe_failed()

    async def _close_later(self, connection: Connection) -> None:
        """Let running calls end, then hold the link for as long as it vouches for somebody."""
        try:
            async with asyncio.timeout(RETIRED_LINK_S):
                await connection.channel.close(RETIRED_LINK_S)
                await asyncio.sleep(RETIRED_LINK_MIN_S)
                writing = set(self._reserved)
                # Nothing tells when the last view goes.
                while writing & self._reserved.keys() or connection.viewed:  # noqa: ASYNC110
                    await asyncio.sleep(RETIRED_POLL_S)
        except TimeoutError:
            logger.warning("client=link_closed reason='an ended session is still in use'")
        finally:
            await connection.close()
