"""What those ask who watch a daemon: its history, what it stores, what was slow, what is asked."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import grpc.aio

from kvstore.client.caller import Caller
from kvstore.model.block import NamespaceId
from kvstore.rpc.status import error_of
from kvstore.rpc.v1 import kvstore_pb2 as pb


class Looking:
    """The part of `Admin` that looks, and changes nothing."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def history(self, step_s: int = 1, *, since: float = 0.0) -> pb.HistoryReply:
        """Return what the daemon held and did, sample by sample, those that end after `since`
        (seconds since the epoch).

        step_s: 1 for the last five minutes, 10 for an hour, 300 for a day. What a column means is
        in the .proto file. There is no sample for when the daemon was not there.
        """
        request = pb.HistoryRequest(step_s=step_s, since=since)
        return await self._caller.call(lambda stub, _, t: stub.History(request, timeout=t))

    async def tree(
        self,
        namespace_id: NamespaceId | None = None,
        prefix: bytes = b"",
        *,
        through: bytes = b"",
        depth: int = 1,
        limit: int = 200,
        cursor: bytes = b"",
    ) -> pb.TreeReply:
        """Return what is stored, as runs of blocks: what goes on from the run that ends at the
        block `prefix`, or the starts of all prefixes; those with most bytes first.

        through: instead, the runs from the start of a prefix to this block, then what goes on.
        depth: levels of runs, at most 8. limit: of runs, at most 1000. cursor: `next` of the last
        answer. Raises InvalidRequest, Unavailable.
        """
        request = pb.TreeRequest(
            namespace_id=namespace_id or b"",
            prefix=prefix,
            through=through,
            depth=depth,
            limit=limit,
            cursor=cursor,
        )
        return await self._caller.call(lambda stub, _, t: stub.Tree(request, timeout=t))

    async def conversations(
        self, session_id: str = "", *, namespace_id: NamespaceId | None = None, limit: int = 100
    ) -> pb.ConversationsReply:
        """Return the conversations whose id starts so, newest first, with what hints have said."""
        request = pb.ConversationsRequest(
            session_id=session_id, namespace_id=namespace_id or b"", limit=limit
        )
        return await self._caller.call(lambda stub, _, t: stub.Conversations(request, timeout=t))

    async def slow(
        self, kind: str = "", *, over_s: float = 0.0, limit: int = 0, reset: bool = False
    ) -> pb.SlowReply:
        """Return the acquires, loads and saves that took longest, with what they waited for.

        kind: "acquire", "load" or "save". over_s: that took at least so long. limit: 0 for all that
        are kept. reset: the daemon forgets them after the answer. Raises InvalidRequest.
        """
        request = pb.SlowRequest(kind=kind, over_s=over_s, limit=limit, reset=reset)
        return await self._caller.call(lambda stub, _, t: stub.Slow(request, timeout=t))

    async def monitor(
        self,
        *,
        namespace_id: NamespaceId | None = None,
        request_id: str = "",
        tier: str = "",
        misses_only: bool = False,
        kind: str = "",
    ) -> AsyncGenerator[pb.MonitorReply]:
        """Yield requests as the daemon answers them, from now on; the first batch is empty.

        request_id: that start so. tier: that were served something from it. misses_only: whose hit
        ended before their prefix. kind: "acquire" or "save". A slow reader misses some: see
        `dropped` of the replies. Raises InvalidRequest, and Unavailable when the daemon is lost.
        """
        request = pb.MonitorRequest(
            namespace_id=namespace_id or b"",
            request_id=request_id,
            tier=tier,
            misses_only=misses_only,
            kind=kind,
        )
        call = (await self._caller.connected()).stub.Monitor(request)
        try:
            async for reply in call:
                yield reply
        except grpc.aio.AioRpcError as error:
            raise error_of(error, self._caller.target) from error
        finally:
            call.cancel()
