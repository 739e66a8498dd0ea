"""Which runs the bucket has, as far as this daemon knows, so that not all of a prefix is looked up
whenever it grows."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection

from kvstore.model.block import BlockKey, NamespaceId

RUNS_MAX = 1 << 18
FORGOTTEN_MAX = 1 << 12  # namespaces; over it, all count as forgotten
BELIEVED_S = 3600.0  # then the bucket is asked again: it may have collected what was there
SETTLE_S = 10.0  # what is stored so soon after a tombstone may count as older than it
NEVER = float("-inf")


class Uploaded:
    """Runs by their last block. Of each, the bucket had all of the prefix up to there.

    What is deleted in the middle of a prefix makes that untrue of every run behind it, so a delete
    forgets the runs of its whole namespace. That is a time to compare with, so it costs nothing.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._since: OrderedDict[BlockKey, float] = OrderedDict()
        self._forgotten: dict[NamespaceId, float] = {}  # -> when
        self._all_forgotten = NEVER

    def note(self, last: BlockKey, since: float) -> None:
        """Note that the bucket has a prefix up to the last block of a run. since: when the first of
        it was looked at."""
        self._since[last] = since
        self._since.move_to_end(last)
        if len(self._since) > RUNS_MAX:
            self._since.popitem(last=False)

    def since(self, namespace_id: NamespaceId, last: BlockKey) -> float | None:
        """Return when the bucket was seen to have a prefix up to a block; None: look again."""
        since = self._since.get(last)
        if since is None or since + BELIEVED_S <= self._now():
            return None
        return since if since > self.settled_at(namespace_id) else None

    def settled_at(self, namespace_id: NamespaceId) -> float:
        """Return from when on what is stored of a namespace lives, whatever was deleted of it."""
        return max(self._all_forgotten, self._forgotten.get(namespace_id, NEVER)) + SETTLE_S

    def forget(self, namespaces: Collection[NamespaceId]) -> None:
        """Forget the runs of namespaces: something of them is deleted."""
        now = self._now()
        self._forgotten.update(dict.fromkeys(namespaces, now))
        if len(self._forgotten) > FORGOTTEN_MAX:
            self._all_forgotten = now
            self._forgotten.clear()
