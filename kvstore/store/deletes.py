"""Deletes: for good, on every tier, before they are acknowledged."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Sequence
from typing import Any, Protocol

from kvstore.model.block import BlockKey, NamespaceId, check_keys
from kvstore.model.errors import Unavailable
from kvstore.move.verify import Verifier
from kvstore.store.node import Node

FORBID_S = 15.0  # longer than a delete takes to reach the fleet, and a read under way to end


class FleetDeletes(Protocol):
    """The other hosts, as far as deletes go."""

    async def delete(
        self, namespace_id: NamespaceId | None, keys: Sequence[BlockKey] | None
    ) -> None:
        """Delete blocks on every host; None: all of a namespace, or of all. Raises Unavailable that
        names those that did not confirm."""


class Deletes:
    """Deletes blocks, and those of which a reader says that they are wrong."""

    def __init__(self, node: Node, verifier: Verifier) -> None:
        self._node = node
        self._planner = node.planner
        self._write_behind = node.write_behind
        self._objects = node.objects
        self._pool = node.pool
        self._verifier = verifier
        self._lingering: set[asyncio.Task[None]] = set()
        self.peers: FleetDeletes | None = None  # set once they are known

    async def drop_wrong(self, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> int:
        """Verify this node's copies of blocks that a reader reports as corrupt; drop wrong ones.

        Returns of how many blocks something was wrong. What the bucket has is verified whenever it
        is fetched. Raises Unavailable over the bound on what reports may cost.
        """
        check_keys(keys)
        await self._node.recall(keys)
        index = self._planner.index
        try:
            return await self._verifier.drop_wrong(
                [index.get(namespace_id, key) for key in dict.fromkeys(keys)]
            )
        finally:
            self._node.room.set()

    async def delete_everywhere(self, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> int:
        """Delete blocks for good, on every host of the fleet. Returns how many this one had.

        Raises Unavailable, after it has deleted what it can, if some host did not confirm.
        """
        return await self._everywhere(self.delete(namespace_id, keys), namespace_id, keys)

    async def clear_everywhere(self, namespace_id: NamespaceId | None) -> int:
        """The same for every block of a namespace, or of all."""
        return await self._everywhere(self.clear(namespace_id), namespace_id, None)

    async def _everywhere(
        self,
        here: Coroutine[Any, Any, int],
        namespace_id: NamespaceId | None,
        keys: Sequence[BlockKey] | None,
    ) -> int:
        if self.peers is None:
            return await here
        deleted = asyncio.ensure_future(here)
        there = self.peers.delete(namespace_id, keys)
        # From a host that is told last nothing may come meanwhile.
        with self._node.deletions.deleting(self._of(namespace_id), keys):
            _, outcome = await asyncio.gather(deleted, there, return_exceptions=True)
        self.forbid(namespace_id, keys)
        if isinstance(outcome, BaseException):
            await deleted
            raise outcome
        return await deleted

    def forbid(self, namespace_id: NamespaceId | None, keys: Sequence[BlockKey] | None) -> None:
        """Let nothing of a delete come from other hosts until all of them know of it."""
        lingering = self._node.deletions.linger(self._of(namespace_id), keys, FORBID_S)
        task = asyncio.get_running_loop().create_task(lingering)
        self._lingering.add(task)
        task.add_done_callback(self._lingering.discard)

    async def close(self) -> None:
        """Stop to remember deletes."""
        for task in self._lingering:
            task.cancel()
        await asyncio.gather(*self._lingering, return_exceptions=True)

    def _of(self, namespace_id: NamespaceId | None) -> set[NamespaceId]:
        return {namespace_id} if namespace_id is not None else self._known()

    def _known(self) -> set[NamespaceId]:
        return {each.id for each in self._planner.index.namespaces}

    async def delete(self, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> int:
        """Delete blocks for good: when this returns, not even a power cut brings them back."""
        check_keys(keys)
        await self._node.recall(keys)
        if not any(self._planner.index.get(namespace_id, key) for key in keys):
            self._planner.namespace(namespace_id)  # after a restart, blocks are known before it is
        deletion = self._planner.delete(namespace_id, keys)
        # Keys the index does not know are buried too: an evicted frame may still be on disk.
        try:
            await self._bury([namespace_id], keys)
        finally:
            self._node.room.set()
        return deletion.deleted

    async def clear(self, namespace_id: NamespaceId | None) -> int:
        """Delete every block of a namespace, or of all, for good.

        Raises Unavailable, after it has deleted what it can, if the bucket may keep some. "All" are
        those of this node, and those in the bucket when this node counted it last.
        """
        uncounted: Unavailable | None = None
        if namespace_id is None and self._objects is not None:
            try:
                await self._objects.counted()
            except Unavailable as error:
                uncounted = error
        deletion = self._planner.clear(namespace_id)
        namespaces = {namespace_id} if namespace_id is not None else set()
        if namespace_id is None:
            namespaces = (
                deletion.namespaces | self._known() | self._write_behind.recall.found_namespaces
            )
            if self._objects is not None:
                namespaces |= self._objects.found_namespaces
        try:
            await self._bury(namespaces, None, everything=namespace_id is None)
        finally:
            self._node.room.set()
        if uncounted is not None:
            raise uncounted
        return deletion.deleted

    async def forget_files(self) -> int:
        """Drop every block of this node, for good, and leave the bucket as it is. Returns how many
        there were."""
        deletion = self._planner.clear(None)
        namespaces = (
            deletion.namespaces | self._known() | self._write_behind.recall.found_namespaces
        )
        try:
            with self._node.deletions.deleting(namespaces, None):
                await self._write_behind.bury(namespaces, None)
        finally:
            self._node.room.set()
        return deletion.deleted

    async def _bury(
        self,
        namespaces: Collection[NamespaceId],
        keys: Sequence[BlockKey] | None,
        *,
        everything: bool = False,
    ) -> None:
        """Make a delete durable, here, in the bucket and in the pool; everything: in the pool also
        of namespaces that this node does not know. Call it in one step with the planner's."""
        with self._node.deletions.deleting(namespaces, keys):
            try:
                await self._write_behind.bury(namespaces, keys)
            finally:  # a disk that is out of use keeps no other copy alive, nor does a bucket
                try:
                    if self._objects is not None:
                        await self._objects.delete(namespaces, keys)
                finally:
                    if self._pool is not None:
                        await self._pool.delete(namespaces, keys, everything=everything)
