"""The arena: memfd extents that the daemon and its clients map at the same time.

It is a memfd, because a file in /dev/shm would outlive a crash. Containers also limit /dev/shm to
64 MiB, and an engine that exceeds that is killed with SIGBUS. An extent's pages are reserved
(fallocate) before anybody may touch it, and it is sealed against shrinking, so no mapping of it can
fault.

Reserving a gigabyte takes a fraction of a second. So the first extent exists when the daemon
starts, and a background task makes the others. It also touches every page once, because disk reads
into untouched pages run at half the speed.

A lowered cap gives memory back at once: free runs are taken out of use and holes are punched there.
The holes are never filled again, because a device may have pinned the old pages. A raised cap makes
new extents instead. An extent of which nothing is left is retired, and clients unmap it.

`Arena` hands out slots; its parts can be read alone:

    extents  all extents, and callbacks for new and retired   (extents.py)
    growth   the cap, and the task that makes extents         (growth.py)
    holes    memory given back to the system                  (holes.py)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstore.model.block import Slot, padded
from kvstore.model.checksum import copy_bytes
from kvstore.model.errors import InvalidRequest
from kvstore.system.memory import Memory, read_memory
from kvstore.tier.dram.extents import Extents
from kvstore.tier.dram.growth import Growth
from kvstore.tier.dram.holes import ArenaHoles


class Arena:
    """The dram tier. Slots are places. Every process that maps the arena may write all of it;
    sealed: only the daemon can.

    memory: returns what is available; called before each extent but the first.
    """

    def __init__(
        self,
        capacity_bytes: int,
        extent_bytes: int,
        *,
        memory: Callable[[], Memory] = read_memory,
        sealed: bool = False,
    ) -> None:
        self.extents = Extents()
        self.growth = Growth(self.extents, capacity_bytes, extent_bytes, memory, sealed=sealed)
        self.holes = ArenaHoles(self.extents, self.growth)
        self._used_nbytes = 0

    @property
    def sealed(self) -> bool:
        return self.growth.sealed

    @property
    def capacity_bytes(self) -> int:
        """The cap. Under a lowered one no slot is handed out beyond it."""
        return self.growth.capacity_bytes

    @property
    def reserved_nbytes(self) -> int:
        """Bytes taken from the system so far; the rest of `capacity_bytes` is still to come."""
        return self.extents.nbytes + self.extents.leaving_nbytes + self.growth.coming_nbytes

    @property
    def physical_nbytes(self) -> int:
        """Bytes of the slots that are taken, in whole pages."""
        return self._used_nbytes

    @property
    def record_nbytes_max(self) -> int:
        """The largest record that fits at all."""
        growth = self.growth
        return min(growth.extent_bytes, max(growth.capacity_bytes, growth.promised_bytes))

    async def start(self) -> None:
        """Make the first extent, and the others in the background."""
        await self.growth.start()

    async def close(self) -> None:
        """Unmap. Views handed out must be gone, or their extent stays mapped until they are."""
        await self.growth.stop()
        self.holes.close()
        self.extents.close()

    async def retire(self) -> None:
        """Give all memory back to the system, although clients may keep their mappings: what was in
        the slots is gone. While `is_watched`, call `holes.renew` now and then; then `close`.

        A sealed arena's pages stay as long as a client maps them: no holes can be punched there.
        """
        await self.growth.stop()
        if not self.sealed:
            await self.holes.give_back_all()

    @property
    def is_watched(self) -> bool:
        """Whether there is memory that was given back, and that a client may touch again."""
        return any(True for _ in self.extents.retired)

    def allocate(self, nbytes: int) -> Slot | None:
        """Take a slot of `nbytes` (a multiple of pages is set aside), or return None."""
        if not 1 <= nbytes <= self.growth.extent_bytes:
            raise InvalidRequest(
                f"a slot of {nbytes} bytes; extents have {self.growth.extent_bytes}"
            )
        if self._used_nbytes + padded(nbytes) > self.growth.capacity_bytes:
            return None
        for number, extent in self.extents.by_id.items():
            offset = extent.space.allocate(nbytes)
            if offset is not None:
                self._used_nbytes += padded(nbytes)
                return Slot(number, offset, nbytes)
        self.holes.starved = True
        return None

    def free(self, place: Slot) -> None:
        self.extents.by_id[place.extent].space.free(place.offset, place.nbytes)
        self._used_nbytes -= padded(place.nbytes)

    def view(self, slot: Slot) -> memoryview:
        """Return the slot's bytes, writable, valid until the slot is freed."""
        return self.extents.by_id[slot.extent].view[slot.offset : slot.offset + slot.nbytes]

    def padded_view(self, slot: Slot) -> memoryview:
        """Return the slot's whole pages: aligned, a multiple of 4 KiB, as O_DIRECT wants them."""
        end = slot.offset + padded(slot.nbytes)
        return self.extents.by_id[slot.extent].view[slot.offset : end]

    def clear_padding(self, slot: Slot) -> None:
        """Zero the rest of the slot's last page, which still has bytes of an earlier record."""
        padding = self.padded_view(slot)[slot.nbytes :]
        padding[:] = bytes(len(padding))

    async def write(self, place: Slot, buffers: Sequence[memoryview]) -> None:
        """Copy `buffers`, back to back, into the slot."""
        view, at = self._checked(place), 0
        for source in buffers:
            copy_bytes(source, view[at : at + len(source)])
            at += len(source)

    async def read(self, place: Slot, offset: int, targets: Sequence[memoryview]) -> None:
        """Copy from `offset` of the slot into `targets`, one after the other."""
        view, at = self._checked(place), offset
        if offset < 0 or offset + sum(map(len, targets)) > len(view):
            raise InvalidRequest(f"a read beyond the {len(view)} bytes of a slot")
        for target in targets:
            copy_bytes(view[at : at + len(target)], target)
            at += len(target)

    def _checked(self, place: Slot) -> memoryview:
        if not self.extents.by_id[place.extent].space.holds(place.offset, place.nbytes):
            raise InvalidRequest(f"{place} is not allocated")
        return self.padded_view(place)
