"""The asyncio client. It reconnects to its daemon in the background.

`AsyncClient` is a facade; its parts can be read alone:

    session    namespaces, and leases of the arena     (session.py; the client is one)
    bulk       put and get: in place, or as streams    (bulk.py, in_place.py, streams.py)
    hints      what the next requests will be          (hints.py)
    admin      statistics, settings, deletions, scans  (admin.py)
    caller     one call: deadline, breaker, connection (caller.py)

A client on a unix socket of its own user maps the arena and copies records in place. All others
stream them. While the daemon is away, every call raises Unavailable at once: see `Breaker`.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

from kvstore.client.admin import Admin
from kvstore.client.bulk import Bulk
from kvstore.client.caller import Caller
from kvstore.client.copying import COPY_THREADS
from kvstore.client.credentials import client_credentials
from kvstore.client.hints import Hints
from kvstore.client.lookup_lease import Lookup, LookupLease
from kvstore.client.pieces import Pieces
from kvstore.client.session import Session
from kvstore.client.target import default_target
from kvstore.model.block import BlockKey, Buffer, Committed, NamespaceId, Part
from kvstore.model.tokens import BlockTokens
from kvstore.transport.unix_sockets import target_of


class AsyncClient(Session):
    """The client of one engine process, for one event loop.

    hints: what the caller knows about its next requests. admin: what operators ask of a daemon.

    target: "unix:/run/kvstore/kvstore.sock", a path such as "./kvstore.sock", or "127.0.0.1:7700"
    where `server.listen` is set. None: the environment variable KVSTORE_TARGET, or else the first
    default socket that this user may use now.
    token: shared by all processes of one engine, 16 to 128 characters. None: a random one.
    name: for the daemon's log. timeout_s: deadline of a call, in addition to its `wait_s`.
    arena: map the daemon's memory; default: whenever the target is a unix socket.
    daemon_uid: the user that runs the daemon. Without it, the client trusts only a daemon of its
    own user or of root, because the daemon's bytes go into the engine.
    token_file, tls_ca, tls_cert, tls_key: for TCP: paths of a token, of the authorities of the
    daemon's certificate, and of this client's own certificate and key; read again when they change.
    server_name: the name in the daemon's certificate, if it is not the target's. A token is sent
    over TLS only. A unix socket needs none of them, and ignores them.
    engines: HOST:PORT where the engine of this client answers: see `Origin`.
    copy_threads: that copy records to and from the arena, and sum them up, at once.
    """

    def __init__(
        self,
        target: str | None = None,
        *,
        token: str | None = None,
        name: str = "",
        timeout_s: float = 5.0,
        connect_timeout_s: float = 2.0,
        arena: bool | None = None,
        daemon_uid: int | None = None,
        token_file: str | Path | None = None,
        tls_ca: str | Path | None = None,
        tls_cert: str | Path | None = None,
        tls_key: str | Path | None = None,
        server_name: str = "",
        engines: Sequence[str] = (),
        copy_threads: int = COPY_THREADS,
    ) -> None:
        target = default_target(daemon_uid) if target is None else target_of(target)
        wants_arena = target.startswith("unix:") if arena is None else arena
        caller = Caller(
            target,
            token=(token or secrets.token_hex(16)) if wants_arena else "",
            name=name,
            timeout_s=timeout_s,
            connect_timeout_s=connect_timeout_s,
            daemon_uid=daemon_uid,
            credentials=client_credentials(
                target,
                token_file=token_file,
                tls_ca=tls_ca,
                tls_cert=tls_cert,
                tls_key=tls_key,
                server_name=server_name,
            ),
            engines=engines,
        )
        super().__init__(caller)
        self.hints = Hints(caller)
        self.admin = Admin(caller)
        self._bulk = Bulk(self, self.admin, caller, copy_threads)

    @property
    def batch_keys_max(self) -> int:
        """How many keys the daemon takes in one call; 8192 while it has not said."""
        return self._caller.batch_keys_max

    @property
    def corrupt_blocks(self) -> int:
        """Blocks that `get` dropped because their bytes did not match their checksum."""
        return self._bulk.corrupt_blocks

    async def settled(self) -> None:
        """Wait until nothing writes to a target of a `get_into` that has failed: as long as a disk
        holds a read. Only then is the caller's memory its own again."""
        await self._bulk.settled()

    async def close(self) -> None:
        """End the session and release all leases. Views that were taken stay valid."""
        await self._caller.close()
        self._bulk.close()

    async def put(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        records: Sequence[Buffer | Pieces],
        *,
        group: int = 0,
        shard: int = 0,
        first_block: int = 0,
        parent: BlockKey | None = None,
        durable: bool = False,
        wait_s: float = 2.0,
        tokens: BlockTokens | None = None,
    ) -> Committed:
        """Store one part of consecutive blocks. Over the arena, the records of a namespace where
        they vary may have sizes of their own. A record may be in several pieces: see `Pieces`.

        durable: answer when the records are synced to disk. A full store is not an error: the
        answer's `refused` counts the records that it did not take. wait_s: for room, in all the
        calls together that a large put is cut into. tokens: of all the keys; sent to a daemon that
        announces blocks to routers, and to no other.
        """
        return await self._bulk.put(
            namespace_id,
            keys,
            records,
            part=Part(group, shard),
            first_block=first_block,
            parent=parent,
            durable=durable,
            wait_s=wait_s,
            tokens=tokens,
        )

    async def get(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        *,
        group: int = 0,
        shard: int = 0,
        wait_s: float = 2.0,
    ) -> list[bytes | None]:
        """Return one part of each block, None for a miss. Every record returned was verified.

        wait_s: for what has to come up, in all the calls together that a large get is cut into.
        Reads the arena and the file tier only. The bucket finds blocks by their prefix: `acquire`.
        """
        return await self._bulk.get(namespace_id, keys, part=Part(group, shard), wait_s=wait_s)

    async def get_into(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        targets: Sequence[Buffer | Pieces],
        *,
        group: int = 0,
        shard: int = 0,
        wait_s: float = 2.0,
        verify: bool = True,
        from_files: bool = False,
        lease: LookupLease | None = None,
    ) -> list[bool]:
        """Read one part of each block into the caller's memory. True: that target was filled.

        targets: writable, one record each; of records that vary, one of another size than its
        target is a miss. Where the answer is False, the target's bytes are
        undefined. Faster than `get`, because reused memory needs no page faults.
        verify: check the copies. Without it, bytes that rotted in memory go unnoticed.
        from_files: read records that only the file tier has from the disk into the targets, past
        the arena. They are not promoted, so the next read is no faster. It needs a mapped arena,
        records stored as they were put, and targets of whole pages (4096 bytes); otherwise it
        changes nothing. Raises Unavailable if a disk does not answer a read: until that read ends,
        the disk may still write to the target.
        lease: that of a `look_up` of these blocks, or for some from the first on. It ends.
        """
        return await self._bulk.get_into(
            namespace_id,
            keys,
            targets,
            part=Part(group, shard),
            wait_s=wait_s,
            verify=verify,
            from_files=from_files,
            lease=lease,
        )

    async def look_up(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        *,
        group: int = 0,
        shard: int = 0,
        from_files: bool = False,
    ) -> Lookup:
        """Say of one part of each block whether it is stored, and lease those in the arena, from
        the first block on, for a `get_into` that follows within a second; else `give_back`.

        from_files: what only the file tier has is leased as well, as for `get_into`; else it begins
        to come up. All lookups of a client lease a quarter of the arena at most.
        """
        part = Part(group, shard)
        return await self._bulk.look_up(namespace_id, keys, part=part, from_files=from_files)

    async def give_back(self, lease: LookupLease) -> None:
        """End a lease that no `get_into` takes."""
        await self._bulk.give_back(lease)
