"""Put and get of whole records: in place where the arena is mapped, else as byte streams."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import cast

from kvstore.client.admin import Admin
from kvstore.client.batch import WINDOW_KEYS, Batch
from kvstore.client.caller import Caller
from kvstore.client.copying import Copiers, Taken, Wanted
from kvstore.client.file_reads import are_pages
from kvstore.client.in_place import InPlace
from kvstore.client.lookup_lease import Lookup, LookupLease
from kvstore.client.pieces import Memory, Pieces, nbytes_of
from kvstore.client.session import Session
from kvstore.client.streams import Streams
from kvstore.model.block import BlockKey, Buffer, Committed, NamespaceId, Part, Span, check_keys
from kvstore.model.errors import InvalidRequest, KVStoreError, SessionEnded
from kvstore.model.tokens import TOKEN_NBYTES, TOKENS_NBYTES_MAX, BlockTokens
from kvstore.system.patience import Patience

logger = logging.getLogger(__name__)

STREAM_WINDOW_NBYTES = 64 << 20
LEASED_WINDOW_NBYTES = 256 << 20
FIRST_PUT_NBYTES = 32 << 20  # written behind while the rest is copied
SIZES_MAX = 1024  # namespaces whose records' size is remembered


class Bulk:
    """Moves records for one client."""

    def __init__(self, session: Session, admin: Admin, caller: Caller, copy_threads: int) -> None:
        self.corrupt_blocks = 0
        self._session = session
        self._admin = admin
        self._caller = caller
        self._copiers = Copiers(copy_threads)
        self._in_place = InPlace(session, self._copiers)
        self._streams = Streams(caller, self._copiers)
        self._lookup_nbytes = 0  # leased by lookups that no load has followed yet
        self._record_nbytes: dict[NamespaceId, int] = {}  # as it was at the last lookup

    async def settled(self) -> None:
        await self._in_place.settled()

    def close(self) -> None:
        self._in_place.close()
        self._copiers.close()

    async def put(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        records: Sequence[Buffer | Pieces],
        *,
        part: Part,
        first_block: int,
        parent: BlockKey | None,
        durable: bool,
        wait_s: float,
        tokens: BlockTokens | None,
    ) -> Committed:
        check_keys([parent] if parent else [])
        batch = replace(
            self._batch(namespace_id, keys, part, records), first_block=first_block, parent=parent
        )
        views = batch.flat(records)
        await self._connect(batch)
        batch = replace(batch, tokens=self._announced(batch, tokens), keys_max=self._window_keys)
        committed = existing = refused = 0
        safe, patience = durable, Patience(wait_s)
        for where, window in self._put_windows(batch, durable=durable):
            done = await self._put_window(window, views[where], durable, patience)
            committed += done.committed
            existing += done.existing
            refused += done.refused
            safe = safe and done.durable
        return Committed(committed, existing, refused, safe)

    async def get(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        *,
        part: Part,
        wait_s: float,
    ) -> list[bytes | None]:
        batch = self._batch(namespace_id, keys, part)
        taken = await self._taken(batch, wait_s, Wanted([None] * len(keys)))
        return [cast("bytes | None", record) for record, _ in taken]

    async def get_into(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        targets: Sequence[Buffer | Pieces],
        *,
        part: Part,
        wait_s: float,
        verify: bool,
        from_files: bool,
        lease: LookupLease | None = None,
    ) -> list[bool]:
        try:
            batch = self._batch(namespace_id, keys, part, targets)
            views = batch.flat(targets)
            if any(view.readonly for view in views):
                raise InvalidRequest("a target cannot be written to")
        except InvalidRequest:
            if lease is not None:
                await self.give_back(lease)
            raise
        direct = from_files and all(isinstance(v, memoryview) and are_pages(v) for v in views)
        wanted = Wanted(views, verify, direct)
        taken = await self._taken(batch, wait_s, wanted, lease)
        return [record is not None for record, _ in taken]

    async def look_up(
        self, namespace_id: NamespaceId, keys: Sequence[BlockKey], *, part: Part, from_files: bool
    ) -> Lookup:
        """All lookups together lease a window at most."""
        check_keys(keys)
        await self._session.connect()
        known = self._record_nbytes.get(namespace_id)
        nbytes = known or self._session.namespace(namespace_id).record_nbytes(part)
        room = (self._window_nbytes - self._lookup_nbytes) // nbytes if self._session.local else 0
        count = max(0, min(len(keys), self._window_keys, room))
        batch = Batch(namespace_id, keys[:count], part, nbytes)
        found, lease = await self._leased(batch, from_files) if count else Lookup([], None)
        most = self._caller.batch_keys_max
        try:
            for at in range(count, len(keys), most):
                some = keys[at : at + most]
                spans = (Span(part, 0, len(some)),)
                others = await self._session.match(namespace_id, some, each=True, spans=spans)
                found += others.present
        except BaseException:
            if lease is not None:
                await self.give_back(lease)
            raise
        return Lookup(found, lease)

    async def _leased(self, batch: Batch, from_files: bool) -> Lookup:
        lease = None
        self._lookup_nbytes += batch.nbytes
        try:
            found, lease = await self._in_place.look_up(batch, from_files=from_files)
        finally:
            if lease is None:
                self._lookup_nbytes -= batch.nbytes
        if lease is not None:
            if len(self._record_nbytes) >= SIZES_MAX:
                self._record_nbytes.clear()
            self._record_nbytes[batch.namespace_id] = lease.record_nbytes
        return Lookup(found, lease)

    async def give_back(self, lease: LookupLease) -> None:
        self._lookup_nbytes -= lease.nbytes
        await self._in_place.give_back(lease)

    async def _connect(self, batch: Batch) -> None:
        """Raise InvalidRequest for what cannot be moved over this connection."""
        await self._session.connect()
        if batch.sizes and not self._session.local:
            raise InvalidRequest(
                f"records with sizes of their own need the daemon's arena, which "
                f"{self._session.target} does not give: connect to its unix socket"
            )

    def _announced(self, batch: Batch, tokens: BlockTokens | None) -> BlockTokens | None:
        """Return the tokens that go with a put: none to a daemon that announces nothing. Raises
        InvalidRequest."""
        if tokens is None:
            return None
        nbytes = TOKEN_NBYTES * self._session.namespace(batch.namespace_id).block_tokens
        if len(tokens.packed) != nbytes * len(batch.keys):
            raise InvalidRequest(
                f"{len(tokens.packed)} bytes of tokens for {len(batch.keys)} blocks: give {nbytes} "
                "bytes for each block"
            )
        is_wanted = self._session.announces and batch.keys and nbytes <= TOKENS_NBYTES_MAX
        return tokens if is_wanted else None

    async def _taken(
        self, batch: Batch, wait_s: float, wanted: Wanted, lease: LookupLease | None = None
    ) -> list[Taken]:
        if lease is not None:
            self._lookup_nbytes -= lease.nbytes
        try:
            await self._connect(batch)
        except BaseException:
            if lease is not None:
                await self._in_place.give_back(lease)
            raise
        batch = replace(batch, keys_max=self._window_keys)
        if self._session.local:
            taken = await self._in_place.take(batch, self._window_nbytes, wait_s, wanted, lease)
        else:
            patience = Patience(wait_s)
            taken = await self._streams.take(batch, self._window_nbytes, patience, wanted)
        await self._report(batch, taken)
        return taken

    async def _put_window(
        self, batch: Batch, records: Sequence[Memory], durable: bool, patience: Patience
    ) -> Committed:
        for last in (False, True):
            try:
                return await self._mover.put(batch, records, durable, patience)
            except SessionEnded:  # putting again is harmless: what is stored already stays
                if last:
                    raise
        raise AssertionError("the last round returns or raises")

    @property
    def _mover(self) -> InPlace | Streams:
        return self._in_place if self._session.local else self._streams

    @property
    def _window_keys(self) -> int:
        return min(WINDOW_KEYS, self._caller.batch_keys_max)

    @property
    def _window_nbytes(self) -> int:
        """How much to move at once: at most a quarter of a mapped arena, half of what it leases."""
        if not self._session.local:
            return STREAM_WINDOW_NBYTES
        mapped = self._session.arena_nbytes
        return min(LEASED_WINDOW_NBYTES, mapped // 4) if mapped else STREAM_WINDOW_NBYTES

    def _put_windows(self, batch: Batch, *, durable: bool) -> Iterator[tuple[slice, Batch]]:
        """Cut into what is put at once: beside a sealed arena, half of what may be written into.
        What need not be durable is put piece by piece there, and begins as soon."""
        staging_nbytes = self._session.staging_nbytes
        if staging_nbytes and not durable:
            return batch.windows(LEASED_WINDOW_NBYTES)
        nbytes = min(self._window_nbytes, staging_nbytes // 2 or self._window_nbytes)
        return batch.windows(nbytes, FIRST_PUT_NBYTES)

    def _batch(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        part: Part,
        buffers: Sequence[Buffer | Pieces] = (),
    ) -> Batch:
        """buffers: of the records, which say how long each is, where the namespace does not."""
        check_keys(keys)
        namespace = self._session.namespace(namespace_id)
        most = namespace.record_nbytes(part)
        if not namespace.groups[part.group].varies or namespace.fine or not buffers:
            return Batch(namespace_id, keys, part, namespace.fixed_nbytes(part))
        sizes = tuple(map(nbytes_of, buffers))
        if len(sizes) == len(keys):  # else `flat` says what is wrong
            namespace.check_sizes([Span(part, 0, len(keys))], sizes)
        return Batch(namespace_id, keys, part, max(1, min(most, max(sizes))), sizes=sizes)

    async def _report(self, batch: Batch, taken: Sequence[Taken]) -> None:
        """Have the daemon drop blocks whose bytes are wrong, so that they can be put again."""
        corrupt = [key for key, (_, wrong) in zip(batch.keys, taken, strict=True) if wrong]
        self.corrupt_blocks += len(corrupt)
        for start in range(0, len(corrupt), batch.keys_max):
            some = corrupt[start : start + batch.keys_max]
            logger.error("corrupt_blocks=%d first=%s", len(some), some[0][:4].hex())
            try:
                await self._admin.delete(batch.namespace_id, some, corrupt=True)
            except KVStoreError as error:
                logger.warning("corrupt_blocks=kept reason=%r", str(error))
