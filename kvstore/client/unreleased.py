"""Leases whose release could not be sent, until it can.

Nobody else releases them: when they expire, their slots are in limbo for as long as the session
lives. A release that was sent is not repeated, even if no answer came: a daemon that lives carries
it out, and a second one could end another reader's hold on the same lease.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import grpc.aio

from kvstore.model.errors import Unavailable
from kvstore.rpc.status import error_of, is_answer
from kvstore.rpc.v1 import kvstore_pb2 as pb

if TYPE_CHECKING:  # the stub's asyncio type exists for type checkers only
    from kvstore.rpc.v1.kvstore_pb2_grpc import KVStoreAsyncStub

UNRELEASED_MAX = 4096  # more leases than a daemon without an answer has granted in a while


class Unreleased:
    """Those of one session: they mean nothing in the next one."""

    def __init__(self) -> None:
        self._ids: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._ids)

    def add(self, lease_ids: Sequence[int]) -> None:
        """Note leases, each as often as it is to be released. Those noted first are forgotten
        first. One that was noted before is noted anew: who asks again means the same release."""
        self.discard(lease_ids)
        self._ids = [*self._ids, *lease_ids][-UNRELEASED_MAX:]

    def discard(self, lease_ids: Sequence[int]) -> None:
        """Forget leases that are released in another way."""
        if self._ids:
            others = set(lease_ids)
            self._ids = [lease for lease in self._ids if lease not in others]

    async def send(
        self, stub: KVStoreAsyncStub, session: int, *, timeout_s: float, most: int
    ) -> int:
        """Release all of them, `most` in one call, and return how many. Those that are not sent, or
        are refused for the moment, stay. Raises AioRpcError if the daemon does not answer."""
        sent = 0
        while self._ids:
            leases, self._ids = self._ids[:most], self._ids[most:]
            request = pb.ReleaseRequest(session=session, leases=leases)
            try:
                await stub.Release(request, timeout=timeout_s)
            except grpc.aio.AioRpcError as error:
                if not is_answer(error):
                    raise
                if isinstance(error_of(error, ""), Unavailable):
                    self.add(leases)
                break
            except Unavailable:
                self.add(leases)
                break
            sent += len(leases)
        return sent
