"""The hbm tier: blocks kept in the GPU's own memory, for an engine without a prefix cache.

A block here is also in the daemon, or was refused there; nothing waits for it, and a hit asks
nobody. Which block leaves when there is no room is up to the daemon's policies. Records are packed
as in the arena, with their checksums, by the device, and go from and to pages in one launch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

from kvstore import BlockKey, InvalidRequest, Namespace
from kvstore.decide.planner.match import longest_hit
from kvstore.decide.policy import policy_by_name
from kvstore.tier.dram.allocator import ExtentAllocator
from kvstore_kernels.device import Device, memory_on
from kvstore_kernels.packing import Sums, open_paged
from kvstore_transformers.cache import Pages, empty_pages
from kvstore_transformers.loading import LoadFailed
from kvstore_transformers.namespace import LayerGroup, Layout

STEP_BLOCKS = 256
"""Stored at once; a load waits for no more."""


class HeldPages(NamedTuple):
    """Pages of one group, of the blocks from `begin` on."""

    begin: int
    pages: Pages


class _Record(NamedTuple):
    """Where a record is. checksum: None where the device does not compute them. loaded: it came
    from the daemon."""

    offset: int
    checksum: int | None
    loaded: bool


class _Place(NamedTuple):
    """Room for the record of one group's block, not visible yet."""

    block: int
    group: int
    offset: int


class PoolLoad:
    """What was restored from the pool: on the model's own stream, so layers need not be waited for.

    pages: of every group. checks: the sums of what was copied, and what they should be.
    loaded_blocks: up to the last one that came from the daemon before.
    """

    def __init__(self, pool: HbmPool, keys: Sequence[BlockKey]) -> None:
        self.blocks, self.loaded_blocks = len(keys), 0
        self.pages: list[tuple[LayerGroup, Pages]] = []
        self.checks: list[tuple[Sums, list[int | None]]] = []
        self._pool = pool
        self._keys = keys

    def wait_layer(self, layer: int) -> None:
        """Return at once."""

    def finish(self) -> None:
        """Wait until it was copied. Raises LoadFailed, and forgets it all, if it was corrupt."""
        for sums, stored in self.checks:
            for found, expected in zip(sums.result(), stored, strict=True):
                if expected not in (None, found):
                    self._pool.drop(self._keys)
                    raise LoadFailed("a record in GPU memory does not match its checksum")


class HbmPool:
    """A block pool on one device. One thread restores, one stores."""

    def __init__(
        self, device: Device, layout: Layout, namespace: Namespace, *, nbytes: int, policy: str
    ) -> None:
        """nbytes: taken at once. policy: "lru", "hz" or another the daemon would know.

        Raises ConfigError for an unknown policy, InvalidRequest if the device has no such room.
        """
        self._policy = policy_by_name(policy)(time.monotonic)
        self._device = device
        self._layout = layout
        self._namespace = namespace
        try:
            self._memory = memory_on(device.torch_device, nbytes)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            raise InvalidRequest(
                f"hbm_bytes={nbytes:,}: the device has no such room beside the model; lower it"
            ) from error
        device.mark().synchronize()  # what had this memory before may still have been in use
        self._free = ExtentAllocator(nbytes)
        self._records: dict[BlockKey, dict[int, _Record]] = {}
        self._stream = device.stream()
        self._read: Any = None
        self._lock = threading.Lock()

    @property
    def blocks(self) -> int:
        """How many blocks are here."""
        return len(self._records)

    def asked(self, keys: Sequence[BlockKey]) -> None:
        """Note that a request begins with this prefix, whoever has it."""
        with self._lock:
            self._policy.touch(keys)

    def restore(self, keys: Sequence[BlockKey], more_than: int = 0) -> PoolLoad | None:
        """Return new pages with the longest prefix of `keys` a resume can begin after.

        None if that is not longer than `more_than` blocks. The pages are there once the caller's
        stream has come to here; they count if its `finish` does not raise.
        """
        with self._lock:
            blocks = self._match(keys)
            if blocks <= more_than:
                return None
            load = PoolLoad(self, keys[:blocks])
            for index, group in enumerate(self._layout.groups):
                needed = self._needed(index, blocks)
                pages = empty_pages(group, len(needed), self._namespace.block_tokens)
                load.pages.append((group, pages))
                records = [self._records[keys[block]][index] for block in needed]
                came = [block for block, each in zip(needed, records, strict=True) if each.loaded]
                load.loaded_blocks = max([load.loaded_blocks, *(block + 1 for block in came)])
                batch = [(0, block) for block in range(len(needed))]
                offsets = [record.offset for record in records]
                sums = open_paged([pages]).scatter(self._memory, batch, offsets)
                if sums is not None:
                    load.checks.append((sums, [record.checksum for record in records]))
            self._read = self._device.mark()  # what is evicted now must not be overwritten before
            return load

    def store(
        self,
        keys: Sequence[BlockKey],
        groups: Sequence[HeldPages],
        after: Any,
        *,
        loaded_blocks: int = 0,
    ) -> None:
        """Keep the blocks of a prefix, from its start as far as there is room.

        groups: their pages, in namespace order; read once the device has come to `after`.
        loaded_blocks: so many of them came from the daemon.
        """
        for first in range(0, len(keys), STEP_BLOCKS):
            step = range(first, min(first + STEP_BLOCKS, len(keys)))
            with self._lock:
                places, whole = self._reserve(keys, groups, step)
                read = self._read
            try:
                records = self._gather(places, groups, after, read)
            except BaseException:
                with self._lock:
                    for place in places:
                        self._free.free(place.offset, self._nbytes(place.group))
                raise
            with self._lock:
                for place, record in zip(places, records, strict=True):
                    self._publish(keys, place, record._replace(loaded=place.block < loaded_blocks))
            if not whole:
                return

    def drop(self, keys: Sequence[BlockKey]) -> None:
        """Forget blocks."""
        with self._lock:
            for key in keys:
                self._drop(key)

    # Under the lock -------------------------------------------------------------------------------

    def _match(self, keys: Sequence[BlockKey]) -> int:
        held = [self._records.get(key, ()) for key in keys]
        return longest_hit(self._namespace, [sum(1 << group for group in here) for here in held])

    def _needed(self, group: int, blocks: int) -> range:
        return self._namespace.groups[group].blocks_needed(blocks, self._namespace.block_tokens)

    def _nbytes(self, group: int) -> int:
        return self._namespace.groups[group].record_nbytes

    def _reserve(
        self, keys: Sequence[BlockKey], groups: Sequence[HeldPages], step: range
    ) -> tuple[list[_Place], bool]:
        """Take room for what is not here yet; False if it does not suffice."""
        places: list[_Place] = []
        keep = set(keys)
        for block in step:
            here = self._records.get(keys[block], {})
            for group, (begin, _) in enumerate(groups):
                if block < begin or group in here:
                    continue
                offset = self._allocate(self._nbytes(group), keep)
                if offset is None:
                    return places, False
                places.append(_Place(block, group, offset))
        return places, True

    def _allocate(self, nbytes: int, keep: Collection[BlockKey]) -> int | None:
        offset = self._free.allocate(nbytes)
        if offset is None:
            for victim in self._policy.victims():
                if victim not in keep:
                    self._drop(victim)
                    offset = self._free.allocate(nbytes)
                    if offset is not None:
                        break
        return offset

    def _publish(self, keys: Sequence[BlockKey], place: _Place, record: _Record) -> None:
        key = keys[place.block]
        if key not in self._records:
            self._records[key] = {}
            self._policy.insert(key, keys[place.block - 1] if place.block else None)
        self._records[key][place.group] = record

    def _drop(self, key: BlockKey) -> None:
        for group, record in self._records.pop(key, {}).items():
            self._free.free(record.offset, self._nbytes(group))
        self._policy.remove(key)

    # Of the storing thread ------------------------------------------------------------------------

    def _gather(
        self, places: Sequence[_Place], groups: Sequence[HeldPages], after: Any, read: Any
    ) -> list[_Record]:
        """Pack what the places are for; done when this returns."""
        found: dict[_Place, int | None] = {}
        self._stream.wait(after)
        if read is not None:
            self._stream.wait(read)
        sums: list[tuple[list[_Place], Sums | None]] = []
        for group, (begin, pages) in enumerate(groups):
            mine = [place for place in places if place.group == group]
            if mine:
                self._stream.run(partial(self._pack, begin, pages, mine, sums))
        self._stream.record().synchronize()
        for mine, each in sums:
            found |= zip(mine, each.result() if each else [None] * len(mine), strict=True)
        return [_Record(place.offset, found[place], loaded=False) for place in places]

    def _pack(
        self,
        begin: int,
        pages: Pages,
        places: list[_Place],
        sums: list[tuple[list[_Place], Sums | None]],
    ) -> None:
        """Put the gather of one group on the current stream."""
        batch = [(0, place.block - begin) for place in places]
        offsets = [place.offset for place in places]
        sums.append((places, open_paged([pages]).gather(batch, self._memory, offsets)))
