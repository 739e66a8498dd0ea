"""Deletes: for good, on every tier, before they are acknowledged."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvstore.model.block import BlockKey, NamespaceId, check_keys
from kvstore.model.errors import Unavailable
from kvstore.move.verify import Verifier
from kvstore.store.node import Node


class Deletes:
    """Deletes blocks, and those of which a reader says that they are wrong."""

    def __init__(self, node: Node, verifier: Verifier) -> None:
        self._node = node
        self._planner = node.planner
        self._write_behind = node.write_behind
        self._objects = node.objects
        self._verifier = verifier

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
            known = {each.id for each in self._planner.index.namespaces}
            namespaces = deletion.namespaces | known | self._write_behind.recall.found_namespaces
            if self._objects is not None:
                namespaces |= self._objects.found_namespaces
        try:
            await self._bury(namespaces, None)
        finally:
            self._node.room.set()
        if uncounted is not None:
            raise uncounted
        return deletion.deleted

    async def _bury(
        self, namespaces: Collection[NamespaceId], keys: Sequence[BlockKey] | None
    ) -> None:
        """Make a delete durable, here and in the bucket. Call it in one step with the planner's."""
        with self._node.deletions.deleting(namespaces, keys):
            try:
                await self._write_behind.bury(namespaces, keys)
            finally:  # a disk that is out of use keeps no other copy alive
                if self._objects is not None:
                    await self._objects.delete(namespaces, keys)
