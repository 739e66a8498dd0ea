"""The blocking client: an AsyncClient on a loop thread of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from kvstore.client.async_client import AsyncClient
from kvstore.decide.namespaces import NamespaceUse
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
from kvstore.model.errors import InvalidRequest
from kvstore.model.hint import HintReport, Prefix
from kvstore.model.outcome import Explanation, Outcome
from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.settings import Entry
from kvstore.system.scheduling import run_promptly

T = TypeVar("T")

CLOSE_TIMEOUT_S = 5.0


class Client:
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
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="kvstore-client", daemon=True)
        self._thread.start()
        self._client: AsyncClient = self._wait(
            self._make(
                target,
                token=token,
                name=name,
                timeout_s=timeout_s,
                connect_timeout_s=connect_timeout_s,
                arena=arena,
                daemon_uid=daemon_uid,
            )
        )
        self._closed = False

    def submit(self, make: Callable[[AsyncClient], Awaitable[T]]) -> concurrent.futures.Future[T]:
        """Run `make(client)` on the client's loop. Never blocks: for the engine's own threads.

        Raises InvalidRequest after `close`.
        """
        if self._closed:
            raise InvalidRequest("this client is closed")

        async def run() -> T:
            return await make(self._client)

        return asyncio.run_coroutine_threadsafe(run(), self._loop)

    @property
    def target(self) -> str:
        return self._client.target

    @property
    def available(self) -> bool:
        return self._client.available

    @property
    def breaker_trips(self) -> int:
        return self._client.breaker_trips

    @property
    def local(self) -> bool:
        return self._client.local

    @property
    def instance(self) -> str:
        return self._client.instance

    @property
    def corrupt_blocks(self) -> int:
        return self._client.corrupt_blocks

    def connect(self) -> None:
        self.submit(lambda client: client.connect()).result()

    def ping(self) -> str:
        return self.submit(lambda client: client.ping()).result()

    def register(self, namespace: Namespace) -> NamespaceId:
        return self.submit(lambda client: client.register(namespace)).result()

    def match(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        *,
        skip_blocks: int = 0,
        recompute_s_per_block: float = 0.0,
        timeout_s: float | None = None,
    ) -> Match:
        return self.submit(
            lambda client: client.match(
                namespace_id,
                keys,
                skip_blocks=skip_blocks,
                recompute_s_per_block=recompute_s_per_block,
                timeout_s=timeout_s,
            )
        ).result()

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
    ) -> Grant:
        return self.submit(
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
            )
        ).result()

    def release(self, *lease_ids: int) -> list[bool]:
        return self.submit(lambda client: client.release(*lease_ids)).result()

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
    ) -> Grant:
        return self.submit(
            lambda client: client.reserve(
                namespace_id,
                keys,
                first_block=first_block,
                parent=parent,
                spans=spans,
                wait_s=wait_s,
                session_id=session_id,
            )
        ).result()

    def commit(
        self, lease_id: int, checksums: Sequence[int], *, durable: bool = False
    ) -> Committed:
        return self.submit(
            lambda client: client.commit(lease_id, checksums, durable=durable)
        ).result()

    def view(self, slot: Slot) -> memoryview:
        return self._client.view(slot)

    def extents(self) -> dict[int, memoryview]:
        return self._client.extents()

    def put(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        records: Sequence[Buffer],
        *,
        group: int = 0,
        shard: int = 0,
        first_block: int = 0,
        parent: BlockKey | None = None,
        durable: bool = False,
        wait_s: float = 2.0,
    ) -> Committed:
        return self.submit(
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
            )
        ).result()

    def get(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        *,
        group: int = 0,
        shard: int = 0,
        wait_s: float = 2.0,
    ) -> list[bytes | None]:
        return self.submit(
            lambda client: client.get(namespace_id, keys, group=group, shard=shard, wait_s=wait_s)
        ).result()

    def get_into(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        targets: Sequence[Buffer],
        *,
        group: int = 0,
        shard: int = 0,
        wait_s: float = 2.0,
        verify: bool = True,
        from_files: bool = False,
    ) -> list[bool]:
        return self.submit(
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
        ).result()

    def end_session(self, target: str | Prefix) -> HintReport:
        return self.submit(lambda client: client.end_session(target)).result()

    def expect(self, target: str | Prefix, in_s: float) -> HintReport:
        return self.submit(lambda client: client.expect(target, in_s)).result()

    def prefetch(self, target: str | Prefix, *, deadline_s: float = 5.0) -> HintReport:
        return self.submit(lambda client: client.prefetch(target, deadline_s=deadline_s)).result()

    def pin(
        self, target: str | Prefix, ttl_s: float, *, bytes_max: int = 0, deadline_s: float = 5.0
    ) -> HintReport:
        return self.submit(
            lambda client: client.pin(target, ttl_s, bytes_max=bytes_max, deadline_s=deadline_s)
        ).result()

    def demote(self, target: str | Prefix, *, deadline_s: float = 5.0) -> HintReport:
        return self.submit(lambda client: client.demote(target, deadline_s=deadline_s)).result()

    def delete(
        self, namespace_id: NamespaceId, keys: Sequence[BlockKey], *, corrupt: bool = False
    ) -> int:
        return self.submit(
            lambda client: client.delete(namespace_id, keys, corrupt=corrupt)
        ).result()

    def clear(self, namespace_id: NamespaceId | None = None) -> int:
        return self.submit(lambda client: client.clear(namespace_id)).result()

    def flush(self, wait_s: float = 30.0) -> bool:
        return self.submit(lambda client: client.flush(wait_s)).result()

    def stats(self) -> dict[str, Any]:
        return self.submit(lambda client: client.stats()).result()

    def settings(self) -> list[Entry]:
        return self.submit(lambda client: client.settings()).result()

    def configure(
        self, assignments: Sequence[str], wait_s: float = 0.0
    ) -> tuple[list[tuple[str, str, str]], str]:
        return self.submit(lambda client: client.configure(assignments, wait_s)).result()

    def log_lines(self, limit: int = 0) -> list[str]:
        return self.submit(lambda client: client.log_lines(limit)).result()

    def namespaces(self) -> list[NamespaceUse]:
        return self.submit(lambda client: client.namespaces()).result()

    def outcomes(self, request_id: str = "", *, limit: int = 100) -> list[Outcome]:
        return self.submit(lambda client: client.outcomes(request_id, limit=limit)).result()

    def explain(self, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> Explanation:
        return self.submit(lambda client: client.explain(namespace_id, keys)).result()

    def scan(
        self, namespace_id: NamespaceId | None = None, *, limit: int | None = None
    ) -> list[pb.ScanItem]:
        """Return the stored blocks in key order, as a list."""

        async def collect(client: AsyncClient) -> list[pb.ScanItem]:
            return [item async for item in client.scan(namespace_id, limit=limit)]

        return self.submit(collect).result()

    def close(self) -> None:
        """End the session and the loop thread. A second call does nothing."""
        if self._closed:
            return
        closing = self.submit(lambda client: client.close())
        self._closed = True
        try:
            closing.result(CLOSE_TIMEOUT_S)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def _make(self, target: str | None, **options: Any) -> AsyncClient:
        return AsyncClient(target, **options)

    def _wait(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        run_promptly()
        try:
            self._loop.run_forever()
        finally:
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()
