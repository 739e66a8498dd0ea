"""The requests that a daemon receives, as a stream."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc.aio

from kvstore.client.caller import Caller
from kvstore.model.block import NamespaceId
from kvstore.rpc.status import error_of
from kvstore.rpc.v1 import kvstore_pb2 as pb


async def record(
    caller: Caller, *, share: float, block: int, namespace_id: NamespaceId | None
) -> AsyncIterator[pb.RecordReply]:
    """Yield batches until the daemon ends. Raises Unavailable if it is lost."""
    request = pb.RecordRequest(share=share, block=block, namespace_id=namespace_id or b"")
    call = (await caller.connected()).stub.Record(request)
    try:
        async for reply in call:
            yield reply
    except grpc.aio.AioRpcError as error:
        raise error_of(error, caller.target) from error
    finally:
        call.cancel()
