"""The hints and the administration of a blocking client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvstore.client.async_client import AsyncClient
from kvstore.client.loop_thread import LoopThread
from kvstore.decide.namespaces import NamespaceUse
from kvstore.model.block import BlockKey, NamespaceId
from kvstore.model.hint import HintReport, Prefix
from kvstore.model.outcome import Explanation, Outcome
from kvstore.model.tenant import Principal
from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.settings import Entry


class BlockingState:
    """What a blocking client knows without asking."""

    _client: AsyncClient

    @property
    def announces(self) -> bool:
        return self._client.announces

    @property
    def breaker_trips(self) -> int:
        return self._client.breaker_trips

    @property
    def corrupt_blocks(self) -> int:
        return self._client.corrupt_blocks


class BlockingHints:
    """Same methods and arguments as `Hints`, from any thread."""

    def __init__(self, thread: LoopThread) -> None:
        self._thread = thread

    def end_session(self, target: str | Prefix) -> HintReport:
        return self._thread.wait(lambda client: client.hints.end_session(target))

    def expect(self, target: str | Prefix, in_s: float) -> HintReport:
        return self._thread.wait(lambda client: client.hints.expect(target, in_s))

    def prefetch(self, target: str | Prefix, *, deadline_s: float = 5.0) -> HintReport:
        return self._thread.wait(
            lambda client: client.hints.prefetch(target, deadline_s=deadline_s)
        )

    def pin(
        self, target: str | Prefix, ttl_s: float, *, bytes_max: int = 0, deadline_s: float = 5.0
    ) -> HintReport:
        return self._thread.wait(
            lambda client: client.hints.pin(
                target, ttl_s, bytes_max=bytes_max, deadline_s=deadline_s
            )
        )

    def demote(self, target: str | Prefix, *, deadline_s: float = 5.0) -> HintReport:
        return self._thread.wait(lambda client: client.hints.demote(target, deadline_s=deadline_s))


class BlockingAdmin:
    """Same methods and arguments as `Admin`, from any thread."""

    def __init__(self, thread: LoopThread) -> None:
        self._thread = thread

    def ping(self) -> str:
        return self._thread.wait(lambda client: client.admin.ping())

    def whoami(self) -> Principal:
        return self._thread.wait(lambda client: client.admin.whoami())

    def delete(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        *,
        corrupt: bool = False,
        this_daemon_only: bool = False,
    ) -> int:
        return self._thread.wait(
            lambda client: client.admin.delete(
                namespace_id, keys, corrupt=corrupt, this_daemon_only=this_daemon_only
            )
        )

    def clear(
        self, namespace_id: NamespaceId | None = None, *, this_daemon_only: bool = False
    ) -> int:
        return self._thread.wait(
            lambda client: client.admin.clear(namespace_id, this_daemon_only=this_daemon_only)
        )

    def flush(self, wait_s: float = 30.0) -> bool:
        return self._thread.wait(lambda client: client.admin.flush(wait_s))

    def stats(self) -> dict[str, Any]:
        return self._thread.wait(lambda client: client.admin.stats())

    def settings(self) -> list[Entry]:
        return self._thread.wait(lambda client: client.admin.settings())

    def configure(
        self, assignments: Sequence[str], wait_s: float = 0.0
    ) -> tuple[list[tuple[str, str, str]], str]:
        return self._thread.wait(lambda client: client.admin.configure(assignments, wait_s))

    def add_tenant(self, name: str, assignments: Sequence[str] = ()) -> str:
        return self._thread.wait(lambda client: client.admin.add_tenant(name, assignments))

    def delete_tenant(self, name: str) -> tuple[int, str, str]:
        return self._thread.wait(lambda client: client.admin.delete_tenant(name))

    def log_lines(self, limit: int = 0) -> list[str]:
        return self._thread.wait(lambda client: client.admin.log_lines(limit))

    def namespaces(self) -> list[NamespaceUse]:
        return self._thread.wait(lambda client: client.admin.namespaces())

    def outcomes(self, request_id: str = "", *, limit: int = 100) -> list[Outcome]:
        return self._thread.wait(lambda client: client.admin.outcomes(request_id, limit=limit))

    def history(self, step_s: int = 1, *, since: float = 0.0) -> pb.HistoryReply:
        return self._thread.wait(lambda client: client.admin.history(step_s, since=since))

    def tree(
        self,
        namespace_id: NamespaceId | None = None,
        prefix: bytes = b"",
        *,
        through: bytes = b"",
        depth: int = 1,
        limit: int = 200,
        cursor: bytes = b"",
    ) -> pb.TreeReply:
        return self._thread.wait(
            lambda client: client.admin.tree(
                namespace_id, prefix, through=through, depth=depth, limit=limit, cursor=cursor
            )
        )

    def conversations(
        self, session_id: str = "", *, namespace_id: NamespaceId | None = None, limit: int = 100
    ) -> pb.ConversationsReply:
        return self._thread.wait(
            lambda client: client.admin.conversations(
                session_id, namespace_id=namespace_id, limit=limit
            )
        )

    def slow(
        self, kind: str = "", *, over_s: float = 0.0, limit: int = 0, reset: bool = False
    ) -> pb.SlowReply:
        return self._thread.wait(
            lambda client: client.admin.slow(kind, over_s=over_s, limit=limit, reset=reset)
        )

    def explain(self, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> Explanation:
        return self._thread.wait(lambda client: client.admin.explain(namespace_id, keys))

    def scan(
        self, namespace_id: NamespaceId | None = None, *, limit: int | None = None
    ) -> list[pb.ScanItem]:
        """Return the stored blocks as a list."""

        async def collect(client: AsyncClient) -> list[pb.ScanItem]:
            return [item async for item in client.admin.scan(namespace_id, limit=limit)]

        return self._thread.wait(collect)
