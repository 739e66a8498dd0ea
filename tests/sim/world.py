"""One seed: a daemon, its disk and its engines, through power cuts, kills and restarts."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass, field, replace
from random import Random
from typing import Any

from kvstore.model.block import PAGE_NBYTES
from tests.sim.daemon import Daemon, Framed, Settings
from tests.sim.disk import Platter
from tests.sim.engine import Engine, Wire
from tests.sim.loop import SimLoop, Stuck
from tests.sim.model import SPACES, Item, Model, Violation
from tests.sim.sealing import recorded

ENGINES = 3
ENCRYPTED_EVERY = 4  # of so many seeds, one is; it goes through all kinds of records
LIVES = (2, 4)
LIFE_S = 2.2  # mean
DRAIN_S = 10.0
ASKED_FIRST = 5
CHECK_EVERY_S = 0.25


@dataclass(slots=True)
class Outcome:
    """What one seed found. Counts are there to see that it did something. kind: of the records."""

    seed: int
    kind: str = ""
    violations: list[str] = field(default_factory=list)
    calls: int = 0
    loads: int = 0
    files_read: int = 0
    lives: int = 0
    durable: int = 0
    faults: int = 0
    rotten: int = 0
    evicted: int = 0
    away: int = 0
    taken_out: int = 0
    fine_served: int = 0
    thinned: int = 0
    encrypted: int = 0
    nonces: int = 0
    nonce_reused: int = 0

    def count(self, kind: str) -> int:
        return sum(text.startswith(f"{kind}:") for text in self.violations)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_seed(seed: int) -> Outcome:
    """Simulate one seed, all of it on a loop of its own."""
    draw = Random(seed)
    loop = SimLoop(draw)
    world = World(loop, seed, draw)
    with recorded() as nonces:
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
    """See the module."""

    def __init__(self, loop: SimLoop, seed: int, draw: Random) -> None:
        self.outcome = Outcome(seed)
        self._loop = loop
        self._draw = draw
        # Not drawn, so that a seed takes the same course whether or not it is encrypted.
        is_encrypted = seed % ENCRYPTED_EVERY == ENCRYPTED_EVERY - 1
        self._settings = replace(Settings.drawn(draw), encrypted=is_encrypted)
        self.outcome.encrypted = int(is_encrypted)
        self._platters = [Platter() for _ in range(self._settings.devices)]
        self._model = Model(SPACES[seed % len(SPACES)])
        self.outcome.kind = self._model.space.kind
        self._wire = Wire(draw, self._note)
        self._rewritten: set[Item] = set()  # to another device, while its own was out
        self._doubtful: set[Item] = set()  # of these, what may have been freed there
        self._copies: set[tuple[Item, Framed]] = set()  # that ever were durable
        self._rotten: set[tuple[int, int, int]] = set()  # device, segment, offset of the page

    async def run(self) -> None:
        expected: dict[Item, Framed] = {}
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

    async def _start(self, expected: dict[Item, Framed]) -> Daemon:
        """Start a daemon on what the last one left and look at everything it found."""
        self.outcome.lives += 1
        self._model.restart()
        daemon = Daemon(self._loop, self._platters, self._model, self._draw, self._settings)
        daemon.rewritten = self._rewritten
        if self.outcome.lives > 1 and len(daemon.disks) > 1 and self._draw.random() < 0.3:
            self._draw.choice(daemon.disks).away = True
            self.outcome.away += 1
        try:
            known = sorted({item.key for item in expected})
            asked = self._draw.sample(known, k=min(len(known), ASKED_FIRST))
            await daemon.start(expected, asked)
            daemon.check()
            await daemon.read_back(expected)
            daemon.trouble(self._draw)
        except Violation as error:
            self._note(error)
        self._model.owed = {item: record.checksum for item, record in daemon.framed().items()}
        self._wire.arrive(daemon)
        return daemon

    async def _live(self, daemon: Daemon, ends: Any) -> dict[Item, Framed]:
        engines = [
            Engine(
                f"engine {i} of life {self.outcome.lives}",
                self._wire,
                self._draw,
                self._note,
                self._model.space,
            )
            for i in range(ENGINES)
        ]
        tasks = [asyncio.create_task(engine.run()) for engine in engines]
        end = self._loop.time() + self._draw.expovariate(1 / LIFE_S)
        while self._loop.time() < end and not self.outcome.violations:
            await asyncio.sleep(self._draw.uniform(0, 2 * CHECK_EVERY_S))
            self._look(daemon)
        expected: dict[Item, Framed] = await ends(daemon, tasks)
        self.outcome.loads += sum(engine.loads for engine in engines)
        self.outcome.files_read += sum(engine.files_read for engine in engines)
        self.outcome.calls = self._wire.calls
        self.outcome.durable += len(expected)
        self.outcome.faults += sum(disk.faults for disk in daemon.disks)
        self.outcome.taken_out += daemon.taken_out
        self.outcome.evicted += daemon.evicted
        self.outcome.fine_served += daemon.fine_served
        self.outcome.thinned += daemon.planner.counts.thinned
        return expected

    async def _die(self, daemon: Daemon, _: list[asyncio.Task[None]]) -> dict[Item, Framed]:
        """Kill the daemon, most often by cutting the power of its machine."""
        self._look(daemon)
        durable = daemon.durable()
        daemon.pull_the_plug()
        self._wire.daemon = None
        flying = self._wire.grounded()
        await self._stop_everything()
        await daemon.arena.close()
        self._wire.fly(flying)
        # After a failed sync the page cache shows the next process what never was written, and
        # nothing says so. Only a kill within milliseconds of it, and then a cut, can meet that.
        if self._draw.random() < 0.8 or any(platter.dropped for platter in self._platters):
            for platter in self._platters:
                platter.lose_power(self._draw)
            if self._settings.rots:
                self._rot()
        return self._sound(daemon, durable)

    async def _close(self, daemon: Daemon, engines: list[asyncio.Task[None]]) -> dict[Item, Framed]:
        """Stop the engines, see that nothing is left of them, and drain the daemon."""
        for task in engines:
            task.cancel()
        await asyncio.gather(*engines, return_exceptions=True)
        self._wire.daemon = None
        self._wire.grounded()
        await asyncio.sleep(DRAIN_S)  # what was being carried out ends
        self._look(daemon)
        stats = daemon.store.report.stats()
        held = (stats["leases"], stats["dram"]["leased_bytes"], stats["dram"]["limbo_bytes"])
        if any(held) or stats["file"]["leased_bytes"]:
            self._note(Violation("leaked", f"leases, leased bytes, limbo bytes: {held}"))
        resident = sum(
            -(-record.nbytes // PAGE_NBYTES) * PAGE_NBYTES
            for _, record in daemon.records()
            if record.resident is not None
        )
        if resident != daemon.arena.physical_nbytes:
            used = daemon.arena.physical_nbytes
            self._note(Violation("leaked", f"{used} bytes of arena used for {resident} of records"))
        if not await daemon.store.puts.flush(DRAIN_S) and not self._settings.failing:
            self._note(Violation("lost", "flush did not end in time"))
        self._look(daemon)
        await daemon.store.close(DRAIN_S)
        expected = self._sound(daemon, daemon.durable())
        daemon.pull_the_plug()
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
            device = self._draw.randrange(len(self._platters))
            hit = self._platters[device].rot(self._draw)
            if hit is not None:
                self.outcome.rotten += 1
                segment = int(hit[0].partition("-")[0], 16)
                self._rotten.add((device, segment, hit[1] * PAGE_NBYTES))

    def _sound(self, daemon: Daemon, durable: dict[Item, Framed]) -> dict[Item, Framed]:
        """Return what must survive: not blocks of which any copy was ever hit, because it may be
        the newest one; nor what was evicted, or given up because a sync failed, on one device while
        another one had it and was out: after a power cut, what is left of the freed frame may be
        taken for the newer one."""
        self._doubtful |= daemon.given_up
        if daemon.evicted:
            self._doubtful |= self._rewritten
        durable = {item: framed for item, framed in durable.items() if item not in self._doubtful}
        self._copies.update(durable.items(), daemon.out.items())
        lost = {item.key for item, framed in self._copies if self._is_hit(framed)}
        return {item: framed for item, framed in durable.items() if item.key not in lost}

    def _is_hit(self, framed: Framed) -> bool:
        begin, end = framed.extent.offset, framed.extent.offset + framed.extent.nbytes
        return any(
            (device, segment) == (framed.device, framed.extent.segment) and begin <= at < end
            for device, segment, at in self._rotten
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
