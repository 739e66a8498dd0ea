"""The blocking client: an AsyncClient on a loop thread of its own."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from kvstore.client.async_client import AsyncClient
from kvstore.client.blocking_parts import BlockingAdmin, BlockingHints, BlockingState
from kvstore.client.copying import COPY_THREADS
from kvstore.client.loop_thread import LoopThread, Work
from kvstore.client.pieces import Pieces
from kvstore.model.block import (
    BlockKey,
    Buffer,
    Committed,
    Grant,
    Match,
    Namespace,
    NamespaceId,
    Slot,
    Span,
)
from kvstore.model.member import Origin
from kvstore.model.tokens import BlockTokens

T = TypeVar("T")


class Client(BlockingState):
    """Same methods and arguments as AsyncClient, from any thread. `with Client(target) as client`.

    Do not carry one across a fork: make it in the process that uses it.
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
        self._thread = LoopThread(
            lambda: AsyncClient(
                target,
                token=token,
                name=name,
                timeout_s=timeout_s,
                connect_timeout_s=connect_timeout_s,
                arena=arena,
                daemon_uid=daemon_uid,
                token_file=token_file,
                tls_ca=tls_ca,
                tls_cert=tls_cert,
                tls_key=tls_key,
                server_name=server_name,
                engines=engines,
                copy_threads=copy_threads,
            )
        )
        self._client = self._thread.client
        self.hints = BlockingHints(self._thread)
        self.admin = BlockingAdmin(self._thread)

    def submit(self, work: Work[T]) -> concurrent.futures.Future[T]:
        """Start `work(client)` on the client's loop; never blocks, for the engine's own threads.

        Raises InvalidRequest after `close`.
        """
        return self._thread.submit(work)

    @property
    def target(self) -> str:
        return self._client.target

    @property
    def available(self) -> bool:
        return self._client.available

    @property
    def local(self) -> bool:
        return self._client.local

    @property
    def instance(self) -> str:
        return self._client.instance

    @property
    def batch_keys_max(self) -> int:
        return self._client.batch_keys_max

    def connect(self) -> None:
        self._thread.wait(lambda client: client.connect())

    def register(self, namespace: Namespace, *, now: bool = True) -> NamespaceId:
        return self._thread.wait(lambda client: client.register(namespace, now=now))

    def match(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        *,
        skip_blocks: int = 0,
        recompute_s_per_block: float = 0.0,
        refined: bool = False,
        fleet: bool = False,
        each: bool = False,
        spans: Sequence[Span] = (),
        timeout_s: float | None = None,
    ) -> Match:
        return self._thread.wait(
            lambda client: client.match(
                namespace_id,
                keys,
                skip_blocks=skip_blocks,
                recompute_s_per_block=recompute_s_per_block,
                refined=refined,
                fleet=fleet,
                each=each,
                spans=spans,
                timeout_s=timeout_s,
            )
        )

    def acquire(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        *,
        skip_blocks: int = 0,
        readers: int = 1,
        wait_s: float = 0.0,
        spans: Sequence[Span] | None = None,
        request_id: str = "",
        recompute_s_per_block: float = 0.0,
        session_id: str = "",
        file_places: bool = False,
        refined: bool = False,
        origin: Origin | None = None,
        early: bool = False,
        tokens: BlockTokens | None = None,
    ) -> Grant:
        return self._thread.wait(
            lambda client: client.acquire(
                namespace_id,
                keys,
                skip_blocks=skip_blocks,
                readers=readers,
                wait_s=wait_s,
                spans=spans,
                request_id=request_id,
                recompute_s_per_block=recompute_s_per_block,
                session_id=session_id,
                file_places=file_places,
                refined=refined,
                origin=origin,
                early=early,
                tokens=tokens,
            )
        )

    def release(self, *lease_ids: int) -> list[bool]:
        return self._thread.wait(lambda client: client.release(*lease_ids))

    def reserve(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        *,
        first_block: int,
        parent: BlockKey | None,
        spans: Sequence[Span],
        wait_s: float = 0.0,
        session_id: str = "",
        sizes: Sequence[int] = (),
        refined: bool = False,
        tokens: BlockTokens | None = None,
    ) -> Grant:
        return self._thread.wait(
            lambda client: client.reserve(
                namespace_id,
                keys,
                first_block=first_block,
                parent=parent,
                spans=spans,
                wait_s=wait_s,
                session_id=session_id,
                sizes=sizes,
                refined=refined,
                tokens=tokens,
            )
        )

    def commit(
        self, lease_id: int, checksums: Sequence[int], *, durable: bool = False
    ) -> Committed:
        return self._thread.wait(lambda client: client.commit(lease_id, checksums, durable=durable))

    def view(self, slot: Slot) -> memoryview:
        return self._client.view(slot)

    def extents(self) -> dict[int, memoryview]:
        return self._client.extents()

    def put(
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
        return self._thread.wait(
            lambda client: client.put(
                namespace_id,
                keys,
                records,
                group=group,
                shard=shard,
                first_block=first_block,
                parent=parent,
                durable=durable,
                wait_s=wait_s,
                tokens=tokens,
            )
        )

    def get(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        *,
        group: int = 0,
        shard: int = 0,
        wait_s: float = 2.0,
    ) -> list[bytes | None]:
        return self._thread.wait(
            lambda client: client.get(namespace_id, keys, group=group, shard=shard, wait_s=wait_s)
        )

    def get_into(
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
    ) -> list[bool]:
        return self._thread.wait(
            lambda client: client.get_into(
                namespace_id,
                keys,
                targets,
                group=group,
                shard=shard,
                wait_s=wait_s,
                verify=verify,
                from_files=from_files,
            )
        )

    def close(self) -> None:
        """End the session and the loop's thread. A second call does nothing."""
        self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
