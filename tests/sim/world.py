"""One seed: a daemon, its disk and its engines, through power cuts, kills and restarts."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any

from kvstore.block import PAGE_NBYTES
from kvstore.tier.file import FileExtent
from tests.sim.daemon import Daemon, Framed, Settings
from tests.sim.disk import Platter
from tests.sim.engine import Engine, Wire
from tests.sim.loop import SimLoop, Stuck
from tests.sim.model import Item, Model, Violation

ENGINES = 3
LIVES = (2, 4)
LIFE_S = 2.2  # mean
DRAIN_S = 10.0
ASKED_FIRST = 5
CHECK_EVERY_S = 0.25


@dataclass(slots=True)
class Outcome:
    """What one seed found. Counts are there to see that it did something."""

    seed: int
    violations: list[str] = field(default_factory=list)
    calls: int = 0
    loads: int = 0
    lives: int = 0
    durable: int = 0
    faults: int = 0
    rotten: int = 0
    evicted: int = 0

    def count(self, kind: str) -> int:
        return sum(text.startswith(f"{kind}:") for text in self.violations)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_seed(seed: int) -> Outcome:
    """Simulate one seed, all of it on a loop of its own."""
    draw = Random(seed)
    loop = SimLoop(draw)
    world = World(loop, seed, draw)
    try:
        loop.run_until_complete(world.run())
    except Stuck:
        world.outcome.violations.append("bug: everything waits for something that never comes")
    finally:
        loop.close()
    world.outcome.violations += [f"bug: {text}" for text in loop.unhandled]
    return world.outcome


class World:
    """See the module."""

    def __init__(self, loop: SimLoop, seed: int, draw: Random) -> None:
        self.outcome = Outcome(seed)
        self._loop = loop
        self._draw = draw
        self._settings = Settings.drawn(draw)
        self._platter = Platter()
        self._model = Model()
        self._wire = Wire(draw, self._note)
        self._rotten: set[tuple[int, int]] = set()  # segment, offset of the page

    async def run(self) -> None:
        expected: dict[Item, int] = {}
        lives = self._draw.randint(*LIVES)
        for life in range(lives):
            daemon = await self._start(expected)
            if self.outcome.violations:
                return
            last = life == lives - 1
            ends = self._close if last or self._draw.random() < 0.2 else self._die
            expected = await self._live(daemon, ends)
            if self.outcome.violations:
                return
        await self._close(await self._start(expected), [])

    async def _start(self, expected: dict[Item, int]) -> Daemon:
        """Start a daemon on what the last one left and look at everything it found."""
        self.outcome.lives += 1
        self._model.restart()
        daemon = Daemon(self._loop, self._platter, self._model, self._draw, self._settings)
        try:
            known = sorted({item.key for item in expected})
            await daemon.start(self._draw.sample(known, k=min(len(known), ASKED_FIRST)))
            daemon.check()
            await daemon.read_back(expected)
        except Violation as error:
            self._note(error)
        self._model.owed = {item: record.checksum for item, record in daemon.framed().items()}
        self._wire.arrive(daemon)
        return daemon

    async def _live(self, daemon: Daemon, ends: Any) -> dict[Item, int]:
        engines = [
            Engine(f"engine {i} of life {self.outcome.lives}", self._wire, self._draw, self._note)
            for i in range(ENGINES)
        ]
        tasks = [asyncio.create_task(engine.run()) for engine in engines]
        end = self._loop.time() + self._draw.expovariate(1 / LIFE_S)
        while self._loop.time() < end and not self.outcome.violations:
            await asyncio.sleep(self._draw.uniform(0, 2 * CHECK_EVERY_S))
            self._look(daemon)
        expected: dict[Item, int] = await ends(daemon, tasks)
        self.outcome.loads += sum(engine.loads for engine in engines)
        self.outcome.calls = self._wire.calls
        self.outcome.durable += len(expected)
        self.outcome.faults += daemon.disk.faults
        self.outcome.evicted += daemon.planner.counts.evicted_file
        return expected

    async def _die(self, daemon: Daemon, _: list[asyncio.Task[None]]) -> dict[Item, int]:
        """Kill the daemon, most often by cutting the power of its machine."""
        self._look(daemon)
        durable = daemon.framed()
        daemon.disk.dead = True
        self._wire.daemon = None
        flying = self._wire.grounded()
        await self._stop_everything()
        await daemon.arena.close()
        self._wire.fly(flying)
        # After a failed sync the page cache shows the next process what never was written, and
        # nothing says so. Only a kill within milliseconds of it, and then a cut, can meet that.
        if self._draw.random() < 0.8 or self._platter.dropped:
            self._platter.lose_power(self._draw)
            if self._settings.rots:
                self._rot()
        return self._sound(durable)

    async def _close(self, daemon: Daemon, engines: list[asyncio.Task[None]]) -> dict[Item, int]:
        """Stop the engines, see that nothing is left of them, and drain the daemon."""
        for task in engines:
            task.cancel()
        await asyncio.gather(*engines, return_exceptions=True)
        self._wire.daemon = None
        self._wire.grounded()
        await asyncio.sleep(DRAIN_S)  # what was being carried out ends
        self._look(daemon)
        stats = daemon.store.stats()
        held = (stats["leases"], stats["dram"]["leased_bytes"], stats["dram"]["limbo_bytes"])
        if any(held):
            self._note(Violation("leaked", f"leases, leased bytes, limbo bytes: {held}"))
        resident = sum(
            -(-record.nbytes // PAGE_NBYTES) * PAGE_NBYTES
            for _, record in daemon.records()
            if record.resident is not None
        )
        if resident != daemon.arena.physical_nbytes:
            used = daemon.arena.physical_nbytes
            self._note(Violation("leaked", f"{used} bytes of arena used for {resident} of records"))
        if not await daemon.store.flush(DRAIN_S) and not self._settings.failing:
            self._note(Violation("lost", "flush did not end in time"))
        self._look(daemon)
        await daemon.store.close(DRAIN_S)
        expected = self._sound(daemon.framed())
        daemon.disk.dead = True
        await self._stop_everything()
        return expected

    async def _stop_everything(self) -> None:
        """End every task but this one; the disk they use is dead."""
        me = asyncio.current_task()
        while tasks := [task for task in asyncio.all_tasks() if task is not me]:
            for task in sorted(tasks, key=lambda task: task.get_name()):
                task.cancel()
            await asyncio.wait(tasks, timeout=1.0)

    def _rot(self) -> None:
        """Flip bits, where the platter says."""
        for _ in range(self._draw.randint(1, 3)):
            hit = self._platter.rot(self._draw)
            if hit is not None:
                self.outcome.rotten += 1
                self._rotten.add((int(hit[0].partition("-")[0], 16), hit[1] * PAGE_NBYTES))

    def _sound(self, durable: dict[Item, Framed]) -> dict[Item, int]:
        """Return checksums, but for blocks in frames that were ever hit: they may be lost."""
        lost = {item.key for item, record in durable.items() if self._is_hit(record.extent)}
        return {item: r.checksum for item, r in durable.items() if item.key not in lost}

    def _is_hit(self, extent: FileExtent) -> bool:
        end = extent.offset + extent.nbytes
        return any(
            segment == extent.segment and extent.offset <= at < end for segment, at in self._rotten
        )

    def _look(self, daemon: Daemon) -> None:
        try:
            daemon.check()
        except Violation as error:
            self._note(error)

    def _note(self, error: BaseException) -> None:
        if isinstance(error, Violation):
            self.outcome.violations.append(str(error))
        else:
            self.outcome.violations.append(f"bug: {error!r}")
