"""Carries out calls: with a deadline each, through the breaker, over one connection.

After the daemon has been away, the connection is renewed in the background.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import grpc.aio

from kvstore.client.arena import ClientArena
from kvstore.client.connection import NO_DAEMON, Connection, Daemon
from kvstore.client.credentials import NO_CREDENTIALS, Certificates, ClientCredentials
from kvstore.client.namespaces import Namespaces
from kvstore.client.retired_links import RetiredLinks
from kvstore.model.block import BlockKey, NamespaceId, check_keys
from kvstore.model.errors import (
    InvalidRequest,
    KVStoreError,
    SessionEnded,
    Unauthorized,
    Unavailable,
    UnknownNamespace,
)
from kvstore.rpc.status import error_of, is_answer
from kvstore.system.breaker import Breaker

if TYPE_CHECKING:  # the stub's asyncio type exists for type checkers only
    from kvstore.rpc.v1.kvstore_pb2_grpc import KVStoreAsyncStub

logger = logging.getLogger(__name__)

T = TypeVar("T")
Call = Callable[["KVStoreAsyncStub", int, float], Awaitable[T]]  # (stub, session, timeout_s)

KEYS_MAX = 8192
"""Keys of one call that a daemon takes, unless its `limits.batch_keys_max` says otherwise."""

DURABLE_WAIT_S = 30.0  # for a put to be synced to disk, beyond the deadline of the call


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
        self.target = target
        self.namespaces = Namespaces()
        self.retired = RetiredLinks()
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
        self._closed = False

    @property
    def available(self) -> bool:
        return self._breaker.closed and not self._closed

    @property
    def breaker_trips(self) -> int:
        return self._breaker.trips

    @property
    def arena(self) -> ClientArena | None:
        connection = self._connection  # read once: any thread may ask while it is lost
        return connection.arena if connection else None

    @property
    def daemon(self) -> Daemon:
        """What the daemon says of itself."""
        connection = self._connection
        return connection.daemon if connection else NO_DAEMON

    @property
    def batch_keys_max(self) -> int:
        """How many keys the daemon takes in one call; KEYS_MAX while it has not said."""
        connection = self._connection
        return (connection.batch_keys_max if connection else 0) or KEYS_MAX

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
                self._answered(connection)
                return reply

    async def connected(self) -> Connection:
        """Return the connection, making it if there is none yet. Raises Unavailable at once while
        the breaker is open, or Unauthorized, if that is why."""
        self._check_may_call()
        if self._connection is not None:
            if self._certificates is not None and self._certificates.changed():
                self._start(self._replace(self._connection))
            return self._connection
        async with self._connecting:
            self._check_may_call()  # whoever was here before has found out for all
            if self._connection is not None:
                return self._connection
            try:
                return await self._open()
            except KVStoreError:
                self._breaker.trip()
                self._recover()
                raise

    def _check_may_call(self) -> None:
        """Raise what a call raises that is not tried."""
        if self._closed:
            raise InvalidRequest("this client is closed")
        if self._breaker.closed:
            return
        if self._refused:
            raise Unauthorized(self._refused)
        raise Unavailable(
            f"no kvstore daemon answers at {self.target}", retry_after_s=self._breaker.retry_after_s
        )

    async def _tell(self, connection: Connection, namespace_id: NamespaceId | None) -> bool:
        """Say what a namespace is; False if that is not known here either."""
        request = self.namespaces.registration(namespace_id) if namespace_id else None
        if request is None:
            return False
        try:
            await connection.stub.RegisterNamespace(request, timeout=self._connect_timeout_s)
        except grpc.aio.AioRpcError as error:
            self._judge(connection, error)
            raise error_of(error, self.target) from error
        return True

    async def _tell_last(self, connection: Connection) -> None:
        """Say what the namespaces are that were used last. If one is refused, the next call that
        names it is told why. Raises AioRpcError if the daemon does not answer."""
        for request in self.namespaces.last_registrations():
            try:
                await connection.stub.RegisterNamespace(request, timeout=self._connect_timeout_s)
            except grpc.aio.AioRpcError as error:
                if not is_answer(error):
                    raise
                logger.info("client=namespace_refused reason=%r", error.details())

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
        tasks = [task for task in (self._recovering, *self._background) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.retired.close()
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    def lost(self, connection: Connection) -> None:
        """The daemon is gone: refuse calls from now on and look for it in the background."""
        if self._connection is not connection or self._closed:
            return
        logger.warning("client=disconnected target=%s", self.target)
        self._connection = None
        self.retired.add(connection)
        self._breaker.trip()
        self._recover()

    def ended(self, connection: Connection) -> None:
        """The session has ended: open the next one before anybody asks."""
        if not self._closed:
            self._start(self._renew(connection))

    def releasing(self, lease_ids: Sequence[int]) -> None:
        """Note that leases are being released: nothing is left to be done for them later."""
        self.retired.settled(*lease_ids)
        if self._connection is not None:
            self._connection.unreleased.discard(lease_ids)

    def release_later(self, lease_ids: Sequence[int]) -> None:
        """Release leases as soon as the daemon answers, unless their session has ended by then."""
        if self._connection is None or self._closed:
            return
        self._connection.unreleased.add(lease_ids)
        if self._breaker.closed:
            self._start(self._release(self._connection))

    async def _release(self, connection: Connection) -> None:
        """Send the releases that could not be sent."""
        try:
            count = await connection.send_releases(self._timeout_s)
        except grpc.aio.AioRpcError as error:
            self._judge(connection, error)
        except KVStoreError as error:
            logger.info("releases=failed reason=%r", str(error))
        else:
            logger.info("releases=sent leases=%d", count)

    def _answered(self, connection: Connection) -> None:
        """Note that the daemon answers on this connection."""
        if connection is not self._connection:
            return
        self._breaker.success()
        if connection.unreleased:
            self._start(self._release(connection))

    def _judge(self, connection: Connection, error: grpc.aio.AioRpcError) -> None:
        """Learn from a failed call whether the daemon is gone."""
        if is_answer(error):
            self._answered(connection)
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
            self._answered(connection)

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
        self.retired.add(stale)

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
        self.retired.add(old)

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
            await self._tell_last(connection)
            if self._closed:
                raise InvalidRequest("this client is closed")
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

    def _recover(self) -> None:
        if not self._closed and (self._recovering is None or self._recovering.done()):
            self._recovering = asyncio.create_task(self._probe())

    async def _probe(self) -> None:
        """Try to connect until it works, with growing pauses."""
        while not self._breaker.closed:
            await asyncio.sleep(self._breaker.retry_after_s)
            async with self._connecting:
                if self._connection is not None:  # a ping of it says what is next
                    return
                try:
                    await self._open()
                except KVStoreError as error:
                    logger.debug("client=probe_failed reason=%r", str(error))
                    self._breaker.probe_failed()
                except Exception:  # for example no descriptor or thread is left: that may pass
                    logger.warning("client=probe_failed", exc_info=True)
                    self._breaker.probe_failed()
