"""Keeps what namespaces stand for in the file tier's directories, so that a start knows it too.

A directory gets the file of a namespace with its first frame of it, and loses it some time after
the last one of the node has left. It is told once, and nobody waits for long: a directory that does
not take it costs nothing but the name of what is found there later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection

from kvstore.decide.namespaces import NAMESPACES_MAX
from kvstore.decide.planner import Planner
from kvstore.model.block import Namespace, NamespaceId
from kvstore.tier.file import Devices, DiskFailed, DiskFull, Mount
from kvstore.tier.file.spec_files import (
    FILE_NBYTES_MAX,
    file_nbytes,
    named,
    read_spec_files,
    remove_spec_files,
    spec_files_in,
    write_spec_file,
)

logger = logging.getLogger(__name__)

DIRECTORY_NBYTES_MAX = 16 << 20  # as much as NAMESPACES_MAX of the smallest take
WRITE_S = 1.0  # for what is written to wait for its namespace's file
TIDY_EVERY_S = 30.0  # a namespace without frames may get its next one for so long
CLOSE_S = 1.0


class NamespaceNotes:
    """The files of all directories of one node."""

    def __init__(self, planner: Planner, file: Devices | None, now: Callable[[], float]) -> None:
        self._known = planner.index.namespaces
        self._file = file
        self._now = now
        # Of each directory: who has a file, how large it is, the oldest first.
        self._noted: dict[Mount, dict[NamespaceId, int]] = {}
        self._idle: dict[Mount, set[NamespaceId]] = {}  # without a frame when last looked at
        self._tidy_at = 0.0
        self._writing: set[asyncio.Task[None]] = set()
        self._loading = asyncio.Lock()
        self.on_found: Callable[[Namespace], None] = lambda namespace: None

    async def load(self) -> None:
        """Tell what is found in directories that take part since the last time."""
        if self._file is None:
            return
        async with self._loading:
            self._noted = {each: noted for each, noted in self._noted.items() if each.is_current}
            self._idle = {each: idle for each, idle in self._idle.items() if each.is_current}
            for mount in self._file.mounts:
                if mount not in self._noted:
                    await self._load(mount)

    async def _load(self, mount: Mount) -> None:
        noted = self._noted[mount] = {}
        try:
            there = set(await mount.on_disk(spec_files_in))
            found, keys = mount.tier.recall.found_namespaces, mount.tier.keys
            wanted = [each for each in found if named(each, keys) in there][:NAMESPACES_MAX]
            read = await mount.on_disk(lambda disk, path: read_spec_files(disk, path, wanted, keys))
            for namespace in read:
                noted[namespace.id] = file_nbytes(namespace)
                self.on_found(namespace)
            await self._remove_named(mount, there - {named(each, keys) for each in noted})
        except (DiskFull, DiskFailed) as error:
            logger.warning("namespaces=not_read path=%s reason=%r", mount.device.path, str(error))

    async def written(self, frames: Collection[tuple[Mount, NamespaceId]]) -> None:
        """See to it that directories with new frames say what these are."""
        new = {each for each in frames if each[1] not in self._noted.get(each[0], (each[1],))}
        tasks = [asyncio.create_task(self._write(*each)) for each in new]
        if not tasks:
            return
        self._writing.update(tasks)
        for task in tasks:
            task.add_done_callback(self._writing.discard)
        await asyncio.wait(tasks, timeout=WRITE_S)

    async def _write(self, mount: Mount, namespace_id: NamespaceId) -> None:
        namespace = self._known.spec(namespace_id)
        if namespace is None or not mount.is_current:
            return
        noted, nbytes = self._noted[mount], file_nbytes(namespace)
        if nbytes > FILE_NBYTES_MAX:
            return
        noted[namespace_id] = nbytes  # a second frame does not try again
        excess = []
        while sum(noted.values()) > DIRECTORY_NBYTES_MAX:
            excess.append(oldest := next(iter(noted)))
            del noted[oldest]
        try:
            await self._remove(mount, excess)
            keys = mount.tier.keys
            await mount.on_disk(lambda disk, path: write_spec_file(disk, path, namespace, keys))
        except (DiskFull, DiskFailed) as error:
            logger.info("namespace=not_noted path=%s reason=%r", mount.device.path, str(error))

    async def tidy_now_and_then(self) -> None:
        """Remove, if it is time to look, the files of namespaces that have had no frame twice, and
        write those that were missing when their frames were found."""
        if self._now() < self._tidy_at:
            return
        self._tidy_at = self._now() + TIDY_EVERY_S
        for mount, noted in list(self._noted.items()):
            found = mount.tier.recall.found_namespaces if len(noted) < NAMESPACES_MAX // 2 else ()
            await self.written([(mount, each) for each in found if self._has_frames(each)])
            idle = {each for each in noted if not self._has_frames(each)}
            gone = idle & self._idle.get(mount, set())
            self._idle[mount] = idle - gone
            if not gone or not mount.is_current:
                continue
            for namespace_id in gone:
                del noted[namespace_id]
            try:
                await self._remove(mount, gone)
            except (DiskFull, DiskFailed) as error:
                logger.info("namespaces=kept path=%s reason=%r", mount.device.path, str(error))

    async def close(self) -> None:
        """Wait a moment for what is being written."""
        if self._writing:
            await asyncio.wait(self._writing, timeout=CLOSE_S)

    async def _remove(self, mount: Mount, ids: Collection[NamespaceId]) -> None:
        await self._remove_named(mount, {named(each, mount.tier.keys) for each in ids})

    async def _remove_named(self, mount: Mount, ids: Collection[NamespaceId]) -> None:
        if ids:
            await mount.on_disk(lambda disk, path: remove_spec_files(disk, path, ids))

    def _has_frames(self, namespace_id: NamespaceId) -> bool:
        found = self._known.find(namespace_id)
        return found is not None and found.file_nbytes > 0
