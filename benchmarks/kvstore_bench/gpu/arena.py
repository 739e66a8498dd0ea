"""A daemon for the benchmark of a GPU, whose arena the GPU reaches, and slots in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvstore import Client, Grant, Group, Namespace, Part, Span, Unavailable
from kvstore.testing.daemon import Daemon
from kvstore_bench.store.store import await_arena, chain
from kvstore_kernels.device import Device
from kvstore_kernels.registration import Registration

if TYPE_CHECKING:
    from kvstore_bench.gpu.gpu import GpuPlan

REGISTER_WAIT_S = 60.0


@contextmanager
def arena(nbytes: int) -> Iterator[Client]:
    """A daemon of our own with room for `nbytes`, all of which is there."""
    nbytes = max(64 << 20, -(-nbytes >> 20) << 20)
    settings = (f"dram.capacity={nbytes}", "dram.extent=1GiB")
    with Daemon(*settings, file=False) as daemon, Client(daemon.start().target) as client:
        await_arena(client, nbytes)
        yield client


@contextmanager
def registered(client: Client, device: Device) -> Iterator[Registration]:
    """Wait until the device reaches the arena, or cannot."""
    registration = Registration(device, client.extents, lambda: None)
    registration.start()
    if not registration.wait(REGISTER_WAIT_S) and not registration.failure:
        raise Unavailable(f"the arena was not registered in {REGISTER_WAIT_S:.0f} s")
    try:
        yield registration
    finally:
        registration.close(REGISTER_WAIT_S)


class Slots:
    """The slots of one prefix's blocks. Names are made once, outside of what is measured."""

    def __init__(
        self, client: Client, plan: GpuPlan, name: str, blocks: int, *, varies: bool = False
    ) -> None:
        """varies: records have sizes of their own."""
        group = Group("all", plan.record_nbytes, varies=varies)
        namespace = Namespace(plan.block_tokens, (group,), (("bench", name),))
        self.client = client
        self._namespace_id = client.register(namespace)
        self._keys = chain(namespace.id, blocks)

    def reserve(
        self, first: int, last: int, sizes: Sequence[int] = ()
    ) -> tuple[Grant, list[memoryview]]:
        """Reserve a slot for each of the blocks [first, last). sizes: of their records, where they
        vary. Raises Unavailable if the daemon has no room."""
        grant = self.client.reserve(
            self._namespace_id,
            self._keys[first:last],
            first_block=first,
            parent=self._keys[first - 1] if first else None,
            spans=[Span(Part(0, 0), 0, last - first)],
            wait_s=10.0,
            sizes=sizes,
        )
        if grant.refused:
            raise Unavailable(f"the arena refused {grant.refused} of {last - first} records")
        return grant, self._views(grant)

    def acquire(self) -> tuple[Grant, list[memoryview]]:
        """Lease the records of all blocks. Raises Unavailable if some are missing."""
        found = self.client.acquire(self._namespace_id, self._keys)
        if found.hit_blocks != len(self._keys):
            raise Unavailable(f"only {found.hit_blocks} of {len(self._keys)} blocks came back")
        return found, self._views(found)

    def _views(self, grant: Grant) -> list[memoryview]:
        return [self.client.view(slot) for slot in grant.slots if slot is not None]
