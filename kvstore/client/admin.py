"""Administration of a daemon: what operators and tools ask of it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from kvstore.client.caller import Call
from kvstore.client.looking import Looking
from kvstore.client.recording import record
from kvstore.decide.namespaces import NamespaceUse
from kvstore.model.block import BlockKey, Namespace, NamespaceId
from kvstore.model.outcome import Explanation, Outcome
from kvstore.model.tenant import Principal, role_of
from kvstore.rpc import RPC_VERSION
from kvstore.rpc.v1 import kvstore_pb2 as pb
from kvstore.settings import Entry
from kvstore.transport.explain_messages import explanation_of, outcome_of

SCAN_PAGE_ITEMS = 1000


TENANT_S = 90.0  # for a tenant to come or go


class Admin(Looking):
    """Looks into a daemon, changes its settings, deletes blocks."""

    async def ping(self) -> str:
        """Make the smallest call there is; return the daemon's release."""
        request = pb.OpenSessionRequest(rpc_version=RPC_VERSION)
        reply = await self._caller.call(lambda stub, _, t: stub.OpenSession(request, timeout=t))
        return reply.server_version

    async def whoami(self) -> Principal:
        """Return who this client is to the daemon: its tenant, name and role."""
        request = pb.WhoAmIRequest()
        reply = await self._caller.call(lambda stub, _, t: stub.WhoAmI(request, timeout=t))
        return Principal(reply.tenant, reply.name, role_of(reply.role))

    async def delete(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        *,
        corrupt: bool = False,
        this_daemon_only: bool = False,
    ) -> int:
        """Delete blocks from all tiers, and from all daemons of the fleet; return how many this
        daemon had. Raises Unavailable if some daemon did not confirm.

        corrupt: the caller read wrong bytes. The daemon verifies its own copies and drops the wrong
        ones; the answer counts the blocks that had one.
        """
        request = pb.DeleteRequest(
            namespace_id=namespace_id,
            keys=self._caller.joined(keys),
            corrupt=corrupt,
            this_daemon_only=this_daemon_only,
        )
        reply = await self._caller.call(
            lambda stub, _, t: stub.Delete(request, timeout=t), namespace_id=namespace_id
        )
        return reply.deleted

    async def clear(
        self, namespace_id: NamespaceId | None = None, *, this_daemon_only: bool = False
    ) -> int:
        """The same for every block of a namespace, or of all."""
        request = pb.ClearRequest(
            namespace_id=namespace_id or b"", this_daemon_only=this_daemon_only
        )
        return (await self._caller.call(lambda stub, _, t: stub.Clear(request, timeout=t))).deleted

    async def flush(self, wait_s: float = 30.0) -> bool:
        """Wait until all committed records are durable.

        False if `wait_s` was too short, if `file.write_per_day` keeps a record in memory alone, or
        if one was lost before it was written: all callers are told for 5 minutes after the first.
        """
        request = pb.FlushRequest(wait_s=wait_s)
        reply = await self._caller.call(
            lambda stub, _, t: stub.Flush(request, timeout=t), wait_s=wait_s
        )
        return reply.durable

    async def stats(self) -> dict[str, Any]:
        """Return what the daemon holds, and what it has not written yet."""
        reply = await self._caller.call(lambda stub, _, t: stub.Stats(pb.StatsRequest(), timeout=t))
        stats: dict[str, Any] = json.loads(reply.json)
        return stats

    async def settings(self) -> list[Entry]:
        """Return the daemon's settings. Answered over its unix socket, and to an admin."""
        reply = await self._caller.call(
            lambda stub, _, t: stub.GetConfig(pb.GetConfigRequest(), timeout=t)
        )
        return [Entry(each.key, each.value, each.live) for each in reply.settings]

    async def configure(
        self, assignments: Sequence[str], wait_s: float = 0.0
    ) -> tuple[list[tuple[str, str, str]], str]:
        """Change live settings by texts such as "dram.capacity=8GiB": all of them, or none.

        Waits up to `wait_s` until the daemon is within lowered caps. Returns (key, before, after)
        of each change, and what a lowered cap still waits for. Raises ConfigError. Answered over
        the daemon's unix socket, and to an admin.
        """
        request = pb.SetConfigRequest(assignments=assignments, wait_s=wait_s)
        reply = await self._caller.call(
            lambda stub, _, t: stub.SetConfig(request, timeout=t), wait_s=wait_s
        )
        return [(each.key, each.before, each.after) for each in reply.changed], reply.pending

    async def add_tenant(self, name: str, assignments: Sequence[str] = ()) -> str:
        """Let the daemon serve one more tenant, until it ends; returns the path of its socket.
        Raises ConfigError, InvalidRequest. Answered to an admin."""
        request = pb.AddTenantRequest(name=name, assignments=assignments)
        reply = await self._caller.call(
            lambda stub, _, t: stub.AddTenant(request, timeout=t), wait_s=TENANT_S
        )
        return reply.socket

    async def delete_tenant(self, name: str) -> tuple[int, str, str]:
        """Delete a tenant and all that is stored of it; returns its blocks, how far they are
        erased, and what is left: then its calls stay refused, and this can be called again. Raises
        InvalidRequest. Answered to an admin."""
        request = pb.DeleteTenantRequest(name=name)
        reply = await self._caller.call(
            lambda stub, _, t: stub.DeleteTenant(request, timeout=t), wait_s=TENANT_S
        )
        return reply.blocks, reply.erased, reply.left

    async def log_lines(self, limit: int = 0) -> list[str]:
        """Return the daemon's last log lines, oldest first; 0: all it keeps. Answered over its
        unix socket, and to an admin."""
        request = pb.LogLinesRequest(limit=limit)
        reply = await self._caller.call(lambda stub, _, t: stub.LogLines(request, timeout=t))
        return list(reply.lines)

    async def namespaces(self) -> list[NamespaceUse]:
        """Return what the daemon has of each namespace, in the order of the ids.

        The namespace is None if it has blocks but the daemon does not know its specification. An
        engine that uses it registers it again.
        """
        found: list[NamespaceUse] = []
        after = b""
        while True:
            request = pb.ListNamespacesRequest(after=after)
            reply = await self._caller.call(_list_call(request))
            found += map(_use_of, reply.items)
            if not reply.next or reply.next <= after:
                return found
            after = reply.next

    async def outcomes(self, request_id: str = "", *, limit: int = 100) -> list[Outcome]:
        """Return how the last requests were answered, newest first.

        request_id: only requests whose id starts with this.
        """
        request = pb.OutcomesRequest(request_id=request_id, limit=limit)
        reply = await self._caller.call(lambda stub, _, t: stub.Outcomes(request, timeout=t))
        return [outcome_of(message) for message in reply.outcomes]

    async def explain(self, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> Explanation:
        """Return where each block of a prefix is now, and what would end its hit."""
        request = pb.ExplainRequest(namespace_id=namespace_id, keys=self._caller.joined(keys))
        reply = await self._caller.call(
            lambda stub, _, t: stub.Explain(request, timeout=t), namespace_id=namespace_id
        )
        return explanation_of(reply)

    async def scan(
        self, namespace_id: NamespaceId | None = None, *, limit: int | None = None
    ) -> AsyncIterator[pb.ScanItem]:
        """Iterate over the stored blocks, page by page, not as one snapshot. Their order is
        the same every time, and says nothing."""
        after, left = b"", limit
        while left is None or left > 0:
            request = pb.ScanRequest(
                namespace_id=namespace_id or b"",
                after=after,
                limit=SCAN_PAGE_ITEMS if left is None else min(left, SCAN_PAGE_ITEMS),
            )
            reply = await self._caller.call(_scan_call(request))
            for item in reply.items:
                yield item
            after = reply.next
            left = None if left is None else left - len(reply.items)
            if not after:
                return

    def record(
        self,
        *,
        share: float = 1.0,
        block: int = 0,
        namespace_id: NamespaceId | None = None,
    ) -> AsyncIterator[pb.RecordReply]:
        """Yield the requests that the daemon receives from now on; the first batch is empty.

        share: fraction of all prefixes, chosen by the hash in their key number `block`; shorter
        prefixes are left out. A slow reader misses some: see `dropped` of the replies.
        """
        return record(self._caller, share=share, block=block, namespace_id=namespace_id)


def _list_call(request: pb.ListNamespacesRequest) -> Call[pb.ListNamespacesReply]:
    return lambda stub, _, timeout_s: stub.ListNamespaces(request, timeout=timeout_s)


def _use_of(item: pb.NamespaceItem) -> NamespaceUse:
    return NamespaceUse(
        NamespaceId(item.namespace_id),
        Namespace.from_json(item.spec_json) if item.spec_json else None,
        item.blocks,
        item.model,
        item.dram_bytes,
        item.file_bytes,
        item.asked_blocks,
        item.hit_blocks,
        dict(item.tier_hit_blocks),
    )


def _scan_call(request: pb.ScanRequest) -> Call[pb.ScanReply]:
    return lambda stub, _, timeout_s: stub.Scan(request, timeout=timeout_s)
