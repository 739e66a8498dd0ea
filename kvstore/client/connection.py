"""One channel, session and arena of one life of a daemon. A reconnect makes a new one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol, cast

import grpc
import grpc.aio

from kvstore.client.arena import ClientArena
from kvstore.client.calls import CallStub
from kvstore.client.credentials import (
    NO_CREDENTIALS,
    AuthorizedChannel,
    ClientCredentials,
    TokenReader,
)
from kvstore.client.trust import check_socket
from kvstore.client.unreleased import UNRELEASED_MAX, Unreleased
from kvstore.model.errors import SessionEnded, Unavailable
from kvstore.rpc import RPC_VERSION
from kvstore.rpc.status import error_of
from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.rpc.v1 import kvstore_pb2_grpc as rpc
from kvstore.transport.arena_wire import Hello
from kvstore.transport.messages import MESSAGE_NBYTES_MAX
from kvstore.transport.unix_sockets import arena_socket_path, call_socket_path, socket_path

logger = logging.getLogger(__name__)

_OPTIONS: Final = (
    ("grpc.enable_http_proxy", 0),
    # A channel of its own each time: shared ones would wait out the backoff of the dead daemon.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", MESSAGE_NBYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_NBYTES_MAX),
)


class Watcher(Protocol):
    """Is told what the arena link learns."""

    def lost(self, connection: Connection) -> None:
        """The daemon is gone."""

    def ended(self, connection: Connection) -> None:
        """The session has ended; the daemon lives."""


class Daemon(NamedTuple):
    """What a daemon says of itself. instance: changes at a restart. node: its id in its fleet, ""
    without one. announces: it wants the tokens of blocks, to tell routers of them."""

    instance: str = ""
    node: str = ""
    announces: bool = False


NO_DAEMON = Daemon()


class Connection:
    """What a client has while a daemon lives. `session` is 0 and `arena` None without a token."""

    def __init__(self, target: str, daemon_uid: int | None, credentials: ClientCredentials) -> None:
        """Raises Unauthorized if a file of the credentials is no use."""
        self._socket = socket_path(target)
        self._daemon_uid = daemon_uid
        self.channel = _channel(target, credentials)
        stubs: Any = self.channel
        if credentials.token_file is not None:
            stubs = AuthorizedChannel(self.channel, TokenReader(credentials.token_file))
        self.stub: rpc.KVStoreAsyncStub = rpc.KVStoreStub(stubs)
        self.session = 0
        self.daemon = NO_DAEMON
        self._engines: Sequence[str] = ()
        self.batch_keys_max = 0
        self.arena: ClientArena | None = None
        self.unreleased = Unreleased()
        self._calls: CallStub | None = None

    @classmethod
    async def open(
        cls,
        target: str,
        *,
        token: str,
        name: str,
        timeout_s: float,
        watcher: Watcher,
        daemon_uid: int | None = None,
        credentials: ClientCredentials = NO_CREDENTIALS,
        engines: Sequence[str] = (),
    ) -> Connection:
        """Connect, open the session of `token` and map the arena; without one, only connect.

        daemon_uid: the user of the daemon, if it is neither this one nor root. credentials: for
        TCP. engines: HOST:PORT where the engine answers. Raises Unavailable, Unauthorized,
        Incompatible or InvalidRequest.
        """
        connection = cls(target, daemon_uid, credentials)
        connection._engines = engines
        try:
            async with asyncio.timeout(timeout_s):
                await connection._open(token, name, timeout_s, watcher)
        except TimeoutError as error:
            await connection.close()
            raise Unavailable(f"no kvstore daemon answers at {target} in {timeout_s} s") from error
        except grpc.aio.AioRpcError as error:
            await connection.close()
            raise error_of(error, target) from error
        except BaseException:
            await connection.close()
            raise
        return connection

    async def _open(self, token: str, name: str, timeout_s: float, watcher: Watcher) -> None:
        if self._socket is not None:
            check_socket(self._socket, self._daemon_uid)
        request = pb.OpenSessionRequest(rpc_version=RPC_VERSION, token=token, client=name)
        request.engines.extend(self._engines)
        # The session may end between the two steps, when another process of it dies: once more.
        for last in (False, True):
            reply = await self.stub.OpenSession(request, timeout=timeout_s)
            self.session = reply.session
            self.batch_keys_max = reply.batch_keys_max
            self.daemon = Daemon(reply.instance, reply.node, reply.announces)
            if not token:
                return
            hello = Hello(RPC_VERSION, reply.session, token)
            arena, calls = self._beside(reply)
            try:
                self.arena = await ClientArena.join(
                    arena,
                    hello,
                    timeout_s,
                    daemon_uid=self._daemon_uid,
                    on_lost=lambda: watcher.lost(self),
                    on_ended=lambda: watcher.ended(self),
                )
                await self._use_call_socket(calls, timeout_s)
                return
            except SessionEnded:
                if last:
                    raise

    def _beside(self, reply: pb.OpenSessionReply) -> tuple[str, str]:
        """Return the paths of the arena and call sockets, which lie beside the daemon's.

        The daemon's own paths may be others here, where its directory is mounted elsewhere. They
        count for a client over TCP, which has none.
        """
        if self._socket is None:
            return reply.arena_socket, reply.call_socket
        calls = str(call_socket_path(self._socket)) if reply.call_socket else ""
        return str(arena_socket_path(self._socket)), calls

    async def _use_call_socket(self, path: str, timeout_s: float) -> None:
        """Make the hot calls past gRPC, if the daemon can. Raises Unavailable."""
        if not path:
            return
        try:
            async with asyncio.timeout(timeout_s):
                self._calls = await CallStub.connect(path, self.stub, self._daemon_uid)
        except (OSError, TimeoutError) as error:
            raise Unavailable(f"cannot call the daemon at {path}: {error!r}") from error
        self.stub = cast("rpc.KVStoreAsyncStub", self._calls)

    async def ping(self, timeout_s: float) -> None:
        """Make the smallest call. Raises AioRpcError."""
        await self.stub.OpenSession(
            pb.OpenSessionRequest(rpc_version=RPC_VERSION), timeout=timeout_s
        )

    async def send_releases(self, timeout_s: float) -> int:
        """Release what could not be released before, each call of it within `timeout_s`; return
        how many leases. Raises AioRpcError if the daemon does not answer."""
        most = self.batch_keys_max or UNRELEASED_MAX
        return await self.unreleased.send(self.stub, self.session, timeout_s=timeout_s, most=most)

    @property
    def viewed(self) -> bool:
        """Whether anybody has a view of the arena. Only for a connection that is used no more."""
        return self.arena is not None and self.arena.viewed()

    async def close(self) -> None:
        """Close the channel and end the session, whoever cancels it meanwhile."""
        try:
            with contextlib.suppress(grpc.aio.BaseError):
                await self.channel.close()
        finally:
            if self._calls is not None:
                self._calls.close()
            if self.arena is not None:
                await self.arena.close()


def _channel(target: str, credentials: ClientCredentials) -> grpc.aio.Channel:
    if not credentials.uses_tls:
        return grpc.aio.insecure_channel(target, options=_OPTIONS)
    name = credentials.server_name
    named = (("grpc.ssl_target_name_override", name),) if name else ()
    return grpc.aio.secure_channel(
        target, credentials.channel_credentials(), options=(*_OPTIONS, *named)
    )
