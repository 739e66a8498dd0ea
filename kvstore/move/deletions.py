"""What is deleted while it is on its way to or from a bucket, or another host, does not arrive.

A fetch or an upload takes seconds, and a delete as well: until the tombstone is in the bucket, or
every host of a fleet was told, a lookup still finds what the planner has forgotten already. So each
watches for the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from kvstore.model.block import BlockKey, NamespaceId

LINGERING_MAX = 256  # deletes that are remembered for themselves
WHOLE_MAX = 256  # of how many groups of namespaces all is; then of all there are
LOOK_S = 0.5  # between two looks whether one is over
Over = Callable[[], bool]


class Watch:
    """A piece of work on some keys. dead: those of them that were deleted since it began."""

    def __init__(self, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> None:
        self.dead: set[BlockKey] = set()
        self._namespace_id = namespace_id
        self._keys = frozenset(keys)

    def deleted(
        self, namespaces: Collection[NamespaceId] | None, keys: Collection[BlockKey] | None
    ) -> None:
        """Take note of a delete of keys, or (None) of everything, in some namespaces, or (None) in
        all, whether or not this host knows them yet."""
        if namespaces is None or self._namespace_id in namespaces:
            self.dead |= self._keys if keys is None else self._keys.intersection(keys)


class Deletions:
    """All such pieces of work, and all deletes, that are under way."""

    def __init__(self) -> None:
        self._deletions: set[Watch] = set()
        self._lingering = 0
        self._whole: dict[frozenset[NamespaceId] | None, Over | None] = {}  # the next one's, if any
        self._deletes: list[tuple[Collection[NamespaceId] | None, Collection[BlockKey] | None]] = []

    @contextmanager
    def watch(self, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> Iterator[Watch]:
        """Learn for as long as the context lasts what of `keys` is being, or gets, deleted."""
        watch = Watch(namespace_id, keys)
        for delete in self._deletes:
            watch.deleted(*delete)
        self._deletions.add(watch)
        try:
            yield watch
        finally:
            self._deletions.discard(watch)

    async def linger(
        self,
        namespaces: Collection[NamespaceId] | None,
        keys: Collection[BlockKey] | None,
        seconds: float,
        over: Over = lambda: True,
    ) -> None:
        """Let nothing of a delete arrive for a while, and until it is `over`: not every host may
        know of it yet. Over a bound, all of the namespaces counts as deleted for as long."""
        if self._lingering >= LINGERING_MAX:
            await self._linger_whole(namespaces, seconds, over)
            return
        self._lingering += 1
        try:
            with self.deleting(namespaces, keys):
                await _until(seconds, over)
        finally:
            self._lingering -= 1

    async def _linger_whole(
        self, namespaces: Collection[NamespaceId] | None, seconds: float, over: Over
    ) -> None:
        """The same for all of the namespaces. If one of them does so already, it goes on for this
        one: however many come, one is remembered. Over a bound, it is for all namespaces."""
        name = None if namespaces is None else frozenset(namespaces)
        if name not in self._whole and len(self._whole) >= WHOLE_MAX:
            namespaces = name = None
        if name in self._whole:
            self._whole[name] = over
            return
        following: Over | None = over
        try:
            with self.deleting(namespaces, None):
                while following is not None:
                    self._whole[name] = None
                    await _until(seconds, following)
                    following = self._whole[name]
        finally:
            del self._whole[name]

    @contextmanager
    def deleting(
        self, namespaces: Collection[NamespaceId] | None, keys: Collection[BlockKey] | None
    ) -> Iterator[None]:
        """Tell those who watch, now and for as long as the context lasts: see `Watch.deleted`."""
        # Sets: of two of them, the smaller one is walked through. Deletes may linger for long.
        delete = (namespaces, None if keys is None else frozenset(keys))
        for watch in self._deletions:
            watch.deleted(*delete)
        self._deletes.append(delete)
        try:
            yield
        finally:
            self._deletes.remove(delete)


async def _until(seconds: float, over: Over) -> None:
    await asyncio.sleep(seconds)
    while not over():  # noqa: ASYNC110 - it is asked of what has no events
        await asyncio.sleep(LOOK_S)
