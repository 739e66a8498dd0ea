"""Recall: index what was found on disk, a little at a time, and first what somebody asks for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence, Set

from kvstore.decide.index import StoredFrame
from kvstore.decide.planner import Planner
from kvstore.model.block import BlockKey, NamespaceId
from kvstore.system.background import keep_running
from kvstore.tier.file import Devices, FrameRecord

logger = logging.getLogger(__name__)

RECALL_STEP_RUNS = 16
"""Indexed before anybody else gets a turn: a few hundred blocks of 4 KiB, of which one takes 6 us
with a slow interpreter, and twice that where a run is not indexed in one."""


class Recall:
    """Indexes the runs of the file tier. prepare: awaited before anything is indexed. indexed:
    called after each step. complete: called when all of it is indexed."""

    def __init__(
        self,
        planner: Planner,
        file: Devices | None,
        *,
        prepare: Callable[[], Awaitable[None]],
        indexed: Callable[[], None],
        complete: Callable[[], None],
        task_failed: Callable[[str], None],
        now: Callable[[], float],
    ) -> None:
        self._planner = planner
        self._file = file
        self._prepare = prepare
        self._indexed = indexed
        self._complete = complete
        self._task_failed = task_failed
        self._now = now
        # Whose step it is. Several stores of one process share one, so that everybody else waits
        # for one step at a time, however many of them index.
        self.turn = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._began = 0.0
        self._again = False  # a device came while others are indexed

    def start(self) -> None:
        """Begin to index what is on devices that take part from now on."""
        self._again = True
        if self._task is None or self._task.done():
            task = keep_running("recall", self._index_all, self._task_failed)
            self._task = asyncio.create_task(task)

    def cancel(self) -> None:
        """Index no more."""
        if self._task is not None:
            self._task.cancel()

    def index(self, keys: Sequence[BlockKey]) -> None:
        """Index what was found on disk of these blocks. Nothing to do once all of it is indexed."""
        if self._file is not None:
            self._add(self._file.recall.take(keys))

    @property
    def unrecalled_runs(self) -> int:
        """How many of the runs found on disk are not indexed yet."""
        return self._file.recall.unrecalled_runs if self._file is not None else 0

    @property
    def recalling_s(self) -> float:
        """How long what was found on disk has been indexed; 0: all of it is."""
        return self._now() - self._began if self.unrecalled_runs else 0.0

    async def recalled(self, deadline: float) -> bool:
        """Wait until everything found is indexed. False: the time ran out."""
        if self._task is not None and not self._task.done():
            await asyncio.wait([self._task], timeout=max(0.0, deadline - self._now()))
        return not self.unrecalled_runs

    @property
    def found_namespaces(self) -> Set[NamespaceId]:
        """The namespaces of what was found on disk."""
        return self._file.recall.found_namespaces if self._file is not None else frozenset()

    async def _index_all(self) -> None:
        """Index everything, oldest first, a little at a time."""
        assert self._file is not None
        began = self._began = self._now()
        while True:
            self._again = False
            await self._prepare()
            while self.unrecalled_runs:
                async with self.turn:
                    self.index_oldest()
                    await asyncio.sleep(0)
            if not self._again:
                break
        self._complete()
        logger.info("recall=complete s=%.3f", self._now() - began)

    def index_oldest(self) -> bool:
        """Index a few runs; return whether there were any left to index."""
        assert self._file is not None
        some = self._file.recall.unrecalled_runs > 0
        self._add(self._file.recall.take_oldest(RECALL_STEP_RUNS))
        return some

    def _add(self, records: Sequence[FrameRecord]) -> None:
        for record in records:
            header = record.header
            keys, raw, stored, checksums, *_ = zip(*header.blocks, strict=True)
            frame = StoredFrame(
                record.location, header.part, header.codec_id, stored, header.sequence
            )
            blocks = list(zip(range(len(keys)), keys, raw, checksums, strict=True))
            if len(record.live) < len(blocks):
                blocks = [blocks[at] for at in record.live]
            self._planner.recovery.add(
                header.namespace_id,
                frame,
                blocks,
                first_block=header.first_block,
                parent=header.parent,
            )
        if records:
            self._indexed()  # what waited to be written may have been found durable
