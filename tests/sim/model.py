"""What the store may serve, kept in plain dicts: every write is a version with bytes of its own.

`publish` and `forget` are called in the very step in which the store carries a commit or a delete
out, so the order of events here is the order there. A version may be served if it was published
after the last delete of its key that counts: in the life of the daemon that carried it out, every
delete counts; after a restart, those that were answered.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import NamedTuple

from kvstore.model.block import BlockKey, Group, Namespace, Part
from kvstore.model.checksum import checksum
from kvstore.model.keys import KeyChain, root_key

SPEC = Namespace(2, (Group("full", 9000), Group("window", 4096, window_tokens=5)), ())
PARTS = (Part(0, 0), Part(1, 0))
CHAIN_BLOCKS = 14
CHAINS = [KeyChain(root_key(SPEC.id), 2).update([name] * 2 * CHAIN_BLOCKS) for name in range(1, 6)]
KEYS = [key for chain in CHAINS for key in chain]


class Item(NamedTuple):
    """One record's name."""

    key: BlockKey
    part: Part


class Version(NamedTuple):
    """One writer's bytes for an item."""

    item: Item
    data: bytes
    checksum: int


class Violation(Exception):
    """A promise was broken. kind: lost, wrong, resurrected, leaked or bug."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Model:
    """See the module."""

    def __init__(self) -> None:
        self.owed: dict[Item, int] = {}  # answered as durable -> checksum
        self._written = 0
        self._event = 0
        self._versions: dict[int, Version] = {}  # by checksum
        self._published: dict[int, int] = {}  # checksum -> event
        self._forgotten: dict[BlockKey, int] = {}  # key -> event of a delete carried out
        self._buried: dict[BlockKey, int] = {}  # key -> event of a delete answered
        self._asked: dict[BlockKey, int] = {}  # key -> event of a delete, in any life

    def write(self, item: Item) -> Version:
        """Return new bytes for an item, unlike any before."""
        self._written += 1
        unit = random.Random(self._written).randbytes(48)
        head = item.key + bytes(item.part) + self._written.to_bytes(8, "little")
        nbytes = SPEC.record_nbytes(item.part)
        data = (head + unit * (nbytes // len(unit) + 1))[:nbytes]
        version = Version(item, data, checksum(data))
        self._versions[version.checksum] = version
        return version

    def data(self, value: int) -> bytes:
        """Return the bytes a checksum stands for."""
        return self._versions[value].data

    def publish(self, versions: Iterable[Version]) -> list[Version]:
        """Note a commit; returns what it published, to be taken back if it is refused."""
        fresh = [v for v in versions if v.checksum not in self._published]
        self._event += 1
        self._published.update((version.checksum, self._event) for version in fresh)
        return fresh

    def retract(self, versions: Iterable[Version]) -> None:
        for version in versions:
            del self._published[version.checksum]

    def forget(self, keys: Iterable[BlockKey]) -> int:
        """Note that a delete is carried out."""
        self._event += 1
        for key in keys:
            self._forgotten[key] = self._asked[key] = self._event
            for part in PARTS:
                self.owed.pop(Item(key, part), None)
        return self._event

    def bury(self, keys: Iterable[BlockKey], event: int) -> None:
        """Note that this delete was answered."""
        for key in keys:
            self._buried[key] = max(event, self._buried.get(key, 0))

    def may_be_gone(self, item: Item, value: int) -> bool:
        """Say whether somebody asked for the deletion of a version.

        One that was not answered may be found on a disk that was missing, and count from then on.
        """
        return self._published.get(value, 0) <= self._asked.get(item.key, 0)

    def restart(self) -> None:
        """Deletes that were not answered may or may not have happened."""
        self._forgotten = dict(self._buried)
        self.owed.clear()

    def check(self, item: Item, value: int) -> Version:
        """Return the version a checksum stands for. Raises Violation if it may not be served."""
        version = self._versions.get(value)
        if version is None or version.item != item or value not in self._published:
            raise Violation("wrong", f"{_name(item)} has a checksum nobody committed for it")
        if self._published[value] <= self._forgotten.get(item.key, 0):
            raise Violation("resurrected", f"{_name(item)} was deleted")
        return version


def _name(item: Item) -> str:
    chain = next(i for i, chain in enumerate(CHAINS) if item.key in chain)
    return f"chain {chain} block {CHAINS[chain].index(item.key)} group {item.part.group}"
