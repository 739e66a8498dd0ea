"""What a node does with an object tier: uploads and deletes; it is a source of prefixes, too."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvstore.decide.planner import Planner, Write
from kvstore.format.codec import Codec
from kvstore.metrics import Metrics
from kvstore.model.block import BlockKey, NamespaceId
from kvstore.model.errors import Unavailable
from kvstore.move.deletions import Deletions
from kvstore.move.object_source import ObjectSource
from kvstore.move.object_upload import ObjectUpload
from kvstore.move.promote import Promotion
from kvstore.system.background import keep_running
from kvstore.tier.dram import Arena
from kvstore.tier.object import ObjectTier

logger = logging.getLogger(__name__)

DELETE_S = 30.0  # for all namespaces of one delete together
DELETES_MAX = 16  # namespaces at once
THREADS = 2


class Objects:
    """The object tier of one node, and what moves between it and the arena."""

    def __init__(
        self,
        tier: ObjectTier,
        planner: Planner,
        promotion: Promotion,
        arena: Arena,
        *,
        deletions: Deletions,
        codec: Codec,
        metrics: Metrics,
        fine: bool = False,
        now: Callable[[], float],
    ) -> None:
        """fine: fine parts are kept in the bucket, too."""
        self._tier = tier
        self._metrics = metrics
        self._now = now
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="kvstore-object")
        self.source = ObjectSource(tier, metrics, now, fine=fine)
        self._upload = ObjectUpload(
            tier,
            planner,
            promotion,
            arena,
            watches=deletions,
            metrics=metrics,
            executor=self._threads,
            codec=codec,
            fine=fine,
            now=now,
        )
        self._uploading: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; a bucket that does not answer delays nothing."""
        self._tier.start()
        self._uploading = asyncio.create_task(
            keep_running("upload", self._upload.run, self._metrics.task_failed)
        )

    async def close(self, drain_s: float) -> None:
        """Upload what has not rested yet, for at most `drain_s`, and stop. After an erasure, or
        without a start, nothing is uploaded."""
        if await self._end_uploads() and self._upload.waiting:
            await self._drain(drain_s)
        await self._tier.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _end_uploads(self) -> bool:
        """Cancel the uploads, and wait for their end. False: there were none any more."""
        uploading, self._uploading = self._uploading, None
        if uploading is None:
            return False
        uploading.cancel()
        await asyncio.gather(uploading, return_exceptions=True)
        return True

    async def _drain(self, drain_s: float) -> None:
        """Upload what waits, unless the store refuses: that is tried again at the next start."""
        reason = "some were not taken: see above"
        try:
            async with asyncio.timeout(drain_s):
                await self._tier.ready(self._now() + drain_s)
                await self._upload.upload(float("inf"))
        except Unavailable as error:
            reason = str(error)
        except TimeoutError:
            reason = "too little time"
        if self._upload.waiting:
            waiting = self._upload.waiting
            logger.warning("drain=incomplete prefixes_not_uploaded=%d reason=%r", waiting, reason)

    def set_capacity(self, nbytes: int) -> None:
        """Change the bucket's cap; what is over it is collected soon."""
        self._tier.set_capacity(nbytes)

    @property
    def tier(self) -> ObjectTier:
        """The tier itself, for those who look after its cap."""
        return self._tier

    def written(self, write: Write) -> None:
        """Note what is durable on this node."""
        self._upload.note(write)

    async def counted(self) -> None:
        """Wait until `found_namespaces` is known. Raises Unavailable."""
        await self._tier.ready(self._now() + DELETE_S)

    @property
    def found_namespaces(self) -> Set[NamespaceId]:
        """The namespaces of what was in the bucket when this node counted it last."""
        return self._tier.found_namespaces

    async def delete(
        self, namespaces: Collection[NamespaceId], keys: Sequence[BlockKey] | None
    ) -> None:
        """Delete keys, or (None) whole namespaces, for every node that shares the bucket.

        Raises Unavailable after the last of them was tried: what could not be deleted may come
        back.
        """
        deadline = self._now() + DELETE_S
        places = asyncio.Semaphore(DELETES_MAX)

        async def one(namespace_id: NamespaceId) -> None:
            async with places:
                await self._tier.deletes.delete(namespace_id, keys, deadline)

        self._upload.forget(namespaces)  # what is put from now on is uploaded anew
        try:
            results = await asyncio.gather(*map(one, namespaces), return_exceptions=True)
        finally:
            self._upload.forget(namespaces)  # nor does what was found meanwhile count
        for failed in filter(None, results):
            raise failed

    async def end_uploads(self) -> None:
        """Upload nothing from now on, at the end neither."""
        await self._end_uploads()

    def stats(self) -> dict[str, Any]:
        return {**self._tier.stats(), "uploads_waiting": self._upload.waiting}
