"""What the store may serve, kept in plain dicts: every write is a version with bytes of its own.

`publish` and `forget` are called in the very step in which the store carries a commit or a delete
out, so the order of events here is the order there. A version may be served if it was published
after the last delete of its key that counts: in the life of the daemon that carried it out, every
delete counts; after a restart, those that were answered.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvstore.model.block import BlockKey, Group, Namespace, Part
from kvstore.model.checksum import checksum
from kvstore.model.keys import KeyChain, root_key
from kvstore.model.tenant import NO_TENANT_ID
from tests.lossy import base_record, fine_record

CHAIN_BLOCKS = 14
BASE_NBYTES, FINE_NBYTES = 3500, 3000
EXACT_SHARE = 0.1  # of the blocks of a lossy namespace, beside each first one


class Space:
    """A namespace that a seed is about, and what engines ask of it.

    bases: the parts that have to survive; fine: those that refine others, in the same order.
    """

    def __init__(self, kind: str, spec: Namespace, chains: int = 5) -> None:
        self.kind = kind
        self.spec = spec
        base = [i for i in range(len(spec.groups)) if i not in spec.fine]
        self.bases = tuple(Part(group, 0) for group in base)
        self.fine = tuple(Part(group, 0) for group in spec.fine)
        self.parts = self.bases + self.fine
        tokens = spec.block_tokens
        self.chains = [
            KeyChain(root_key(spec.id), tokens).update([name] * tokens * CHAIN_BLOCKS)
            for name in range(1, chains + 1)
        ]
        self.keys = [key for chain in self.chains for key in chain]

    def base_of(self, part: Part) -> Part:
        """Return the part that a fine one refines; of another, itself."""
        return self.bases[self.fine.index(part)] if part in self.fine else part

    def needs_fine(self, part: Part, nbytes: int) -> bool:
        """Say whether a base of so many bytes has a fine part; exact ones have none."""
        return bool(self.fine) and part in self.bases and nbytes == BASE_NBYTES

    def nbytes(self, part: Part, block: int, draw: random.Random) -> int:
        """Return the size of a record that an engine makes of a block."""
        most = self.spec.record_nbytes(part)
        if not self.spec.groups[part.group].varies:
            return most
        if not self.fine:
            return most - 64 * draw.randrange(most // 256)
        exact = block == 0 or draw.random() < EXACT_SHARE
        return most - 64 * draw.randrange(9) if exact else BASE_NBYTES


def _lossy() -> Namespace:
    windows = (0, 5)
    bases = [Group(f"{w}", 8000, window_tokens=w, varies=True) for w in windows]
    fine = [
        Group(f"{w}.fine", FINE_NBYTES, window_tokens=w, refines=at, base_nbytes=BASE_NBYTES)
        for at, w in enumerate(windows)
    ]
    return Namespace(2, (*bases, *fine), (), fidelity="ep")


SPACES = (
    Space("fixed", Namespace(2, (Group("full", 9000), Group("window", 4096, 5)), ())),
    Space(
        "varies",
        Namespace(2, (Group("full", 9000, varies=True), Group("w", 4096, 5, varies=True)), ()),
    ),
    Space("lossy", _lossy()),
)


class Item(NamedTuple):
    """One record's name."""

    key: BlockKey
    part: Part


class Version(NamedTuple):
    """One writer's bytes for an item. pair: of a fine part, the checksum of its base."""

    item: Item
    data: bytes
    checksum: int
    pair: int = 0


class Violation(Exception):
    """A promise was broken. kind: lost, wrong, resurrected, foreign, leaked or bug."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Model:
    """See the module. owner: whose blocks they are. others: models of other owners on the same
    machine, who write the same keys."""

    def __init__(self, space: Space = SPACES[0], owner: bytes = NO_TENANT_ID) -> None:
        self.space = space
        self.owner = owner
        self.others: Sequence[Model] = ()
        self.owed: dict[Item, int] = {}  # answered as durable -> checksum
        self._written = 0
        self._event = 0
        self._versions: dict[int, Version] = {}  # by checksum
        self._published: dict[int, int] = {}  # checksum -> event
        self._forgotten: dict[BlockKey, int] = {}  # key -> event of a delete carried out
        self._buried: dict[BlockKey, int] = {}  # key -> event of a delete answered
        self._asked: dict[BlockKey, int] = {}  # key -> event of a delete, in any life

    def write(self, item: Item, nbytes: int, base: Version | None = None) -> Version:
        """Return new bytes for an item, unlike any before. base: the one of a fine part."""
        self._written += 1
        owner = self.owner.hex() if self.owner != NO_TENANT_ID else ""
        writer, name = f"{owner}{self._written}", item.key.hex()
        if base is not None:
            data = fine_record(writer, name, item.part, nbytes, base.data)
        else:
            exact = not self.space.needs_fine(item.part, nbytes)
            data = base_record(writer, name, item.part, nbytes, exact=exact)
        pair = base.checksum if base is not None else 0
        version = Version(item, data, checksum(data), pair)
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
            for part in self.space.parts:
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
        if version is None and any(value in other._versions for other in self.others):
            raise Violation("foreign", f"{self._name(item)} has a checksum of another tenant's")
        if version is None or version.item != item or value not in self._published:
            raise Violation("wrong", f"{self._name(item)} has a checksum nobody committed for it")
        if self._published[value] <= self._forgotten.get(item.key, 0):
            raise Violation("resurrected", f"{self._name(item)} was deleted")
        return version

    def _name(self, item: Item) -> str:
        chains = self.space.chains
        chain = next(i for i, chain in enumerate(chains) if item.key in chain)
        at = chains[chain].index(item.key)
        return f"chain {chain} block {at} group {item.part.group}"
