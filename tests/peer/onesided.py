"""Both ends of one-sided links in one process, over UCX's TCP and shared memory: there is no RDMA
device here. Opening a driver takes a while, so all tests of a module share two, and one event loop.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

import pytest

from kvstore.model.block import BlockKey, NamespaceId, Span
from kvstore.model.member import NodeId
from kvstore.peer.onesided.driver import Driver, DriverMissing
from kvstore.peer.onesided.mover import Mover
from kvstore.peer.tcp import TcpLink
from kvstore.testing.lender import MemoryLender, MemoryLoan
from tests.peer.fleet import BORROWER, LENDER, ourselves, served

TRANSPORTS = "tcp,sm,self"


def make_driver(name: str) -> Driver:
    """Open a driver of this process."""
    if name == "nixl":
        from kvstore.peer.onesided.nixl import NixlDriver

        return NixlDriver(os.urandom(8).hex())
    from kvstore.peer.onesided.ucx import UcxDriver

    return UcxDriver()


def skip_without(name: str) -> None:
    """Skip where the library is not installed, and say how to get it."""
    if name == "nixl":
        from kvstore.peer.onesided.nixl import INSTALL

        if importlib.util.find_spec("nixl_cu12") is None:
            pytest.skip(f"NIXL is not installed: {INSTALL}")
        return
    from kvstore.peer.onesided.libucp import load

    try:
        load()
    except DriverMissing as error:
        pytest.skip(str(error))


class RegisteredLender(MemoryLender):
    """A lender whose records lie in memory that a mover offers."""

    mover: Mover

    def __init__(self) -> None:
        super().__init__()
        self._offered: set[int] = set()

    async def lend(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        spans: Sequence[Span],
        refined: bool,
        borrower: NodeId,
    ) -> MemoryLoan:
        loan = await super().lend(namespace_id, keys, spans, refined, borrower)
        for record in loan.records:
            view = record.view if record is not None else None
            if view is not None and id(view) not in self._offered:
                self._offered.add(id(view))
                await self.mover.register(view)
        return loan

    async def withdraw(self) -> None:
        for record in self.records.values():
            if record.view is not None:
                await self.mover.withdraw(record.view)


class Ends:
    """The two drivers, of one kind, and the event loop of their tests."""

    def __init__(self, name: str, runner: asyncio.Runner) -> None:
        self.name = name
        self.runner = runner
        self.there = Mover(name, lambda: make_driver(name))
        self.here = Mover(name, lambda: make_driver(name))

    async def start(self) -> None:
        await self.there.start()
        await self.here.start()

    async def close(self) -> None:
        await self.here.close()
        await self.there.close()

    @asynccontextmanager
    async def linked(self, lender: RegisteredLender) -> AsyncIterator[TcpLink]:
        """Give a link that reads one-sided."""
        lender.mover = self.there
        async with served(ourselves(LENDER), lender, movers={self.name: self.there}) as found:
            link = await found.dial(ourselves(BORROWER))
            link.read_onesided(self.here)
            try:
                yield link
            finally:
                await link.close()
        await lender.withdraw()


@contextmanager
def ends(name: str) -> Iterator[Ends]:
    """Open both ends for the time of the context."""
    skip_without(name)
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as runner:
        patch.setenv("UCX_TLS", TRANSPORTS)
        both = Ends(name, runner)
        runner.run(both.start())
        try:
            yield both
        finally:
            runner.run(both.close())
