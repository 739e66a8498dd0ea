"""One seed of a fleet: hosts that die, drain and come back, on a network that has bad days."""

from __future__ import annotations

import asyncio
import random
import traceback
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from kvstore.model.block import Group, Namespace
from kvstore.model.errors import Unavailable
from kvstore.move.peers import Peers
from tests.sim.daemon import ARENA_BYTES, Settings
from tests.sim.fleet.bucket import SimObjects
from tests.sim.fleet.daemon import World
from tests.sim.fleet.engine import FleetEngine
from tests.sim.fleet.etcd import SimEtcd, SimEtcdCalls
from tests.sim.fleet.host import Host, Told
from tests.sim.fleet.network import Network, Weather
from tests.sim.fleet.truth import Truth
from tests.sim.loop import SimLoop, Stuck
from tests.sim.model import BASE_NBYTES, FINE_NBYTES, Space, Violation
from tests.sim.outcome import Outcome
from tests.sim.side import stop_everything

LIFE_S = 30.0  # of the whole fleet
LOOK_EVERY_S = 0.5
EVENT_EVERY_S = 2.5  # mean: something goes wrong
QUIET_S = 80.0  # longer than what a fleet remembers, believes, or waits before it tries again: a
# disk that has failed often is tried every 60 s, and deletes that it missed 15 s later
SHARE_S = 5.0  # in which heads have come to all
HUNG_S = 600.0  # of virtual time: no seed takes as long
KEPT_S = (900.0, 900.0, 30.0)  # for which etcd keeps deletes: for longer than most are away
BEHIND_S = 25.0  # in which whoever reaches etcd has applied a delete: it looks every 15 s
CHAINS = 8
TOKENS = 64  # of a block: every fourth is a head


def _spaces() -> tuple[Space, ...]:
    """Return the kinds of records of tests.sim.model, in blocks of which some are heads."""
    window = 2 * TOKENS + 1
    full = [Group("full", 6000), Group("w", 4096, window)]
    varies = [replace(group, varies=True) for group in full]
    bases = [Group(f"{w}", 6000, window_tokens=w, varies=True) for w in (0, window)]
    fine = [
        Group(f"{w}.fine", FINE_NBYTES, window_tokens=w, refines=at, base_nbytes=BASE_NBYTES)
        for at, w in enumerate((0, window))
    ]
    return (
        Space("fixed", Namespace(TOKENS, tuple(full), ()), CHAINS),
        Space("varies", Namespace(TOKENS, tuple(varies), ()), CHAINS),
        Space("lossy", Namespace(TOKENS, (*bases, *fine), (), fidelity="ep"), CHAINS),
    )


SPACES = _spaces()


def run_fleet_seed(seed: int, stores: int) -> Outcome:
    """Simulate one seed with several stores, all of it on a loop of its own."""
    draw = Random(f"fleet {seed}")
    random.seed(seed)  # the product's own choices: pauses, and the order of equals
    loop = SimLoop(draw)
    fleet = Fleet(loop, seed, stores, draw)
    chance = SimpleNamespace(urandom=draw.randbytes)
    with (
        patch("kvstore.membership.etcd.EtcdCalls", SimEtcdCalls),
        patch("kvstore.tier.object.deletes.os", chance),
    ):
        try:
            loop.run_until_complete(fleet.run())
        except Stuck:
            fleet.outcome.violations.append("hung: everything waits for what never comes")
        finally:
            loop.close()
    fleet.outcome.violations += [f"bug: {text}" for text in loop.unhandled]
    return fleet.outcome


class Fleet:
    """See the module."""

    def __init__(self, loop: SimLoop, seed: int, stores: int, draw: Random) -> None:
        space = SPACES[seed % len(SPACES)]
        self.outcome = Outcome(seed, kind=space.kind, stores=stores)
        self._loop = loop
        self._draw = draw
        self.network = Network(draw, self._note)
        self.network.weather = Weather.drawn(draw)
        self.etcd = SimEtcd(loop, draw)
        ahead_s = draw.uniform(-1e5, 1e5)
        self.objects = SimObjects(draw, ahead_s)
        shares_bucket = draw.random() < 0.4
        with_bucket = [shares_bucket and draw.random() < 0.7 for _ in range(stores)]
        nodes = [f"{n + 1:032x}" for n in range(stores)]
        sharing = [node for node, has in zip(nodes, with_bucket, strict=True) if has]
        truth = Truth(space, sharing, loop.time)
        truth.is_behind, truth.is_blind = self._is_behind, self._is_blind
        self.world = World(
            loop,
            draw,
            self.network,
            self.etcd,
            self.objects,
            truth,
            self._note,
            draw.choice(KEPT_S),
        )
        self.hosts = [
            Host(self.world, n, _settings(draw, seed + n), with_bucket=with_bucket[n])
            for n in range(stores)
        ]
        self._engines: dict[Host, list[asyncio.Task[None]]] = {}
        self._made: dict[Host, list[FleetEngine]] = {}
        self._changing: dict[asyncio.Task[None], Host] = {}
        self._twins: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        helpers = [asyncio.create_task(self.etcd.expire())]
        try:
            async with asyncio.timeout(HUNG_S):
                await self._run()
        except TimeoutError:
            self._note(Violation("hung", f"not over after {HUNG_S:.0f} s"))
        finally:
            for task in helpers:
                task.cancel()
            await stop_everything()

    async def _run(self) -> None:
        for host in self.hosts:
            await self._begin(host)
        helpers = [asyncio.create_task(self._look()), asyncio.create_task(self._trouble())]
        try:
            await asyncio.wait(helpers[:1], timeout=self._draw.uniform(0.6, 1.4) * LIFE_S)
        finally:
            for task in helpers:
                task.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
        if not self.outcome.violations:
            await self._rest()
        self._count()

    # ---- hosts -----------------------------------------------------------------------------------

    async def _begin(self, host: Host) -> None:
        await host.begin()
        self.outcome.lives += 1
        nodes = [each.node for each in self.hosts]
        wire, draw, space = host.wire, self._draw, self.world.truth.space
        engines = [
            FleetEngine(
                f"{host.owner} engine {n}",
                wire,
                draw,
                self._note,
                space,
                nodes=nodes,
                at=host.number,
            )
            for n in range(draw.choice([1, 1, 2]))
        ]
        self._made.setdefault(host, []).extend(engines)
        # Their calls are carried out by tasks that they make: those die with the host.
        self._engines[host] = [host.start_in_own(engine.run()) for engine in engines]

    def _stop_engines(self, host: Host) -> list[asyncio.Task[None]]:
        engines = self._engines.pop(host, [])
        for task in engines:
            task.cancel()
        return engines

    async def _crash(self, host: Host) -> None:
        self._stop_engines(host)
        self._tally(host)
        await host.crash()
        await asyncio.sleep(self._draw.choice([0.2, 2.0, 12.0]) * self._draw.random())
        await self._begin(host)

    async def _drain(self, host: Host) -> None:
        await host.drain(self._stop_engines(host))
        self._tally(host)
        await asyncio.sleep(self._draw.expovariate(1 / self._draw.choice([2.0, 8.0])))
        await self._begin(host)

    def _change(self, host: Host, work: Callable[[Host], Coroutine[Any, Any, None]]) -> None:
        """Let a host go and come back, unless it does so already."""
        if host.up and host not in self._changing.values():
            task = self._loop.create_task(work(host))
            self._changing[task] = host
            task.add_done_callback(self._changed)

    def _changed(self, task: asyncio.Task[None]) -> None:
        del self._changing[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._note(error)

    # ---- trouble ---------------------------------------------------------------------------------

    async def _trouble(self) -> None:
        """Let things go wrong, one after the other; each gets better by itself."""
        draw = self._draw
        kinds = [self._storm] * 3 + [self._part] * 3 + [self._etcd_goes] * 2
        kinds += [self._bucket_goes, self._disks_fail, self._twin]
        while True:
            await asyncio.sleep(draw.expovariate(1 / EVENT_EVERY_S))
            host = draw.choice(self.hosts)
            chosen = draw.random()
            if chosen < 0.25:
                self._change(host, self._crash)
            elif chosen < 0.36:
                self._change(host, self._drain)
            else:
                draw.choice(kinds)(host)

    def _storm(self, _: Host) -> None:
        self.network.weather = Weather.drawn(self._draw)

    def _part(self, host: Host) -> None:
        """Part the network: one host, or a half of them, one way or both."""
        draw, nodes = self._draw, [each.node for each in self.hosts]
        some = [host.node] if draw.random() < 0.5 else draw.sample(nodes, len(nodes) // 2)
        rest = [node for node in nodes if node not in some]
        ways = draw.choice([(1, 0), (0, 1), (1, 1)])
        if ways[0]:
            self.network.block(some, rest)
        if ways[1]:
            self.network.block(rest, some)
        self.outcome.partitions += 1
        self._loop.call_later(draw.expovariate(1 / 3.0), self.network.heal)

    def _etcd_goes(self, host: Host) -> None:
        draw, etcd = self._draw, self.etcd
        chosen = draw.random()
        if chosen < 0.4:
            etcd.cut_off.add(host.node)
            self._loop.call_later(draw.expovariate(1 / 5.0), etcd.cut_off.discard, host.node)
        elif chosen < 0.8:
            etcd.away = True
            self._loop.call_later(draw.expovariate(1 / 8.0), setattr, etcd, "away", False)
        else:
            etcd.empty()
            self.world.truth.forget_kept()

    def _bucket_goes(self, _: Host) -> None:
        objects, draw = self.objects, self._draw
        objects.calm()
        objects.failing, objects.flipped = draw.choice([0.0, 0.1]), draw.choice([0.0, 0.02])
        objects.away = draw.random() < 0.3
        self._loop.call_later(draw.expovariate(1 / 3.0), objects.calm)

    def _disks_fail(self, host: Host) -> None:
        if host.up:
            host.daemon.trouble(self._draw)

    def _twin(self, host: Host) -> None:
        """Start another daemon with the node id of this one, as somebody does who copies a disk."""
        if host.up and self.etcd.has(host.node):
            task = self._loop.create_task(self._refused(host))
            self._twins.add(task)
            task.add_done_callback(self._twins.discard)

    async def _refused(self, host: Host) -> None:
        life, emptied = host.lives, self.etcd.emptied
        told = await host.start_twin()
        same = host.up and host.lives == life and self.etcd.emptied == emptied
        if told is Told.TAKEN and same and not self.etcd.away:
            self._note(Violation("bug", "a second daemon with a node id was not refused"))
        self.outcome.twins += told is Told.REFUSED

    # ---- deletes that hosts have not heard of ----------------------------------------------------

    def _is_behind(self, node: str, answered_at: float) -> bool:
        """Say whether a host need not know yet of a delete: it does not serve, or it did not reach
        etcd since for long enough. One that began since, with an etcd that answers, knows of it."""
        host = next(each for each in self.hosts if each.node == node)
        since = max(answered_at, self.etcd.missed_at(node))
        if not host.up:
            return True
        return host.began_at <= since and self._loop.time() - since <= BEHIND_S

    def _is_blind(self, node: str) -> bool:
        host = next((each for each in self.hosts if each.node == node), None)
        if host is None or not host.up:
            return False
        return host.kept is not None and not host.kept._begun

    # ---- looks -----------------------------------------------------------------------------------

    async def _look(self) -> None:
        while not self.outcome.violations:
            await asyncio.sleep(LOOK_EVERY_S)
            for host in self.hosts:
                if host.up:
                    host.look()

    async def _rest(self) -> None:
        """End all trouble, bring everybody up, wait, and see that nothing is left behind."""
        self.network.calm()
        self.objects.calm()
        self.etcd.away = False
        self.etcd.cut_off.clear()
        if going := [*self._changing, *self._twins]:
            await asyncio.wait(going)
        for host in self.hosts:
            await asyncio.gather(*self._stop_engines(host), return_exceptions=True)
            host.daemon.calm_disks()
        await asyncio.sleep(QUIET_S)
        for host in self.hosts:
            host.look()
            host.look_at_rest([each for each in self.hosts if each is not host])
        await self._share()
        for host in self.hosts:
            await host.drain([])
            self._tally(host)
        if self.network.links:
            text = f"{len(self.network.links)} links are open, and every host is gone"
            self._note(Violation("leaked", text))

    async def _share(self) -> None:
        """See that at rest a host reads what another one has, from there."""
        one, other = self._draw.sample(self.hosts, 2)
        try:
            keys = await one.run_in_own(one.put_anew())
        except Unavailable as error:  # what was leased and never released
            self._note(Violation("leaked", str(error)))
            return
        await asyncio.sleep(SHARE_S)
        assert other.peers is not None
        if any(peer.quarantined for peer in other.peers):
            return
        hit = await other.run_in_own(other.hit_of(keys))
        if hit < len(keys):
            text = f"at rest a host finds {hit} of {len(keys)} blocks that another one has"
            self._note(Violation("hung", text))

    def _tally(self, host: Host) -> None:
        """Add up what one life of a host did."""
        outcome, daemon = self.outcome, host.fleet_daemon
        outcome.copies += daemon.copies
        outcome.fleet_deletes += daemon.fleet_deletes
        outcome.fleet_refused += daemon.fleet_refused
        kept = daemon.metrics.totals().get("fleet_deletes", {})
        outcome.kept_applied += int(kept.get("applied", 0))
        outcome.dropped_all += int(kept.get("dropped_all", 0))
        outcome.evicted += daemon.evicted
        outcome.fine_served += daemon.fine_served
        outcome.taken_out += daemon.taken_out
        outcome.durable += len(host.expected)
        outcome.faults += sum(disk.faults for disk in daemon.disks)
        assert isinstance(host.peers, Peers)
        outcome.quarantined += sum(peer.quarantined for peer in host.peers)

    def _count(self) -> None:
        outcome = self.outcome
        engines = [engine for made in self._made.values() for engine in made]
        outcome.loads = sum(engine.loads for engine in engines)
        outcome.files_read = sum(engine.files_read for engine in engines)
        outcome.calls = sum(host.wire.calls for host in self.hosts)
        outcome.away = sum(host.away for host in self.hosts)
        outcome.rotten = sum(host.rotten_pages for host in self.hosts)
        outcome.messages = self.network.passed
        outcome.cuts, outcome.flips = self.network.cuts, self.network.flips
        outcome.encrypted = sum(host.encrypted for host in self.hosts)

    def _note(self, error: BaseException) -> None:
        if isinstance(error, Violation):
            self.outcome.violations.append(str(error))
            return
        frames = traceback.extract_tb(error.__traceback__)[-4:]
        where = " > ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in frames)
        self.outcome.violations.append(f"bug: {error!r} at {where}")


def _settings(draw: Random, number: int) -> Settings:
    """Return those of one host; some have little room in memory, or on disk."""
    settings = Settings.drawn(draw)
    arena = draw.choice([ARENA_BYTES, ARENA_BYTES, ARENA_BYTES // 4])
    return replace(settings, arena_bytes=arena, encrypted=number % 8 == 7)
