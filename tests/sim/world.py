"""One seed: a daemon, its disks and its engines, through power cuts, kills and restarts."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random
from typing import Any
from unittest.mock import patch

from kvstore.model.tenant import NO_TENANT_ID, tenant_id
from kvstore.store import lending
from kvstore.store.lending import FilePart, Lending
from tests.sim.daemon import Settings
from tests.sim.loop import SimLoop, Stuck
from tests.sim.model import SPACES, Model, Violation
from tests.sim.outcome import Outcome
from tests.sim.sealing import recorded
from tests.sim.side import DRAIN_S, Side, stop_everything

ENCRYPTED_EVERY = 4  # of so many seeds, one is; it goes through all kinds of records
TENANTS_EVERY = 8  # and every other of these has two tenants
OWNERS = (tenant_id("acme"), tenant_id("beta"))
GUARANTEED_NBYTES = 512 << 10  # of the files of all devices, for each tenant
LENT_NBYTES = 512 << 10  # to whom it is of use
STEP_NBYTES = 64 << 10  # by which that room moves; a daemon's is larger than all of it
LIVES = (2, 4)
LIFE_S = 2.2  # mean
CHECK_EVERY_S = 0.25


def run_seed(seed: int) -> Outcome:
    """Simulate one seed, all of it on a loop of its own."""
    draw = Random(seed)
    loop = SimLoop(draw)
    world = World(loop, seed, draw)
    with recorded() as nonces, patch.object(lending, "STEP_NBYTES", STEP_NBYTES):
        try:
            loop.run_until_complete(world.run())
        except Stuck:
            world.outcome.violations.append("bug: everything waits for something that never comes")
        finally:
            loop.close()
    world.outcome.nonces, world.outcome.nonce_reused = len(nonces.used), nonces.reused
    if nonces.reused:
        world.outcome.violations.append(f"wrong: {nonces.reused} nonces were used again")
    world.outcome.violations += [f"bug: {text}" for text in loop.unhandled]
    return world.outcome


class World:
    """See the module. Of two tenants, each has a `Side`; they live and die together."""

    def __init__(self, loop: SimLoop, seed: int, draw: Random) -> None:
        self.outcome = Outcome(seed)
        self._loop = loop
        self._draw = draw
        # Not drawn, so that a seed takes the same course whether or not it is encrypted.
        is_encrypted = seed % ENCRYPTED_EVERY == ENCRYPTED_EVERY - 1
        owners = OWNERS if seed % TENANTS_EVERY == TENANTS_EVERY - 1 else (NO_TENANT_ID,)
        settings = replace(Settings.drawn(draw), encrypted=is_encrypted)
        if len(owners) > 1:
            settings = replace(settings, file_bytes=GUARANTEED_NBYTES // settings.devices)
        self._settings = settings
        models = [Model(SPACES[seed % len(SPACES)], owner) for owner in owners]
        for model in models:
            model.others = [other for other in models if other is not model]
        self._sides = [Side(loop, draw, settings, model, self._note) for model in models]
        self._lending: Lending | None = None
        self.outcome.encrypted = int(is_encrypted)
        self.outcome.tenants = len(owners) if len(owners) > 1 else 0
        self.outcome.kind = models[0].space.kind

    async def run(self) -> None:
        lives = self._draw.randint(*LIVES)
        for life in range(lives):
            await self._start()
            if self.outcome.violations:
                return
            last = life == lives - 1
            ends = self._close if last or self._draw.random() < 0.2 else self._die
            await self._live(ends)
            if self.outcome.violations:
                return
        await self._start()
        await self._close([])

    async def _start(self) -> None:
        """Start every store on what the last life left."""
        self.outcome.lives += 1
        for side in self._sides:
            await side.start(again=self.outcome.lives > 1)
        self.outcome.away = sum(side.away for side in self._sides)
        if len(self._sides) > 1 and not self.outcome.violations:
            self._lend()

    def _lend(self) -> None:
        """Let the tenants have what is free of each other's room in files."""
        room = self._lending = Lending(len(self._sides) * GUARANTEED_NBYTES + LENT_NBYTES)
        turn = asyncio.Lock()
        for number, side in enumerate(self._sides):
            store = side.daemon.store
            room.add(str(number), FilePart(store, GUARANTEED_NBYTES, room.capacity_bytes, 1.0))
            side.daemon.lent = True
            side.daemon.shares_turn(turn)
        self._lends = asyncio.create_task(room.run())

    async def _live(self, ends: Any) -> None:
        engines = [engine for side in self._sides for engine in side.engines(self.outcome.lives)]
        tasks = [asyncio.create_task(engine.run()) for engine in engines]
        end = self._loop.time() + self._draw.expovariate(1 / LIFE_S)
        while self._loop.time() < end and not self.outcome.violations:
            await asyncio.sleep(self._draw.uniform(0, 2 * CHECK_EVERY_S))
            self._look()
        await ends(tasks)
        outcome = self.outcome
        outcome.loads += sum(engine.loads for engine in engines)
        outcome.files_read += sum(engine.files_read for engine in engines)
        outcome.calls = sum(side.wire.calls for side in self._sides)
        outcome.rotten = sum(side.rotten_pages for side in self._sides)
        for side in self._sides:
            daemon = side.daemon
            outcome.durable += len(side.expected)
            outcome.faults += sum(disk.faults for disk in daemon.disks)
            outcome.taken_out += daemon.taken_out
            outcome.evicted += daemon.evicted
            outcome.fine_served += daemon.fine_served
            outcome.thinned += daemon.planner.counts.thinned

    async def _die(self, _: list[asyncio.Task[None]]) -> None:
        """Kill the daemon, most often by cutting the power of its machine."""
        for side in self._sides:
            side.kill()
        await stop_everything()
        for side in self._sides:
            await side.bury()
        # After a failed sync the page cache shows the next process what never was written, and
        # nothing says so. Only a kill within milliseconds of it, and then a cut, can meet that.
        dropped = any(platter.dropped for side in self._sides for platter in side.platters)
        if self._draw.random() < 0.8 or dropped:
            for side in self._sides:
                side.lose_power()
        for side in self._sides:
            side.ended()

    async def _close(self, engines: list[asyncio.Task[None]]) -> None:
        """Stop the engines, see that nothing is left of them, and drain the daemon."""
        for task in engines:
            task.cancel()
        await asyncio.gather(*engines, return_exceptions=True)
        for side in self._sides:
            side.wire.daemon = None
            side.wire.grounded()
        await asyncio.sleep(DRAIN_S)  # what was being carried out ends
        for side in self._sides:
            await side.close()
        await stop_everything()

    def _look(self) -> None:
        for side in self._sides:
            side.look()
        if self._lending is None:
            return
        parts = [self._lending.part(str(number)) for number in range(len(self._sides))]
        self.outcome.lent += any(part is not None and part.used > part.guaranteed for part in parts)
        excess = sum(side.daemon.file_nbytes for side in self._sides) - self._lending.capacity_bytes
        if excess > sum(side.daemon.tombstones_nbytes for side in self._sides):
            self._note(Violation("leaked", f"all tenants are {excess} bytes over the cap"))

    def _note(self, error: BaseException) -> None:
        if isinstance(error, Violation):
            self.outcome.violations.append(str(error))
        else:
            self.outcome.violations.append(f"bug: {error!r}")
