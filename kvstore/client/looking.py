"""What those ask who watch a daemon: its history, what it stores, what was slow, what is asked."""

from __future__ import annotations

from kvstore.client.caller import Caller
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
