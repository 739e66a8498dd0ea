"""The same daemon shared by two tenants, encrypted: neither may ever see what only the other put.

Both write the same keys, with bytes of their own, and ask for each other's. One has a direct arena,
one a sealed one. At a small cap they share the file tier: what one leaves free, the other may fill.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random

from kvstore import Client
from kvstore.model.block import PAGE_NBYTES
from tests.torture.party import Party
from tests.torture.plan import Life
from tests.torture.spaces import NAMESPACES
from tests.torture.traffic import Reader, Worker, Writer
from tests.torture.world import World

TENANTS = ("acme", "beta")
SETTINGS = (
    "dram.capacity=16MiB",
    *(f"tenants.{name}.dram.guaranteed=8MiB" for name in TENANTS),
    f"tenants.{TENANTS[1]}.arena=sealed",
)
PART = 3  # each is guaranteed one part of so many of the file tier; the rest is lent


class TenantsWorld(World):
    """See the module."""

    writers = 2  # of each tenant
    readers = 1

    def __init__(self, root_key: Path) -> None:
        super().__init__(settings=SETTINGS, root_key=root_key, tenants=TENANTS)

    def _shares(self, capacity_bytes: int) -> Sequence[str]:
        each = capacity_bytes // PART // PAGE_NBYTES * PAGE_NBYTES
        return [f"tenants.{name}.file.guaranteed={each}" for name in TENANTS]

    def _capped(self) -> list[list[Path]]:
        return [self._present()]

    def _workers(self, stack: ExitStack, life: Life, draw: Random) -> list[Worker]:
        workers = super()._workers(stack, life, draw)
        for party in self.parties:
            others = [
                worker
                for worker in workers
                if isinstance(worker, Writer) and worker.traffic is not party.traffic
            ]
            workers.append(self._spy(party, stack, draw, others))
        return workers

    def _spy(
        self, party: Party, stack: ExitStack, draw: Random, others: Sequence[Writer]
    ) -> Reader:
        """Return who asks as one tenant for what another one writes."""
        client = stack.enter_context(Client(party.target(self.daemon)))
        for namespace in NAMESPACES:
            client.register(namespace)
        return Reader(party.traffic, client, Random(draw.getrandbits(32)), others)
