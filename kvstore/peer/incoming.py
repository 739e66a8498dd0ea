"""One READ at a peer, as its borrower sees it: the request, the head, the records."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import Executor

from kvstore.model.block import Namespace, Span
from kvstore.model.errors import Incompatible, InvalidRequest
from kvstore.peer.base import READ_NBYTES_MAX, PeerCorrupt, PeerGone, PeerSlow
from kvstore.peer.bulk import SILENCE_S, Bulk
from kvstore.peer.connections import CONNECTIONS_MAX, ConnectionEnded, Connections, Turn
from kvstore.peer.control import error_of
from kvstore.peer.messages import (
    ReadAnswer,
    Refusal,
    check_parts,
    decode_read_head,
    decode_refusal,
)
from kvstore.peer.receive import Receipt, check_wrong
from kvstore.peer.wire import Frame, Kind
from kvstore.system.threads import ended, outlive

ATTEMPTS = CONNECTIONS_MAX + 1  # to ask for a read: any connection may have ended meanwhile


class Reads:
    """The reads of one link. name: of the peer; instance: its start, which every answer names."""

    def __init__(
        self, connections: Connections, threads: Executor, *, name: str, instance: str
    ) -> None:
        self.connections = connections
        self.threads = threads
        self.name = name
        self.received_nbytes = 0
        self._instance = instance
        self._last = 0

    async def begin(
        self, request: bytes, sizes_max: Sequence[int], varies: Sequence[bool], deadline: float
    ) -> TcpIncoming:
        """Send a READ and receive its head.

        sizes_max, varies: of each record; one that does not vary has its largest size, or is not
        there. Raises PeerError, UnknownNamespace.
        """
        for _ in range(ATTEMPTS):
            turn = await self.connections.take(deadline)
            refusal: Refusal | None = None
            try:
                frame = await self._asked(turn, request, deadline)
                if frame is not None and frame.kind == Kind.REPLY:
                    answer = self._answer(frame, sizes_max, varies)
                    return TcpIncoming(self, turn, answer, deadline)
                refusal = decode_refusal(frame.body) if frame is not None else None
            except ConnectionEnded:
                self.connections.give(turn, good=False)
                continue
            except Incompatible as error:
                self.connections.give(turn, good=False)
                raise PeerCorrupt(f"{self.name}: {error}") from error
            except BaseException:
                self.connections.give(turn, good=False)
                raise
            self.connections.give(turn, good=refusal is not None)
            if refusal is not None:
                raise error_of(refusal, self.name)
            if not turn.lane.used:  # else it was closed at the other end while nobody used it
                raise PeerGone(f"{self.name} ended a new connection", reason="closed")
        raise PeerGone(f"connections to {self.name} end again and again", reason="closed")

    async def _asked(self, turn: Turn, request: bytes, deadline: float) -> Frame | None:
        """Return the first frame of the answer, None if the connection ended before it. Raises
        ConnectionEnded if it was ended by an earlier read on it."""
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise PeerSlow(f"no time left to read from {self.name}", reason="deadline")
        self._last = number = (self._last + 1) & 0xFFFF_FFFF
        reason = "deadline"
        try:
            async with asyncio.timeout(left_s):
                frame = Frame(Kind.READ, number, request, left_s)
                await self.connections.ask(turn, frame, deadline)
                await turn.begun
            if turn.lane.ended:
                raise ConnectionEnded
            left_s = deadline - time.monotonic()
            reason = "deadline" if left_s < SILENCE_S else "silent"
            async with asyncio.timeout(min(left_s, SILENCE_S)):
                answer = await turn.bulk.receive()
        except TimeoutError:
            raise PeerSlow(f"{self.name} did not answer a read", reason=reason) from None
        if answer is not None and (answer.id, answer.kind in (Kind.REPLY, Kind.ERROR)) != (
            number,
            True,
        ):
            raise PeerCorrupt(f"{self.name} answered something else than was asked")
        return answer

    def _answer(self, frame: Frame, sizes_max: Sequence[int], varies: Sequence[bool]) -> ReadAnswer:
        answer = decode_read_head(frame.body, records=len(sizes_max))
        check_answer(answer, self._instance, sizes_max, varies, self.name)
        return answer


class TcpIncoming:
    """The records of one READ, on their way. Implements `Incoming`."""

    limbo = None  # a socket that was shut writes nothing more

    def __init__(self, reads: Reads, turn: Turn, answer: ReadAnswer, deadline: float) -> None:
        self.sizes = answer.sizes
        self.checksums = answer.checksums
        self._reads = reads
        self._turn: Turn | None = turn
        self._deadline = deadline

    async def fill(self, targets: Sequence[memoryview | None]) -> None:
        """See `Incoming`."""
        turn, self._turn = self._turn, None
        if turn is None:
            raise InvalidRequest("a read is filled once")
        good = False
        try:
            check_targets(self.sizes, targets)
            receipt = Receipt(turn.bulk, self.sizes, self.checksums, targets, self._reads.name)
            wrong = await self._received(receipt, turn.bulk)
            self._reads.received_nbytes += sum(self.sizes)
            good = True
        finally:
            self._reads.connections.give(turn, good=good)
        check_wrong(wrong, self._reads.name)

    async def close(self) -> None:
        """See `Incoming`."""
        turn, self._turn = self._turn, None
        if turn is not None:
            self._reads.connections.give(turn, good=False)

    async def _received(self, receipt: Receipt, bulk: Bulk) -> list[int]:
        """Let a thread receive; nothing of it is left when this returns or raises."""
        bulk.lend_to_thread()
        try:
            job = self._reads.threads.submit(receipt.run)
        except RuntimeError as error:  # there can be none, or the daemon stops
            bulk.take_back()
            message = f"no thread to read from {self._reads.name}: {error}"
            raise PeerGone(message, reason="failed") from error
        end = asyncio.wrap_future(job)
        try:
            await ended([end], max(0.0, self._deadline - time.monotonic()))
        finally:
            late = not end.done()
            if late:
                job.cancel()  # if it has not begun
                receipt.stop()
                await outlive([end])
            bulk.take_back()
        if late:
            if not end.cancelled():
                end.exception()  # that it was stopped is known
            message = f"a read from {self._reads.name} was not over in time"
            raise PeerSlow(message, reason="deadline")
        return end.result()


def check_answer(
    answer: ReadAnswer,
    instance: str,
    sizes_max: Sequence[int],
    varies: Sequence[bool],
    name: str,
) -> None:
    """Raise PeerError for an answer of another start of the peer, or of impossible sizes."""
    if answer.instance != instance:
        raise PeerGone(f"{name} is another start than it said", reason="lease")
    for nbytes, most, any_size in zip(answer.sizes, sizes_max, varies, strict=True):
        if nbytes not in (0, most) and not (any_size and nbytes < most):
            raise PeerCorrupt(f"{name} has a record of {nbytes} bytes, not {most}")


def check_targets(sizes: Sequence[int], targets: Sequence[memoryview | None]) -> None:
    """Raise InvalidRequest for targets that are not those of the records."""
    if len(targets) != len(sizes):
        raise InvalidRequest(f"{len(targets)} targets for {len(sizes)} records")
    for nbytes, target in zip(sizes, targets, strict=True):
        if target is not None and len(target) != nbytes:
            raise InvalidRequest(f"a target of {len(target)} bytes for a record of {nbytes}")


def check_read(
    namespace: Namespace, keys: int, spans: Sequence[Span]
) -> tuple[list[int], list[bool]]:
    """Return the largest size of each record over the spans, and whether it varies. Raises
    InvalidRequest for more than one READ may ask."""
    check_parts(keys, spans)
    sizes: list[int] = []
    varies: list[bool] = []
    for part, begin, end in spans:
        sizes += [namespace.record_nbytes(part)] * (end - begin)
        varies += [namespace.groups[part.group].varies] * (end - begin)
    blocks = max((s.end for s in spans), default=0) - min((s.begin for s in spans), default=0)
    if blocks > 1 and sum(sizes) > READ_NBYTES_MAX:
        raise InvalidRequest(f"a read of {sum(sizes)} bytes; the limit is {READ_NBYTES_MAX}")
    return sizes, varies
