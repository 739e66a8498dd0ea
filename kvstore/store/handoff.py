"""Prefill and decode by two engines of this host: one waits for what the other is computing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from kvstore.decide.ask import Ask
from kvstore.decide.pace import PATIENCE, Race
from kvstore.decide.planner import SessionId
from kvstore.model.block import BlockKey, Match
from kvstore.model.errors import Unavailable
from kvstore.store.node import Node

HANDOFF_SHARE = 0.75
"""Of the time that a request has: the rest is for other hosts and the bucket, if the engine does
not compute what it is to. Who tells its pace waits no longer than computing takes."""
LOOK_S = 0.5  # between two looks whether the engine is still there


class Handoff:
    """is_own: says whether the source that a session names is this daemon, or another engine of
    it."""

    def __init__(self, node: Node, is_own: Callable[[str, SessionId], bool]) -> None:
        self._node = node
        self._is_own = is_own

    async def arrived(self, ask: Ask, deadline: float) -> Ask:
        """Wait until the blocks that an engine of this host is to compute have come, as long as one
        would wait for those of another host. Returns what is asked of the other hosts then: the
        time until now was the engine's, and is not held against what they take."""
        if ask.origin is None or not self._is_own(ask.origin.source, ask.session):
            return ask
        goal = min(ask.origin.expect_blocks, len(ask.keys))
        if goal > ask.skip_blocks:
            with ask.waits.on("handoff"):
                await self._reach(ask, ask.origin.source, goal, deadline)
        return replace(ask, origin=None, raced_from=self._node.now())

    async def _reach(self, ask: Ask, source: str, goal: int, deadline: float) -> None:
        """Return when the hit has `goal` blocks, or it is not worth waiting for them any more."""
        node, loop = self._node, asyncio.get_running_loop()
        first, began = self._hit(ask, goal), node.now()
        race = _race(ask, goal, first)
        until = deadline if race is not None else began + HANDOFF_SHARE * (deadline - began)

        def missing() -> list[BlockKey]:
            nonlocal until
            hit = self._hit(ask, goal)
            if race is not None and goal > first:
                until = min(deadline, race.until((hit - first) / (goal - first)))
            over.reschedule(loop.time() + min(until - node.now(), LOOK_S))
            return list(ask.keys[hit:goal])

        while True:
            try:
                async with asyncio.timeout(None) as over:
                    await node.arrivals.wait(ask.keys[ask.skip_blocks : goal], missing)
                return
            except Unavailable:
                return
            except TimeoutError:
                if node.now() >= until or not self._is_own(source, ask.session):
                    return

    def _hit(self, ask: Ask, goal: int) -> int:
        return self._node.planner.match(
            ask.namespace_id,
            ask.keys[:goal],
            ask.skip_blocks,
            in_files=ask.in_files,
            refined=ask.refined,
        ).hit_blocks


def _race(ask: Ask, goal: int, hit: int) -> Race | None:
    """Return the terms on which to wait: all of it has to be computed by the other engine first."""
    stakes = ask.stakes(Match(goal, hit))
    if stakes is None:
        return None
    return Race(stakes, PATIENCE * stakes.prompt_s, None, elsewhere_s=stakes.saved_s)
