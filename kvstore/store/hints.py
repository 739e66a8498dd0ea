"""Carries hints out: what a client knows of the future, told to policies and done ahead of time.

Hints are named by a conversation's session id, or by the prefix itself. All are bounded: pins by
bytes and time, prefetches by what leases may hold, by number and by their deadline. A hint that is
wrong moves blocks that others would rather have kept, and nothing else.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from kvstore.decide.ask import Ask
from kvstore.decide.planner import (
    DAEMON_SESSION,
    Conversation,
    Conversations,
    Planner,
    Reservation,
    needed_spans,
)
from kvstore.metrics import Metrics
from kvstore.model.block import BlockKey, NamespaceId
from kvstore.model.errors import KVStoreError
from kvstore.model.hint import Hint, HintKind, HintReport, Short
from kvstore.model.outcome import Reason
from kvstore.move.write_behind import WriteBehind
from kvstore.store.acquire import Acquisition, span_nbytes

logger = logging.getLogger(__name__)

PREFETCHES_MAX = 8  # at once, for hints: those who ask for their bytes now come first
EXPECTED_LOADS_MAX = 4  # of these, for expected requests
LEAD_S = 10.0  # before an expected request, its blocks are promoted; sooner would evict others
EXPECTED_MAX = 1 << 14  # conversations whose return is waited for
EXPECTED_LOAD_S = 20.0  # for the blocks of one to be promoted

_SHORT = {
    None: Short.NOTHING,
    Reason.DEADLINE: Short.DEADLINE,
    Reason.NO_ROOM: Short.NO_ROOM,
    Reason.READ_FAILED: Short.READ_FAILED,
    Reason.LEASED_BYTES: Short.CAP,
}


class Target(NamedTuple):
    """The prefix that a hint is about. name: of its conversation, or made from its last block."""

    name: str
    namespace_id: NamespaceId
    keys: Sequence[BlockKey]


class Hints:
    """The hints of one node. Times are seconds of `now`."""

    def __init__(
        self,
        planner: Planner,
        write_behind: WriteBehind,
        acquisition: Acquisition,
        metrics: Metrics,
        *,
        pinned_bytes_max: int,
        pin_ttl_max_s: float,
        recall: Callable[[Sequence[BlockKey]], Awaitable[None]],
        now: Callable[[], float],
    ) -> None:
        """pinned_bytes_max: of the arena, what all pins together may hold. recall: indexes what a
        start has found of some blocks."""
        self._planner = planner
        self._write_behind = write_behind
        self._acquisition = acquisition
        self._metrics = metrics
        self.pinned_bytes_max = pinned_bytes_max
        self.pin_ttl_max_s = pin_ttl_max_s
        self._recall = recall
        self._has_file_tier = write_behind.caps.record_nbytes_max is not None
        self._now = now
        self._conversations = Conversations(now=now)
        self._due: list[tuple[float, float, str]] = []  # when to prefetch, expected when, whom
        self._prefetching = 0
        self._tasks: set[asyncio.Task[None]] = set()

    # ---- what requests tell ----------------------------------------------------------------------

    def asked(self, session_id: str, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> None:
        """Note that a conversation asked for a prefix: it goes on."""
        if session_id:
            self._conversations.asked(session_id, namespace_id, keys)

    def reserved(self, write: Reservation) -> None:
        """Note what a conversation is going to put."""
        if write.conversation:
            self._conversations.grew(
                write.conversation, write.namespace_id, write.first_block, write.parent, write.keys
            )

    def committed(self, write: Reservation) -> None:
        """Let what was said of a conversation hold for the blocks it has put since."""
        conversation = self._conversations.find(write.conversation) if write.conversation else None
        if conversation is None or conversation.namespace_id != write.namespace_id:
            return
        now = self._now()
        if conversation.ended:
            self._planner.end(conversation.keys)
        elif conversation.expected_at > now:
            self._planner.expect(conversation.keys, conversation.expected_at - now)
        if conversation.pinned_until > now:
            self._planner.pins.extend(
                write.conversation,
                conversation.keys,
                conversation.pinned_until,
                since=write.first_block,
                pin_nbytes_max=conversation.pin_bytes or self.pinned_bytes_max,
                all_nbytes_max=self.pinned_bytes_max,
            )

    def conversations(
        self, start: str, namespace_id: NamespaceId | None, most: int
    ) -> tuple[list[tuple[str, Conversation]], int]:
        """Return what is known of conversations, newest first, and how many there are of all. The
        name of one that is a prefix alone begins with a zero byte."""
        return self._conversations.newest(start, namespace_id, most), len(self._conversations)

    # ---- hints -----------------------------------------------------------------------------------

    async def carry_out(self, hint: Hint) -> HintReport:
        """Do what a hint asks for, as far as its bounds go; the report says how far that was."""
        target = self._target(hint)
        if target is None:
            self._count(hint.kind, Short.UNKNOWN_SESSION, 0)
            return HintReport(hint.kind, short=Short.UNKNOWN_SESSION)
        with self._planner.index.namespaces.in_use(target.namespace_id):
            await self._recall(target.keys)
            return await self._do(hint, target)

    async def _do(self, hint: Hint, target: Target) -> HintReport:
        if hint.kind is HintKind.END:
            return self._end(target)
        if hint.kind is HintKind.EXPECT:
            return self._expect(target, hint.seconds)
        if hint.kind is HintKind.PREFETCH:
            return await self._prefetch(target, hint.wait_s)
        if hint.kind is HintKind.PIN:
            return await self._pin(target, hint)
        return await self._demote(target, hint.wait_s)

    def _target(self, hint: Hint) -> Target | None:
        """Return what a hint is about; None: its session is not known (any more), and no prefix was
        named."""
        name, namespace_id, keys = hint.session_id, hint.namespace_id, hint.keys
        if namespace_id is not None and keys:
            name = name or f"\0{keys[-1].hex()}"
            self._conversations.know(name, namespace_id, keys)
        else:
            conversation = self._conversations.find(name)
            known = self._planner.index.namespaces
            if conversation is None or known.spec(conversation.namespace_id) is None:
                return None
            namespace_id, keys = conversation.namespace_id, conversation.keys
        return Target(name, namespace_id, keys)

    def _end(self, target: Target) -> HintReport:
        """Take note that a conversation is over: what it alone has used is the first to leave."""
        conversation = self._conversations.find(target.name)
        if conversation is not None:
            conversation.ended, conversation.pinned_until = True, 0.0
            conversation.expected_at = 0.0
        self._planner.pins.let_go(target.name)
        alone = self._planner.end(target.keys)
        short = Short.SHARED if len(alone) < self._stored(target) else Short.NOTHING
        nbytes = self._nbytes_of(alone)
        return self._report(HintKind.END, target, len(alone), short, nbytes=nbytes)

    def _expect(self, target: Target, in_s: float) -> HintReport:
        """Keep a prefix for somebody who will ask for it, and have it in the arena by then."""
        self._planner.expect(target.keys, in_s)
        conversation = self._conversations.find(target.name)
        if conversation is not None:
            at = conversation.expected_at = self._now() + in_s
            conversation.ended = False
            if self._has_file_tier and len(self._due) < EXPECTED_MAX:
                heapq.heappush(self._due, (at - LEAD_S, at, target.name))
        stored = self._stored(target)
        nbytes = self._nbytes_of(target.keys[:stored])
        return self._report(HintKind.EXPECT, target, stored, nbytes=nbytes, lasts_s=in_s)

    async def _prefetch(self, target: Target, wait_s: float) -> HintReport:
        """Bring a prefix up into the arena, as far as it comes within `wait_s`."""
        began = self._now()
        came, nbytes, short = await self._bring_up(target, began + wait_s)
        return self._report(HintKind.PREFETCH, target, came, short, nbytes=nbytes, began=began)

    async def _pin(self, target: Target, hint: Hint) -> HintReport:
        """Bring a prefix up within `wait_s`, and let it not leave for so long, from its start on as
        far as the bounds go. 0 s: unpin what this target has pinned."""
        began = self._now()
        conversation = self._conversations.find(target.name)
        ttl_s = min(hint.seconds, self.pin_ttl_max_s)
        if not ttl_s:
            if conversation is not None:
                conversation.pinned_until = 0.0
            self._planner.pins.let_go(target.name)
            return self._report(HintKind.PIN, target, 0)
        short = Short.NOTHING
        if hint.wait_s:
            _, _, short = await self._bring_up(target, began + hint.wait_s)
        until = self._now() + ttl_s
        if conversation is not None:
            conversation.pinned_until, conversation.pin_bytes = until, hint.bytes_max
        blocks, nbytes = self._hold(target, until, hint.bytes_max)
        resident = self._planner.match(target.namespace_id, target.keys).resident_blocks
        if blocks < resident:
            short = Short.CAP
        elif not short and blocks < self._stored(target):
            short = Short.DEADLINE
        return self._report(
            HintKind.PIN, target, blocks, short, nbytes=nbytes, began=began, lasts_s=ttl_s
        )

    async def _demote(self, target: Target, wait_s: float) -> HintReport:
        """Let what only this conversation has used leave the arena now, for the file tier."""
        began = self._now()
        self._planner.pins.let_go(target.name)
        if (conversation := self._conversations.find(target.name)) is not None:
            conversation.pinned_until = 0.0
        if not self._has_file_tier:
            return self._report(HintKind.DEMOTE, target, 0, Short.NO_FILE_TIER, began=began)
        resident = self._planner.match(target.namespace_id, target.keys).resident_blocks
        done = nbytes = 0
        while True:
            left, left_nbytes, unwritten = self._planner.eviction.demote_prefix(target.keys)
            done, nbytes = done + left, nbytes + left_nbytes
            last = self._planner.dirty.last
            if not unwritten or not await self._write_behind.settle(last, began + wait_s):
                break
        short = Short.NOTHING
        if done < resident:
            short = Short.NOT_WRITTEN if unwritten else Short.SHARED
        return self._report(HintKind.DEMOTE, target, done, short, nbytes=nbytes, began=began)

    # ---- as time goes by -------------------------------------------------------------------------

    def tick(self) -> None:
        """End pins whose time has come, and promote what is expected soon."""
        now = self._now()
        self._planner.pins.expire(now)
        if len(self._due) >= EXPECTED_MAX:
            self._due = sorted(each for each in self._due if self._is_expected(*each[1:]))
        while self._due and self._due[0][0] <= now and len(self._tasks) < EXPECTED_LOADS_MAX:
            _, at, name = heapq.heappop(self._due)
            conversation = self._conversations.find(name)
            if conversation is None or not self._is_expected(at, name):
                continue
            target = Target(name, conversation.namespace_id, conversation.keys)
            task = asyncio.get_running_loop().create_task(self._prefetch_expected(target))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End what is under way for hints."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- inside ----------------------------------------------------------------------------------

    def _hold(self, target: Target, until: float, bytes_max: int) -> tuple[int, int]:
        return self._planner.pins.pin(
            target.name,
            target.keys,
            until,
            pin_nbytes_max=bytes_max or self.pinned_bytes_max,
            all_nbytes_max=self.pinned_bytes_max,
        )

    def _is_expected(self, at: float, name: str) -> bool:
        """Say whether a conversation has not come back, and nobody has known better, since."""
        conversation = self._conversations.find(name)
        return conversation is not None and conversation.expected_at == at

    async def _prefetch_expected(self, target: Target) -> None:
        began = self._now()
        try:
            came, nbytes, short = await self._bring_up(target, began + EXPECTED_LOAD_S)
        except KVStoreError as error:
            logger.warning("prefetch=failed reason=%r", str(error))
            return
        self._report(HintKind.PREFETCH, target, came, short, nbytes=nbytes, began=began)

    async def _bring_up(self, target: Target, deadline: float) -> tuple[int, int, Short]:
        """Return how many blocks were promoted, their bytes, and what is in the way of more."""
        if self._prefetching >= PREFETCHES_MAX:
            return 0, 0, Short.BUSY
        self._prefetching += 1
        try:
            namespace_id, keys = target.namespace_id, target.keys
            began = self._now()
            ask = Ask(DAEMON_SESSION, "hint", "", namespace_id, keys, 0, began)
            reached = await self._acquisition.promote(ask, deadline)
        finally:
            self._prefetching -= 1
        if not reached.affordable:
            return 0, 0, Short.CAP
        came = max(0, reached.hit - reached.resident)
        namespace = self._planner.namespace(namespace_id)
        spans = needed_spans(namespace, reached.hit, reached.hit - came)
        return came, span_nbytes(namespace, spans), _SHORT.get(reached.why, Short.UNKNOWN)

    def _nbytes_of(self, keys: Sequence[BlockKey]) -> int:
        blocks = map(self._planner.index.by_key, keys)
        return sum(block.nbytes for block in blocks if block is not None)

    def _stored(self, target: Target) -> int:
        return self._planner.match(target.namespace_id, target.keys).hit_blocks

    def _report(
        self,
        kind: HintKind,
        target: Target,
        done: int,
        short: Short = Short.NOTHING,
        *,
        nbytes: int = 0,
        began: float | None = None,
        lasts_s: float = 0.0,
    ) -> HintReport:
        blocks = self._stored(target)
        if not blocks and not done:
            short = Short.NOT_STORED
        self._count(kind, short, done)
        took_s = 0.0 if began is None else self._now() - began
        return HintReport(kind, blocks, done, nbytes, short, took_s, lasts_s if done else 0.0)

    def _count(self, kind: HintKind, short: Short, done: int) -> None:
        self._metrics.hints.labels(kind, short or "done").inc()
        self._metrics.hint_blocks.labels(kind).inc(done)
