"""Deletes: for good, on every tier, before they are acknowledged."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence
from itertools import islice
from typing import Any, Protocol

from kvstore.model.block import BlockKey, NamespaceId, check_keys
from kvstore.model.errors import KVStoreError, Unavailable
from kvstore.move.verify import Verifier
from kvstore.store.node import Node
from kvstore.tier.file import DeviceState, DiskFailed

FORGET_BLOCKS = 256  # in one step of the loop: more would hold up everybody else
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
        self._verifier = verifier
        self._lingering: set[asyncio.Task[None]] = set()
        self.peers: FleetDeletes | None = None  # set once they are known
        # Called when a delete is noted; what it returns tells whether nobody lends of it any more.
        self.settling: Callable[[], Callable[[], bool]] = lambda: lambda: True

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
        with self._node.deletions.deleting(_of(namespace_id), keys):
            _, outcome = await asyncio.gather(deleted, there, return_exceptions=True)
        self.forbid(namespace_id, keys)
        if isinstance(outcome, BaseException):
            await deleted
            raise outcome
        return await deleted

    def forbid(self, namespace_id: NamespaceId | None, keys: Sequence[BlockKey] | None) -> None:
        """Let nothing of a delete come from other hosts until all of them know of it."""
        over = self.settling()
        lingering = self._node.deletions.linger(_of(namespace_id), keys, FORBID_S, over)
        task = asyncio.get_running_loop().create_task(lingering)
        self._lingering.add(task)
        task.add_done_callback(self._lingering.discard)

    async def close(self) -> None:
        """Stop to remember deletes."""
        for task in self._lingering:
            task.cancel()
        await asyncio.gather(*self._lingering, return_exceptions=True)

    async def delete(self, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> int:
        """Delete blocks for good: when this returns, not even a power cut brings them back."""
        check_keys(keys)
        await self._node.recall(keys)
        if not any(self._planner.index.get(namespace_id, key) for key in keys):
            self._planner.namespace(namespace_id)  # after a restart, blocks are known before it is
        return await self.burial(namespace_id, keys).run()

    async def clear(self, namespace_id: NamespaceId | None) -> int:
        """Delete every block of a namespace, or of all, for good.

        Raises Unavailable, after it has deleted what it can, if the bucket may keep some. "All" are
        those of this node, and those in the bucket when this node counted it last.
        """
        return await self.burial(namespace_id, None).run()

    def burial(self, namespace_id: NamespaceId | None, keys: Sequence[BlockKey] | None) -> Burial:
        """Return a delete on this node, to be run until it is done; None: all of a namespace, or of
        all. Nobody need have registered the namespace: a directory that is out of use may have
        blocks of it."""
        return Burial(self._node, namespace_id, keys)

    def burial_of_files(self) -> Burial:
        """Return one of every block of this node that leaves bucket and pool as they are."""
        return Burial(self._node, None, None, shared=False)


class Burial:
    """One delete on this node: of keys, of a namespace (keys: None), or of all (both None).

    It is run again until it is done. What is done already is not done again, so what is put anew
    under its keys meanwhile stays. shared: bucket and pool are meant as well. deleted: how many
    blocks this node had.
    """

    def __init__(
        self,
        node: Node,
        namespace_id: NamespaceId | None,
        keys: Sequence[BlockKey] | None,
        *,
        shared: bool = True,
    ) -> None:
        self.deleted = 0
        self._node = node
        self._keys = keys
        self._everything = namespace_id is None
        self._namespace_id = namespace_id
        self._objects = node.objects if shared else None
        self._pool = node.pool if shared else None
        self._begun = False
        self._emptied: set[NamespaceId] = set()  # of everything: what had blocks
        self._namespaces: set[NamespaceId] = set()
        self._for_files: set[NamespaceId] = set()  # whose tombstones were not given to them yet
        self._for_bucket: set[NamespaceId] = set()
        self._is_missed = False  # some directory has not taken its tombstones

    async def run(self) -> int:
        """Delete for good what is not deleted yet; return `deleted`.

        Raises Unavailable, after it has deleted what it can, if a directory, the bucket or the pool
        may keep some.
        """
        uncounted: Unavailable | None = None
        if self._everything and self._objects is not None:
            try:
                await self._objects.counted()
            except Unavailable as error:
                uncounted = error
        if self._keys is not None and not self._begun:
            await self._node.recall(self._keys)
        try:
            with self._node.deletions.deleting(_of(self._namespace_id), self._keys):
                with self._node.planner.index.noting() as came:
                    await self._forget_in_steps(came)
                self._forget(came)
                await self._bury()
        finally:
            self._node.room.set()
        if uncounted is not None:
            raise uncounted
        return self.deleted

    async def _forget_in_steps(self, came: list[BlockKey]) -> None:
        """Forget most of the blocks, and let others run between the steps.

        `_forget` has to forget the rest in the step in which the tombstones get their numbers: what
        is put meanwhile is newer than no tombstone until then. came: what is put, of which that
        step has the last.
        """
        if self._keys is None:
            if not self._begun:
                only = None if self._namespace_id is None else {self._namespace_id}
                await self._clear_in_steps(only, only, came)
            looked_for = set[NamespaceId]()
            while self._begun and (found := self._found() - looked_for):
                looked_for |= found
                await self._clear_in_steps(found, looked_for, came)
        elif self._namespace_id is not None and not self._begun:
            keys = iter(self._keys)
            while len(batch := list(islice(keys, FORGET_BLOCKS))) == FORGET_BLOCKS:
                self.deleted += self._node.planner.delete(self._namespace_id, batch).deleted
                await asyncio.sleep(0)

    async def _clear_in_steps(
        self,
        look_for: Collection[NamespaceId] | None,
        looked_for: Collection[NamespaceId] | None,
        came: list[BlockKey],
    ) -> None:
        """Forget the blocks there are of some namespaces, or all, and what came meanwhile of those
        that were looked for."""
        index = self._node.planner.index
        for keys in index.walks.steps(look_for, most=FORGET_BLOCKS):
            self._clear(keys, look_for)
            self._clear_those_that_came(came, looked_for)
            if look_for is not None and not any(map(index.blocks_of, look_for)):
                break
            await asyncio.sleep(0)

    def _clear(self, keys: Sequence[BlockKey], of: Collection[NamespaceId] | None) -> None:
        """Forget blocks, as far as they are there and of these namespaces."""
        planner = self._node.planner
        deletion = planner.clear(None, planner.index.walks.kept(keys, of))
        self.deleted += deletion.deleted
        self._emptied |= deletion.namespaces

    def _clear_those_that_came(
        self, came: list[BlockKey], of: Collection[NamespaceId] | None
    ) -> None:
        self._clear(came, of)
        came.clear()

    def _found(self) -> set[NamespaceId]:
        """Return what was found, of everything, in files and in the bucket and has no tombstone."""
        found = set[NamespaceId]()
        if self._everything:
            found |= self._node.write_behind.recall.found_namespaces
            if self._objects is not None:
                found |= self._objects.found_namespaces
        return found - self._namespaces

    def _forget(self, came: list[BlockKey]) -> None:
        """Forget the blocks, and note whose tombstones are wanted. Of everything, that is also what
        was found since in a directory that came back, or in the bucket."""
        planner, namespace_id = self._node.planner, self._namespace_id
        found = self._found()
        if self._begun:
            self._clear(came, found)
        else:
            if namespace_id is not None:
                found = {namespace_id}
            if namespace_id is not None and self._keys is not None:
                self.deleted += planner.delete(namespace_id, self._keys).deleted
            else:
                self._clear(came, None if namespace_id is None else found)
            if namespace_id is None:
                found |= self._emptied
                found |= {each.id for each in planner.index.namespaces}
        self._begun = True
        self._namespaces |= found
        self._for_files |= found
        self._for_bucket |= found

    async def _bury(self) -> None:
        """Make it durable, here, in the bucket and in the pool; of everything, in the pool also of
        namespaces that this node does not know. Call it in one step with `_forget`."""
        try:
            await self._bury_in_files()
        finally:  # a disk that is out of use keeps no other copy alive, nor does a bucket
            try:
                await self._bury_in_bucket()
            finally:
                await self._bury_in_pool()

    async def _bury_in_files(self) -> None:
        """Write the tombstones once: a directory that misses them takes them before it is used
        again, and that is waited for. Keys the index does not know are buried too: an evicted frame
        may still be on disk."""
        namespaces = set(self._for_files)
        if namespaces or self._everything:
            try:
                await self._node.write_behind.bury(namespaces, self._keys)
            except KVStoreError:
                self._for_files -= namespaces
                self._is_missed = True
                raise
            self._for_files -= namespaces
        if self._is_missed:
            self._check_files()
            self._is_missed = False

    def _check_files(self) -> None:
        """Raise DiskFailed unless every directory has taken the tombstones that it missed."""
        file = self._node.write_behind.file
        for device in file.devices if file is not None else ():
            if device.mount is None or device.missed or device.state is not DeviceState.OK:
                raise DiskFailed(
                    f"{device.path} is {device.state} and has not taken every delete: see `kvstore "
                    "status`, or take it out of file.path"
                )

    async def _bury_in_bucket(self) -> None:
        namespaces = set(self._for_bucket)
        if self._objects is not None and namespaces:
            await self._objects.delete(namespaces, self._keys)
            self._for_bucket -= namespaces

    async def _bury_in_pool(self) -> None:
        if self._pool is not None:
            await self._pool.delete(self._namespaces, self._keys, everything=self._everything)
            self._pool = None


def _of(namespace_id: NamespaceId | None) -> Collection[NamespaceId] | None:
    return None if namespace_id is None else {namespace_id}
