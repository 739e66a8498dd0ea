"""One-sided reads of one link: the peer grants, our driver reads, the peer says whether it held.

Whatever goes wrong in a driver, the link reads by its bulk connections from then on, until it is
dialled again. Nothing is trusted that was read: sizes are checked before, checksums afterwards.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Any

from kvstore.model.checksum import checksum
from kvstore.model.errors import Incompatible, InvalidRequest
from kvstore.peer.base import PeerCorrupt, PeerError, PeerGone, PeerSlow
from kvstore.peer.control import Calls
from kvstore.peer.incoming import check_answer, check_targets
from kvstore.peer.messages import encode
from kvstore.peer.onesided.driver import OFFER_NBYTES_MAX, DriverError
from kvstore.peer.onesided.messages import (
    GrantAnswer,
    GrantBody,
    HeldBody,
    MemoryBody,
    decode_grant_reply,
    decode_memory,
)
from kvstore.peer.onesided.mover import Mover, PostedRead
from kvstore.peer.receive import check_wrong
from kvstore.peer.wire import HELD, Kind
from kvstore.system.threads import ended, outlive

logger = logging.getLogger(__name__)

READS_MAX = 4  # of one link at once, as many as it has bulk connections
MEMORY_S = 2.0
HELD_S = 2.0
SETTLE_S = 1.0  # for a read that nobody waits for any more, before its endpoint is ended
END_S = 2.0  # for a read whose endpoint was ended; then its targets are in limbo


class _Peer:
    """The peer's memory as our driver knows it. uses: reads under way. ended: its remote is."""

    def __init__(self, remote: Any, version: int) -> None:
        self.remote = remote
        self.version = version
        self.uses = 0
        self.stale = self.ended = False


class OneSidedReads:
    """The reads of one link. usable: whether to ask for any. read_nbytes: what they brought.

    Implements none of the protocols: `TcpLink` asks it first.
    """

    def __init__(
        self, calls: Calls, mover: Mover, threads: Executor, *, name: str, instance: str
    ) -> None:
        self.mover = mover
        self.usable = True
        self.read_nbytes = 0
        self.name = name
        self.threads = threads
        self._calls = calls
        self._instance = instance
        self._free = asyncio.Semaphore(READS_MAX)
        self._peer: _Peer | None = None
        self._connecting = asyncio.Lock()
        self._telling: set[asyncio.Task[None]] = set()

    async def begin(
        self, parts: bytes, sizes_max: Sequence[int], varies: Sequence[bool], deadline: float
    ) -> OneSidedIncoming | None:
        """Ask for a grant of what an encoded READ asks. None: read it in another way.

        Raises PeerError, UnknownNamespace.
        """
        if not self.usable:
            return None
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                await self._free.acquire()
        except TimeoutError:
            message = f"too many reads from {self.name} are under way"
            raise PeerSlow(message, reason="deadline") from None
        incoming = None
        try:
            incoming = await self._begun(parts, sizes_max, varies, deadline)
        finally:
            if incoming is None:
                self._free.release()
        return incoming

    async def _begun(
        self, parts: bytes, sizes_max: Sequence[int], varies: Sequence[bool], deadline: float
    ) -> OneSidedIncoming | None:
        body = encode(GrantBody(link=self.mover.name, parts=parts))
        answer = await self._calls.call(Kind.GRANT, body, deadline - time.monotonic())
        try:
            found = decode_grant_reply(answer, records=len(sizes_max))
        except Incompatible as error:
            raise self._corrupt(error) from error
        if found is None:
            return None
        peer = None
        try:
            check_answer(found.read, self._instance, sizes_max, varies, self.name)
            peer = await self._connected(found.version, deadline)
        except DriverError as error:
            self.fail(str(error))
        finally:
            if peer is None:
                self._give_back(found.grant)
        return OneSidedIncoming(self, peer, found, deadline) if peer is not None else None

    async def _connected(self, version: int, deadline: float) -> _Peer:
        """Return the peer's memory, at least of some version, and use it. Raises DriverError,
        PeerError."""
        async with self._connecting:
            peer = self._peer
            if peer is None or peer.version < version:
                peer = await self._connect(version, deadline)
            peer.uses += 1
            return peer

    async def _connect(self, version: int, deadline: float) -> _Peer:
        body = encode(MemoryBody(link=self.mover.name))
        timeout_s = min(MEMORY_S, deadline - time.monotonic())
        answer = await self._calls.call(Kind.MEMORY, body, timeout_s)
        try:
            memory = decode_memory(answer)
        except Incompatible as error:
            raise self._corrupt(error) from error
        if memory.version < version or len(memory.offer) > OFFER_NBYTES_MAX:
            raise DriverError(f"{self.name} offers other memory than it grants")
        remote = await self.mover.connect(memory.offer)
        before, self._peer = self._peer, _Peer(remote, memory.version)
        if before is not None:
            before.stale = True
            self._end_unused(before)
        return self._peer

    def give(self, peer: _Peer) -> None:
        """Take back what `begin` has given."""
        peer.uses -= 1
        self._free.release()
        self._end_unused(peer)

    def _end_unused(self, peer: _Peer) -> None:
        if peer.stale and not peer.uses:
            self._disconnect(peer)

    def _disconnect(self, peer: _Peer) -> None:
        if peer.ended:
            return
        peer.ended = True
        try:
            self.mover.disconnect(peer.remote)
        except DriverError as error:
            logger.debug("links=%s reason=%r", self.mover.name, str(error))

    async def held(self, grant: int, deadline: float) -> bool:
        """Give a grant back; return whether it was held until now. Raises PeerError."""
        timeout_s = min(HELD_S, deadline - time.monotonic())
        body = encode(HeldBody(grant=grant))
        return await self._calls.call(Kind.HELD, body, timeout_s) == HELD

    def _give_back(self, grant: int) -> None:
        """Give a grant back, whatever comes of it."""
        if self._calls.open:
            task = asyncio.get_running_loop().create_task(self._told(grant))
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    async def _told(self, grant: int) -> None:
        try:
            await self.held(grant, time.monotonic() + HELD_S)
        except PeerError as error:
            logger.debug("links=%s reason=%r", self.mover.name, str(error))

    def drop(self, peer: _Peer, grant: int) -> None:
        """Give up what was not read."""
        self._give_back(grant)
        self.give(peer)

    def fail(self, reason: str, peer: _Peer | None = None) -> None:
        """Read by bulk connections from now on. peer: whose reads are to end."""
        if self.usable:
            logger.warning(
                "links=tcp peer=%s instead_of=%s reason=%r", self.name, self.mover.name, reason
            )
        self.usable = False
        if peer is not None:
            peer.stale = True
            self._disconnect(peer)

    def close(self) -> None:
        """The link is over: its reads end soon."""
        self.usable = False
        peer, self._peer = self._peer, None
        if peer is not None:
            peer.stale = True
            self._end_unused(peer)

    def _corrupt(self, error: Incompatible) -> PeerCorrupt:
        wrong = PeerCorrupt(f"{self.name}: {error}")
        self._calls.link.end(wrong)
        return wrong


class OneSidedIncoming:
    """What was granted. Implements `Incoming`."""

    def __init__(
        self, reads: OneSidedReads, peer: _Peer, answer: GrantAnswer, deadline: float
    ) -> None:
        self.sizes = answer.read.sizes
        self.checksums = answer.read.checksums
        self.limbo: asyncio.Future[bool] | None = None
        self._reads = reads
        self._peer: _Peer | None = peer
        self._answer = answer
        self._deadline = deadline

    async def fill(self, targets: Sequence[memoryview | None]) -> None:
        """See `Incoming`. Only what has a target is read at all."""
        peer, self._peer = self._peer, None
        if peer is None:
            raise InvalidRequest("a read is filled once")
        reads, asked = self._reads, False
        try:
            check_targets(self.sizes, targets)
            wanted = [at for at, target in enumerate(targets) if target is not None and len(target)]
            views = [view for at in wanted if (view := targets[at]) is not None]
            await self._read(peer, [self._answer.addresses[at] for at in wanted], views)
            asked = True
            if not await reads.held(self._answer.grant, self._deadline):
                message = f"{reads.name} evicted or freed what was being read"
                raise PeerGone(message, reason="lease")
            wrong = await self._wrong(wanted, views)
            reads.read_nbytes += sum(map(len, views))
        finally:
            if asked:
                reads.give(peer)
            else:
                reads.drop(peer, self._answer.grant)
        check_wrong(wrong, reads.name)

    async def close(self) -> None:
        """See `Incoming`."""
        peer, self._peer = self._peer, None
        if peer is not None:
            self._reads.drop(peer, self._answer.grant)

    async def _read(self, peer: _Peer, sources: Sequence[int], views: Sequence[memoryview]) -> None:
        """Let the driver read; nothing of it is left when this returns or raises, or `limbo` is."""
        reads = self._reads
        if not views:
            return
        try:
            reading = reads.mover.read(peer.remote, sources, views)
        except DriverError as error:
            reads.fail(str(error))
            raise PeerGone(f"{reads.name}: {error}", reason="failed") from error
        try:
            await ended([reading.over], max(0.0, self._deadline - time.monotonic()))
        finally:
            late = not reading.over.done()
            if late:
                await self._end(reading, peer)
        if late:
            raise PeerSlow(f"a read from {reads.name} was not over in time", reason="deadline")
        if not reading.over.result():
            reads.fail("a read has failed", peer)
            raise PeerGone(f"a one-sided read from {reads.name} has failed", reason="failed")

    async def _end(self, reading: PostedRead, peer: _Peer) -> None:
        """Wait until a read that nobody wants any more is over; end its endpoint if need be."""
        await outlive([reading.over], SETTLE_S)
        if not reading.over.done():
            self._reads.fail("a read does not end", peer)
            await outlive([reading.over], END_S)
        if not reading.over.done():
            self.limbo = reading.over
            logger.error("links=limbo peer=%s", self._reads.name)

    async def _wrong(self, wanted: Sequence[int], views: Sequence[memoryview]) -> list[int]:
        """Return the places of records that are not what their checksums say."""

        def look() -> list[int]:
            pairs = zip(wanted, views, strict=True)
            return [at for at, view in pairs if checksum(view) != self.checksums[at]]

        try:
            return await asyncio.get_running_loop().run_in_executor(self._reads.threads, look)
        except RuntimeError as error:  # there can be none, or the daemon stops
            message = f"no thread to verify what {self._reads.name} has: {error}"
            raise PeerGone(message, reason="failed") from error
