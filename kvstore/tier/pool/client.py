"""Calls to the pool: each with a deadline, none while it does not answer.

The process that runs Mooncake is started, watched, killed when a call of it hangs, and started
again, by one background task. No caller ever waits for that.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import accumulate

from kvstore.settings import PoolSettings
from kvstore.system.breaker import Breaker
from kvstore.tier.pool.failure import PoolFailed, is_master_gone
from kvstore.tier.pool.memory import LANES, Lane
from kvstore.tier.pool.messages import Operation, Reply, Request, Setup
from kvstore.tier.pool.names import PROBE
from kvstore.tier.pool.process import PoolProcess

logger = logging.getLogger(__name__)

HANG_S = 10.0  # a call that takes longer has its process killed; Mooncake's own bound is 30 s
PROBE_S = 2.0
SLOW_S = 1.0  # a call that took so long is the pool's fault, whatever its deadline was
TICK_S = 0.2
PROBE_EVERY_S = 2.0
BACKOFF_MIN_S, BACKOFF_MAX_S = 0.5, 10.0
CONTROL_THREADS = 2  # beside one for each lane: for what moves no records
WAITING_MAX = 64  # calls that wait for their turn


class PoolClient:
    """run: keeps it up. counted: told of each call's operation and outcome. Times are seconds of
    `now`."""

    def __init__(
        self,
        settings: PoolSettings,
        now: Callable[[], float],
        counted: Callable[[str, str], None],
        *,
        segment_bytes: int = 0,
        buffer_bytes: int,
    ) -> None:
        """segment_bytes: what this one gives to the pool. buffer_bytes: 0 if it moves nothing."""
        self._settings = settings
        self._now = now
        self._counted = counted
        self._segment_bytes = segment_bytes
        self._buffer_bytes = buffer_bytes
        self.breaker = Breaker(now, BACKOFF_MIN_S, BACKOFF_MAX_S)
        self.last_error = ""
        self.starts = 0
        self.hung = 0  # processes that were killed for it
        self._process: PoolProcess | None = None
        self._waiting = 0
        self._control = asyncio.Semaphore(CONTROL_THREADS)
        self._probed_at = now()

    @property
    def up(self) -> bool:
        """Whether it is worth asking."""
        return self._process is not None and self.breaker.closed

    @property
    def state(self) -> str:
        """One word: starting, up or down."""
        if self.up:
            return "up"
        return "down" if self.last_error else "starting"

    async def run(self) -> None:
        """Keep a process up until cancelled."""
        pause_s = BACKOFF_MIN_S
        while True:
            try:
                process = await PoolProcess.start(self._setup())
            except PoolFailed as error:
                self._failed(str(error))
            else:
                began = self._now()
                try:
                    await self._keep(process)
                finally:
                    await self._let_go(process)
                if self._now() - began > BACKOFF_MAX_S:
                    pause_s = BACKOFF_MIN_S
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, BACKOFF_MAX_S)

    async def _keep(self, process: PoolProcess) -> None:
        """Watch a process until it has ended, or hangs."""
        self.starts += 1
        self._process = process
        self.breaker.success()
        logger.info("pool=up master=%s starts=%d", self._settings.master, self.starts)
        while not await process.ended(TICK_S):
            since = process.waits_since
            if since is not None and self._now() - since > HANG_S:
                self.hung += 1
                self._failed(f"a call of it hung for {HANG_S:g} s: its process was killed")
                return
            await self._probe(process)
        self._failed(process.last_words())

    async def _let_go(self, process: PoolProcess) -> None:
        self._process = None
        self.breaker.trip()
        if process.memory is not None:
            process.memory.retire()
        if self._segment_bytes:
            await process.leave()
        await process.end()

    async def _probe(self, process: PoolProcess) -> None:
        """Ask something if it is time to, so that no request finds out what this can."""
        due = self._probed_at + PROBE_EVERY_S
        if self._now() < due if self.breaker.closed else self.breaker.retry_after_s > 0:
            return
        self._probed_at = self._now()
        if not self._buffer_bytes:
            return  # it gives memory, and asks nothing
        try:
            await self.ask(process, Request(0, Operation.EXISTS, [PROBE]), self._now() + PROBE_S)
        except PoolFailed:
            if not self.breaker.closed:
                self.breaker.probe_failed()
        else:
            if not self.breaker.closed:
                logger.info("pool=answers master=%s", self._settings.master)
            self.breaker.success()

    def _failed(self, reason: str) -> None:
        """Note that the pool does not do its work: nobody asks it until a probe succeeds."""
        self.last_error = reason[:300]
        if self.breaker.closed:
            logger.warning("pool=down master=%s reason=%r", self._settings.master, self.last_error)
        self.breaker.trip()

    def _setup(self) -> Setup:
        settings = self._settings
        return Setup(
            settings.master,
            settings.metadata,
            settings.address,
            settings.protocol,
            settings.device,
            self._segment_bytes,
            self._buffer_bytes,
            LANES + CONTROL_THREADS,
        )

    # ---- calls ---------------------------------------------------------------------------------

    async def control(
        self, operation: Operation, names: Sequence[str], deadline: float
    ) -> list[int]:
        """Do what moves no records; return a code for each name. Raises PoolFailed."""
        self._check()
        if self._waiting >= WAITING_MAX:
            self._counted(operation, "busy")
            raise PoolFailed("too many calls wait for the pool", reason="busy")
        self._waiting += 1
        try:
            async with asyncio.timeout(max(0.0, deadline - self._now())):
                await self._control.acquire()
        except TimeoutError as error:
            self._counted(operation, "busy")
            raise PoolFailed("no turn at the pool in time", reason="busy") from error
        finally:
            self._waiting -= 1
        try:
            self._check()
            assert self._process is not None
            return await self.ask(self._process, Request(0, operation, list(names)), deadline)
        finally:
            self._control.release()

    @asynccontextmanager
    async def lane(self, deadline: float, *, puts: bool = False) -> AsyncIterator[Moving]:
        """Hold a lane for one call. It is given back when that has ended, be it much later.

        Raises PoolFailed if none is free in time.
        """
        self._check()
        process = self._process
        assert process is not None
        assert process.memory is not None
        memory = process.memory
        lane = await memory.take(deadline - self._now(), puts=puts)
        moving = Moving(self, process, lane)
        try:
            yield moving
        finally:
            if moving.call is None or moving.call.done():
                memory.give(lane)
            else:
                moving.call.add_done_callback(lambda _: memory.give(lane))

    async def ask(
        self,
        process: PoolProcess,
        request: Request,
        deadline: float,
        began: Callable[[asyncio.Future[Reply]], None] = lambda future: None,
    ) -> list[int]:
        """Return a code for each name. Raises PoolFailed, also if all codes say that the
        master does not answer. began: told of the call, which may end later than this."""
        operation, now = request.operation, self._now()
        future = process.send(request, now)
        began(future)
        await asyncio.wait([future], timeout=max(0.0, deadline - now))
        if not future.done():
            self._counted(operation, "slow")
            self._probed_at = -math.inf  # does it answer? The next requests may not have to wait
            if self._now() - now >= SLOW_S:
                self._failed(f"{operation}: no answer for {self._now() - now:.1f} s")
            raise PoolFailed(f"{operation}: no answer in time", reason="slow")
        try:
            codes = future.result().codes
        except PoolFailed as error:
            self._counted(operation, error.reason)
            raise
        wanted = 1 if operation is Operation.PURGE else len(request.names)
        if len(codes) != wanted or (codes and all(map(is_master_gone, codes))):
            self._counted(operation, "gone")
            self._failed(f"{operation}: code {codes[0] if codes else 'none'}")
            raise PoolFailed(f"{operation}: code {codes[0] if codes else 'none'}", reason="gone")
        self._counted(operation, "ok")
        return codes

    def _check(self) -> None:
        if not self.up:
            raise PoolFailed(f"the pool is {self.state}: {self.last_error}", reason="gone")


class Moving:
    """A lane, and the call that moves values between it and the pool."""

    def __init__(self, client: PoolClient, process: PoolProcess, lane: Lane) -> None:
        self.view = lane.view
        self.call: asyncio.Future[Reply] | None = None
        self._client = client
        self._process = process
        self._offset = lane.offset

    async def move(
        self,
        operation: Operation,
        names: Sequence[str],
        sizes: Sequence[int],
        deadline: float,
    ) -> list[int]:
        """Get or put values that stand in the lane one after another. Raises PoolFailed."""
        offsets = [self._offset + at for at in accumulate(sizes[:-1], initial=0)]
        request = Request(0, operation, list(names), offsets, list(sizes))
        return await self._client.ask(self._process, request, deadline, self._began)

    def _began(self, future: asyncio.Future[Reply]) -> None:
        self.call = future
