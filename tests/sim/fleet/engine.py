"""Engines of a fleet: they save some chains, load all, and delete for one host or for all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from kvstore.model.block import BlockKey, Grant
from kvstore.model.member import Origin
from tests.sim.daemon import Daemon
from tests.sim.engine import Engine
from tests.sim.fleet.daemon import FleetDaemon


class FleetEngine(Engine):
    """An engine of one host, which saves some chains and loads all."""

    think_s = 0.12

    def __init__(self, *args: Any, nodes: Sequence[str], at: int) -> None:
        """nodes: of all hosts. at: which of these is its own."""
        super().__init__(*args)
        self._nodes = nodes
        self._own = self._space.chains[at % len(nodes) :: len(nodes)]
        self._hit = self._own[0]

    def _ops(self) -> list[Callable[[Daemon], Awaitable[None]]]:
        often = [self._save] * 8 + [self._load] * 16 + [self._load_parts] * 2
        return [*often, self._delete, self._flush, self._hint]

    def _chain_to_save(self) -> list[BlockKey]:
        return self._draw.choice(self._own if self._draw.random() < 0.8 else self._space.chains)

    async def _read(self, daemon: Daemon, keys: list[BlockKey], spans: Any) -> None:
        draw, origin = self._draw, None
        if spans is None and draw.random() < 0.2:
            expected = draw.choice([0, len(keys)])
            origin = Origin(draw.choice([*self._nodes, "10.9.9.9:22"]), expected)
        recompute_s = draw.choice([0.0, 0.0, 0.002, 0.02])
        session, readers = self._session, len(self._processes)
        in_files, refined = draw.random() < 0.5, draw.random() < 0.2
        refined = refined and bool(self._space.fine)

        async def acquire(d: Daemon) -> Grant:
            assert isinstance(d, FleetDaemon)
            return await d.acquire(
                session,
                keys,
                spans,
                readers,
                in_files=in_files,
                refined=refined,
                origin=origin,
                recompute_s=recompute_s,
            )

        grant = await self._wire.call(acquire)
        if grant.hit_blocks and spans is None:
            self._hit = next(chain for chain in self._space.chains if keys[0] in chain)
        if grant.leased and (any(grant.slots) or any(grant.places)):
            reads = (self._read_in(p, daemon, session, keys, grant) for p in self._processes)
            for outcome in await asyncio.gather(*reads, return_exceptions=True):
                if isinstance(outcome, BaseException):
                    raise outcome

    async def _delete(self, daemon: Daemon) -> None:
        """Delete some blocks of a chain, most often one that others may have as well, and ask for
        them meanwhile."""
        chain = self._draw.choice([self._hit, self._hit, *self._space.chains[:1]])
        keys = self._draw.sample(chain, self._draw.randint(1, len(chain)))
        everywhere = self._draw.random() < 0.6
        work: Any = FleetDaemon.delete_everywhere if everywhere else FleetDaemon.delete
        deleting = asyncio.create_task(self._wire.call(lambda d: work(d, keys)))
        try:
            for _ in range(self._draw.choice([0, 2, 6])):
                await asyncio.sleep(self._draw.expovariate(1 / 0.1))
                await self._read(daemon, chain, None)
        finally:
            await asyncio.gather(deleting, return_exceptions=True)

    async def _clear(self, daemon: Daemon) -> None:
        chosen = self._draw.random()
        if chosen < 0.05:
            await self._wire.call(lambda d: d.clear())
        elif chosen < 0.1:
            whole = self._draw.random() < 0.3
            clear: Any = FleetDaemon.clear_everywhere
            await self._wire.call(lambda d: clear(d, all_namespaces=whole))
