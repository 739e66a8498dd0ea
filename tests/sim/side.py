"""One store of a simulated machine: its disks, its engines, and what it has to keep."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

from kvstore.model.block import PAGE_NBYTES
from kvstore.model.tenant import TenantId
from kvstore.sealing import Sealing
from tests.sim.daemon import Daemon, Framed, Settings
from tests.sim.disk import Platter
from tests.sim.engine import Call, Engine, Wire
from tests.sim.loop import SimLoop
from tests.sim.model import Item, Model, Violation
from tests.sim.sealing import ROOT

ENGINES = 3
ASKED_FIRST = 5
DRAIN_S = 10.0


class Side:
    """A tenant's store, or the only one. note: takes what goes wrong."""

    def __init__(
        self,
        loop: SimLoop,
        draw: Random,
        settings: Settings,
        model: Model,
        note: Callable[[BaseException], None],
    ) -> None:
        self.model = model
        self.away = 0  # starts without one of the devices
        self.rotten_pages = 0
        self.encrypted = settings.encrypted
        self.platters = [Platter() for _ in range(settings.devices)]
        self.wire = Wire(draw, note)
        self.expected: dict[Item, Framed] = {}
        self._loop = loop
        self._draw = draw
        self._settings = settings
        self._note = note
        self._daemon: Daemon | None = None
        self._flying: list[Call] = []
        self._durable: dict[Item, Framed] = {}
        self._rewritten: set[Item] = set()  # to another device, while its own was out
        self._doubtful: set[Item] = set()  # of these, what may have been freed there
        self._copies: set[tuple[Item, Framed]] = set()  # that ever were durable
        self._rotten: set[tuple[int, int, int]] = set()  # device, segment, offset of the page

    @property
    def daemon(self) -> Daemon:
        assert self._daemon is not None
        return self._daemon

    async def start(self, *, again: bool) -> None:
        """Start on what the last life left and look at everything it found. again: it is not the
        first one."""
        await self.recover(again=again)
        self.wire.arrive(self.daemon)

    def new_daemon(self) -> Daemon:
        sealing = Sealing(ROOT, TenantId(self.model.owner)) if self._settings.encrypted else None
        return Daemon(
            self._loop, self.platters, self.model, self._draw, self._settings, sealing=sealing
        )

    async def recover(self, *, again: bool) -> None:
        """The same, without answering anybody."""
        self.model.restart()
        daemon = self._daemon = self.new_daemon()
        daemon.rewritten = self._rewritten
        if again and len(daemon.disks) > 1 and self._draw.random() < 0.3:
            self._draw.choice(daemon.disks).away = True
            self.away += 1
        try:
            known = sorted({item.key for item in self.expected})
            asked = self._draw.sample(known, k=min(len(known), ASKED_FIRST))
            await daemon.start(self.expected, asked)
            daemon.check()
            await daemon.read_back(self.expected)
            daemon.trouble(self._draw)
        except Violation as error:
            self._note(error)
        self.model.owed = {item: record.checksum for item, record in daemon.framed().items()}

    def engines(self, life: int) -> list[Engine]:
        """Return those of one life."""
        return [
            Engine(
                f"engine {i} of life {life}", self.wire, self._draw, self._note, self.model.space
            )
            for i in range(ENGINES)
        ]

    def look(self) -> None:
        """Compare what the daemon knows with what it should."""
        try:
            self.daemon.check()
        except Violation as error:
            self._note(error)

    # ---- a kill ------------------------------------------------------------------------------

    def kill(self) -> None:
        """Take the process away from the disks, in this moment."""
        self.look()
        self._durable = self.daemon.durable()
        self.daemon.pull_the_plug()
        self.wire.daemon = None
        self._flying = self.wire.grounded()

    async def bury(self) -> None:
        """Let go of the arena of a daemon that was killed and of which no task is left."""
        await self.daemon.arena.close()
        self.wire.fly(self._flying)

    def lose_power(self) -> None:
        for platter in self.platters:
            platter.lose_power(self._draw)
        if self._settings.rots:
            self._rot()

    def ended(self) -> None:
        """Take what survived of a daemon that was killed for what has to be there."""
        self.expected = self._sound(self._durable)

    # ---- a drain -----------------------------------------------------------------------------

    async def close(self) -> None:
        """See that nothing is left of the engines, which have ended, and drain the daemon."""
        daemon = self.daemon
        self.look()
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
        self.look()
        await daemon.store.close(DRAIN_S)
        self.expected = self._sound(daemon.durable())
        daemon.pull_the_plug()

    # ---- what has to survive -----------------------------------------------------------------

    def _rot(self) -> None:
        """Flip bits, where the platter says."""
        for _ in range(self._draw.randint(1, 3)):
            device = self._draw.randrange(len(self.platters))
            hit = self.platters[device].rot(self._draw)
            if hit is not None:
                self.rotten_pages += 1
                segment = int(hit[0].partition("-")[0], 16)
                self._rotten.add((device, segment, hit[1] * PAGE_NBYTES))

    def _sound(self, durable: dict[Item, Framed]) -> dict[Item, Framed]:
        """Return what must survive: not blocks of which any copy was ever hit, because it may be
        the newest one; nor what was evicted, or given up because a sync failed, on one device while
        another one had it and was out: after a power cut, what is left of the freed frame may be
        taken for the newer one."""
        self._doubtful |= self.daemon.given_up
        if self.daemon.evicted:
            self._doubtful |= self._rewritten
        durable = {item: framed for item, framed in durable.items() if item not in self._doubtful}
        self._copies.update(durable.items(), self.daemon.out.items())
        lost = {item.key for item, framed in self._copies if self._is_hit(framed)}
        return {item: framed for item, framed in durable.items() if item.key not in lost}

    def _is_hit(self, framed: Framed) -> bool:
        begin, end = framed.extent.offset, framed.extent.offset + framed.extent.nbytes
        return any(
            (device, segment) == (framed.device, framed.extent.segment) and begin <= at < end
            for device, segment, at in self._rotten
        )


async def stop_everything() -> None:
    """End every task but this one; the disks they use are dead."""
    me = asyncio.current_task()
    while tasks := [task for task in asyncio.all_tasks() if task is not me]:
        for task in sorted(tasks, key=lambda task: task.get_name()):
            task.cancel()
        await asyncio.wait(tasks, timeout=1.0)
