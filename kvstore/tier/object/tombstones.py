"""What was deleted, and when. It stays deleted even if objects with it still exist. Pure.

A tombstone object holds tombstone frames (`kvstore.format.frame`), nothing else. It kills its keys,
or its whole namespace, in all objects that are not younger than itself *by the store's clock*.
Blocks stored later live. Namespaces are known here by their ids in names, keys by their own.

Objects within SKEW_S of it count as older: listings round to seconds, and a store's machines may
differ by seconds. That may cost a miss, but a deleted block is never served.

Where the tier is encrypted, tombstones are sealed, and one that does not open kills nothing:
whoever may write to the bucket could delete everything by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvstore.format.frame import (
    KILLED_MAX,
    NO_SEQUENCE,
    NO_TENANT,
    FrameHeader,
    FrameKind,
    SegmentKey,
    encode_footer,
    encode_header,
    parse_header,
    parse_trailer,
)
from kvstore.model.block import PAGE_NBYTES, BlockKey, NamespaceId
from kvstore.model.errors import CorruptBlock
from kvstore.tier.object.names import Names, TombstoneName

SKEW_S = 5.0
KEYS_MAX = 16_384  # in one tombstone object
TOMBSTONE_NBYTES_MAX = (KEYS_MAX // KILLED_MAX + 1) * PAGE_NBYTES
KNOWN_KEYS_MAX = 1 << 20
NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class Tombstone:
    """keys: None kills the whole namespace."""

    name: TombstoneName
    modified: float
    keys: frozenset[BlockKey] | None


def encode_tombstone(
    name: TombstoneName,
    keys: Sequence[BlockKey] | None,
    namespace_id: NamespaceId | None = None,
    key: SegmentKey | None = None,
) -> bytes:
    """Return the object that kills 1..KEYS_MAX keys, or (None) the namespace.

    namespace_id: if it is not the one in the name. key: seals it.
    """
    namespace_id = namespace_id or name.namespace_id
    kind = FrameKind.TOMBSTONE_NAMESPACE if keys is None else FrameKind.TOMBSTONE_KEYS
    batches: list[Sequence[BlockKey]] = [()]
    if keys is not None:
        batches = [keys[start : start + KILLED_MAX] for start in range(0, len(keys), KILLED_MAX)]
    tenant = key.tenant if key is not None else NO_TENANT
    headers = [
        FrameHeader(kind, 1, namespace_id, killed=tuple(each), tenant=tenant) for each in batches
    ]
    data = b"".join(
        encode_header(header, name.tag, number * PAGE_NBYTES, key)
        for number, header in enumerate(headers)
    )
    if key is not None:  # the trailer has the key
        data += encode_footer(name.tag, len(data), [], NO_SEQUENCE, key=key)
    return data


def parse_tombstone(
    name: TombstoneName,
    modified: float,
    data: memoryview,
    names: Names | None = None,
    key: SegmentKey | None = None,
) -> Tombstone:
    """Parse a tombstone. Raises CorruptBlock on anything `encode_tombstone` never wrote.

    names, key: of a bucket that is not in clear.
    In clear, an unreadable tombstone counts as one of the whole namespace: see `unreadable`.
    """
    names = names or Names()
    if key is not None:
        trailer = parse_trailer(data[-PAGE_NBYTES:], name.tag, key)
        if trailer is None or trailer.file_nbytes != len(data):
            raise CorruptBlock(f"tombstone {name.nonce:016x}: no trailer of it")
        data = data[:-PAGE_NBYTES]
    keys: set[BlockKey] = set()
    for offset in range(0, max(len(data), 1), PAGE_NBYTES):
        header = parse_header(data[offset : offset + PAGE_NBYTES], name.tag, offset, key)
        if (
            header is None
            or not header.is_tombstone
            or names.namespace(header.namespace_id) != name.namespace_id
        ):
            raise CorruptBlock(f"tombstone {name.nonce:016x}: page {offset // PAGE_NBYTES}")
        if header.kind is FrameKind.TOMBSTONE_NAMESPACE:
            return Tombstone(name, modified, None)
        keys.update(header.killed)
    return Tombstone(name, modified, frozenset(keys))


def unreadable(name: TombstoneName, modified: float) -> Tombstone:
    """Return the assumption for a tombstone with unreadable or too many keys: it kills all."""
    return Tombstone(name, modified, None)


class Tombstones:
    """All known tombstones. With more keys than fit, whole namespaces are killed: no delete is
    lost."""

    def __init__(self, keys_max: int = KNOWN_KEYS_MAX) -> None:
        self._keys_max = keys_max
        self.known: dict[TombstoneName, Tombstone] = {}
        self._keys: dict[BlockKey, float] = {}
        self._namespaces: dict[NamespaceId, float] = {}
        self._newest: dict[NamespaceId, float] = {}  # of any kind

    def add(self, tombstone: Tombstone) -> None:
        if tombstone.keys is not None and len(self._keys) + len(tombstone.keys) > self._keys_max:
            tombstone = unreadable(tombstone.name, tombstone.modified)
        self.known[tombstone.name] = tombstone
        self._apply(tombstone)

    def keep(self, names: Iterable[TombstoneName]) -> None:
        """Forget all others: no object that they kill is left."""
        kept = [self.known[name] for name in names if name in self.known]
        if len(kept) < len(self.known):
            self._keys.clear()
            self._namespaces.clear()
            self._newest.clear()
            self.known = {tombstone.name: tombstone for tombstone in kept}
            for tombstone in kept:
                self._apply(tombstone)

    def kills(self, namespace_id: NamespaceId, key: BlockKey, modified: float) -> bool:
        """Say whether the block is dead in an object that is as old as that."""
        since = max(self._keys.get(key, NEVER), self._namespaces.get(namespace_id, NEVER))
        return modified <= since + SKEW_S

    def kills_any(
        self, namespace_id: NamespaceId, keys: Iterable[BlockKey], modified: float
    ) -> bool:
        """Say whether any of the blocks is dead in an object that is as old as that."""
        return self.may_kill(namespace_id, modified) and any(
            self.kills(namespace_id, key, modified) for key in keys
        )

    def may_kill(self, namespace_id: NamespaceId, modified: float) -> bool:
        """Say whether anything could be dead in an object of that namespace and age."""
        return modified <= self._newest.get(namespace_id, NEVER) + SKEW_S

    def any_in(self, namespace_id: NamespaceId) -> bool:
        """Say whether anything of that namespace is known to be deleted."""
        return namespace_id in self._newest

    def _apply(self, tombstone: Tombstone) -> None:
        namespace_id, since = tombstone.name.namespace_id, tombstone.modified
        self._newest[namespace_id] = max(self._newest.get(namespace_id, NEVER), since)
        if tombstone.keys is None:
            self._namespaces[namespace_id] = max(self._namespaces.get(namespace_id, NEVER), since)
            return
        for key in tombstone.keys:  # a key is unique over namespaces
            self._keys[key] = max(self._keys.get(key, NEVER), since)
