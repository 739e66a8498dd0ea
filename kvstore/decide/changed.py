"""Which blocks may have come, moved or left since somebody last looked.

The steps that move records call `note`, once for each, so it has to be cheap: it holds a key and no
block, which may rest, or leave, meanwhile. Where a block is now is read in the index when somebody
looks: ten moves of a block in between are told as one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvstore.model.block import BlockKey, Namespace, NamespaceId

IN_DRAM = 1
IN_FILES = 2


class Changed:
    """Keys by namespace, in the order in which their blocks first changed. on_change: told when
    there is a first one.

    As many as there are blocks at most, those that left since the last look, and those that
    somebody asks about. A key that two namespaces are asked about is noted for both.
    """

    def __init__(self) -> None:
        self._noted: dict[NamespaceId, dict[BlockKey, None]] = {}
        self.on_change: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return sum(map(len, self._noted.values()))

    def note(self, key: BlockKey, namespace_id: NamespaceId) -> None:
        """Note that a block came, moved or left."""
        keys = self._noted.get(namespace_id)
        if keys is None:
            if not self._noted:
                self.on_change()
            keys = self._noted[namespace_id] = {}
        keys[key] = None

    def take(self) -> Iterator[tuple[BlockKey, NamespaceId]]:
        """Take all of them. Those that change from now on are for the next look."""
        taken, self._noted = self._noted, {}
        return ((key, namespace_id) for namespace_id, keys in taken.items() for key in keys)


def prefix_groups(namespace: Namespace) -> int:
    """Return the groups, as bits, that a resume needs of every block: those without a window."""
    return sum(1 << i for i, group in enumerate(namespace.groups) if not group.window_tokens)


def place_of(complete: int, resident_groups: int, unframed: int, needed: int) -> int:
    """Return IN_DRAM, IN_FILES, both or 0: which tiers have all the groups `needed` of a block.

    Without such groups, some group has to be there. A block that is complete only in the two tiers
    together is in neither. The masks are those of `StoredBlock`.
    """
    if not complete or complete & needed != needed:
        return 0
    place = IN_DRAM if resident_groups and resident_groups & needed == needed else 0
    return place if unframed & (needed or -1) else place | IN_FILES
