"""The tier against a dict, through evictions, deletes, clean restarts, kills and power loss."""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.sealing import Sealing
from kvstore.testing.disks import FaultyDisk
from kvstore.tier.file import FileExtent, FileTier
from tests.tier.file.frames import (
    SEALING,
    Opened,
    key,
    live,
    physical_nbytes,
    recover,
    run,
    tombstone,
    verify,
)

T = TypeVar("T")
CAPACITY_BYTES = 1 << 19
NAMES = st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=4, unique=True)


class FileTierMachine(RuleBasedStateMachine):
    """Model: the frames that exist and which of their names no tombstone has killed."""

    sealing: Sealing | None = None

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.path = Path(tempfile.mkdtemp(prefix="kv-"))
        self.names: dict[int, set[str]] = {}  # by sequence
        self.extents: dict[int, FileExtent] = {}
        self.synced: set[int] = set()
        self.disk: FaultyDisk | None = None
        self.open()

    def await_(self, awaitable: Awaitable[T]) -> T:
        async def main() -> T:
            return await awaitable

        return self.runner.run(main())

    def open(self) -> Opened:
        self.disk = FaultyDisk(syncs=False, before=self.disk)
        self.tier = FileTier(
            self.path,
            capacity_bytes=CAPACITY_BYTES,
            segment_nbytes=1 << 16,
            disk=self.disk,
            sealing=self.sealing,
        )
        recovered = self.await_(recover(self.tier))
        found = [record.header.sequence for record in recovered.frames]
        assert recovered.next_sequence > max(found, default=0)
        self.sequence = recovered.next_sequence
        return recovered

    def newest(self) -> dict[str, int]:
        return {name: at for at in sorted(self.names) for name in self.names[at]}

    @rule(names=NAMES, nbytes=st.integers(1, 12_000))
    def put(self, names: list[str], nbytes: int) -> None:
        header, payload = run(self.sequence, names, nbytes=nbytes)

        async def write() -> FileExtent | None:
            extent = self.tier.frames.allocate(header.nbytes)
            if extent is not None:
                await self.tier.frames.write(
                    extent, [self.tier.frames.encode(extent, header), *payload]
                )
            return extent

        extent = self.runner.run(write())
        if extent is None:
            assert self.tier.space.available_nbytes < header.nbytes + (1 << 15)
            return
        self.names[self.sequence], self.extents[self.sequence] = set(names), extent
        self.sequence += 1

    @precondition(lambda self: self.extents)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.extents)))
        self.tier_free(sequence)

    def tier_free(self, sequence: int) -> None:
        async def main() -> None:
            self.tier.frames.free(self.extents.pop(sequence))
            await self.tier.upkeep.settle()

        self.runner.run(main())
        del self.names[sequence]

    @rule(names=st.just([]) | NAMES)
    def delete(self, names: list[str]) -> None:
        self.await_(self.tier.frames.write_tombstone(tombstone(self.sequence, names)))
        self.await_(self.tier.durability.sync())
        self.synced = set(self.names)
        self.sequence += 1
        for held in self.names.values():
            held.difference_update(names or list(held))
        for sequence in [at for at, left in self.names.items() if not left]:
            self.tier_free(sequence)

    @rule()
    def sync(self) -> None:
        self.await_(self.tier.durability.sync())
        self.synced = set(self.names)

    @rule(clean=st.booleans())
    def restart(self, clean: bool) -> None:
        if clean:
            self.await_(self.tier.close())
        else:
            self.await_(self.tier.upkeep.settle())
            self.disk.kill()
        recovered = self.open()
        assert live(recovered) == {key(name): at for name, at in self.newest().items()}
        self.adopt(recovered)

    @rule(seed=st.integers(0, 2**32))
    def power_loss(self, seed: int) -> None:
        self.await_(self.tier.upkeep.settle())
        self.disk.lose_power(random.Random(seed))
        recovered = self.open()
        found = live(recovered)
        for name in "abcdefgh":
            holders = {at for at, names in self.names.items() if name in names}
            at = found.pop(key(name), None)
            assert at is None or at in holders
            durable = max(holders & self.synced, default=None)
            assert durable is None or (at is not None and at >= durable)
        assert found == {}
        self.adopt(recovered)

    def adopt(self, recovered: Opened) -> None:
        for record in recovered.frames:
            self.await_(verify(self.tier, record))
        self.extents = {record.header.sequence: record.location for record in recovered.frames}
        self.names = {at: self.names[at] for at in self.extents}
        self.synced = set(self.names)
        self.await_(self.tier.upkeep.settle())

    @invariant()
    def the_cap_holds(self) -> None:
        self.await_(self.tier.upkeep.settle())
        assert physical_nbytes(self.path) == self.tier.frames.physical_nbytes <= CAPACITY_BYTES

    def teardown(self) -> None:
        self.await_(self.tier.close())
        self.runner.close()
        shutil.rmtree(self.path)


class SealedMachine(FileTierMachine):
    """The same, encrypted."""

    sealing = SEALING


SealedMachine.TestCase.settings = settings(max_examples=10, stateful_step_count=40, deadline=None)
TestSealedMachine = SealedMachine.TestCase

FileTierMachine.TestCase.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)
TestFileTierMachine = FileTierMachine.TestCase
