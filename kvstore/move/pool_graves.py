"""The graves of a node, kept in each directory of its file tier, and in memory without one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from kvstore.model.block import BlockKey, NamespaceId
from kvstore.tier.file import Devices, Disk, DiskFailed, DiskFull
from kvstore.tier.file.twin_files import Twins, Value, read_twins, write_twins
from kvstore.tier.pool.graves import Graves

logger = logging.getLogger(__name__)

NBYTES_MAX = 2 << 20
TWINS = Twins("deletes from the pool", "POOL", b"kvpool\0\1", NBYTES_MAX)


def wall_ms() -> int:
    """Return the time by which hosts compare what they put and deleted."""
    return time.time_ns() // 1_000_000


class PoolGraves:
    """file: keeps them, if there is one. clock: in ms since the epoch."""

    def __init__(
        self,
        file: Devices | None,
        *,
        clock: Callable[[], int] = wall_ms,
    ) -> None:
        self._graves = Graves()
        self._file = file
        self._clock = clock
        self.loaded = file is None  # nothing of the pool is to be believed before
        self._turn = asyncio.Lock()

    def floor(self, namespace_id: NamespaceId, key: BlockKey) -> int:
        """Return the time up to which values of a key are dead."""
        return self._graves.floor(namespace_id, key)

    def stamp(self, namespace_id: NamespaceId, key: BlockKey) -> int:
        """Return the time of a value that is put now."""
        return max(self._clock(), self._graves.floor(namespace_id, key) + 1)

    async def load(self) -> None:
        """Read what was deleted before the last start. A directory without, or with damaged ones,
        is left out: the others have the same."""
        async with self._turn:
            if self.loaded or self._file is None:
                return
            for mount in self._file.admission.mounts:
                with suppress(DiskFailed, DiskFull):
                    found = await mount.on_disk(_read)
                    if found.number and not self._graves.merge(found.data):
                        logger.warning("pool=graves_unreadable directory=%s", mount.device.path)
            self.loaded = True

    async def bury(
        self,
        namespaces: Collection[NamespaceId],
        keys: Sequence[BlockKey] | None,
        *,
        everything: bool = False,
    ) -> None:
        """Take note of a delete; durable, where there is a file tier, when this returns.

        Raises DiskFailed if no directory takes it.
        """
        await self.load()
        self._graves.bury(namespaces, keys, self._clock(), everything=everything)
        async with self._turn:
            if self._file is None:
                return
            write, kept = partial(_write, data=self._graves.encode()), False
            for mount in self._file.admission.mounts:
                try:
                    await mount.on_disk(write)
                    kept = True
                except (DiskFull, DiskFailed) as error:
                    logger.warning("pool=graves_not_kept reason=%r", str(error))
            if not kept:
                raise DiskFailed("no directory of the file tier takes what is deleted of the pool")


def _read(disk: Disk, path: Path) -> Value:
    return read_twins(disk, path, TWINS)


def _write(disk: Disk, path: Path, data: bytes) -> None:
    write_twins(disk, path, TWINS, data)
