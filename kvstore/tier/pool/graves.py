"""What was deleted here, so that a pool cannot bring it back. Pure.

A value says when it was put, by the clock of its writer. A grave says up to when values of a key,
of a namespace, or all, are dead: a minute after the delete, as clocks of hosts differ. Whoever puts
what it knows to be deleted says a later time. So a grave may cost a miss, and never serves what was
deleted, even if the pool restores it from a disk or a stale copy of its master.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

import msgspec

from kvstore.model.block import KEY_NBYTES, BlockKey, NamespaceId

SKEW_MS = 60_000
KEYS_MAX = 8192
NAMESPACES_MAX = 4096
STAMP_MAX = (1 << 63) - 1


class _Stored(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    version: int
    everything: int
    namespaces: list[tuple[bytes, int]]
    keys: list[tuple[bytes, bytes, int]]


class Graves:
    """Bounded: beyond it the oldest graves of keys become those of their namespaces, and those of
    namespaces one of everything."""

    def __init__(self) -> None:
        self._everything = 0
        self._namespaces: OrderedDict[NamespaceId, int] = OrderedDict()
        self._keys: OrderedDict[tuple[NamespaceId, BlockKey], int] = OrderedDict()

    def floor(self, namespace_id: NamespaceId, key: BlockKey) -> int:
        """Return the time, in ms since the epoch, up to which values of a key are dead."""
        of_namespace = max(self._everything, self._namespaces.get(namespace_id, 0))
        return max(of_namespace, self._keys.get((namespace_id, key), 0))

    def bury(
        self,
        namespaces: Collection[NamespaceId],
        keys: Sequence[BlockKey] | None,
        at_ms: int,
        *,
        everything: bool = False,
    ) -> None:
        """Take note of a delete of keys, of (None) whole namespaces, or of everything."""
        until = at_ms + SKEW_MS
        if everything:
            known = (*self._namespaces.values(), *self._keys.values())  # by a clock that was ahead
            self._everything = max(self._everything, until, *known)
            self._namespaces.clear()
            self._keys.clear()
            return
        for namespace_id in namespaces:
            if keys is None:
                self._bury_namespace(namespace_id, until)
            for key in keys or ():
                self._bury_key(namespace_id, key, until)

    def encode(self) -> bytes:
        namespaces = [(bytes(each), until) for each, until in self._namespaces.items()]
        keys = [(bytes(ns), bytes(key), until) for (ns, key), until in self._keys.items()]
        return msgspec.msgpack.encode(_Stored(1, self._everything, namespaces, keys))

    def merge(self, data: bytes) -> bool:
        """Take what `encode` returned beside what is known; say whether it was that."""
        try:
            stored = msgspec.msgpack.decode(data, type=_Stored)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False
        ids = [each for each, _ in stored.namespaces]
        ids += [each for ns, key, _ in stored.keys for each in (ns, key)]
        stamps = [stored.everything, *(at for _, at in stored.namespaces)]
        stamps += [at for *_, at in stored.keys]
        valid = all(len(each) == KEY_NBYTES for each in ids)
        if stored.version != 1 or not valid or not all(0 <= at <= STAMP_MAX for at in stamps):
            return False
        self._everything = max(self._everything, stored.everything)
        for namespace_id, until in stored.namespaces:
            self._bury_namespace(NamespaceId(namespace_id), until)
        for namespace_id, key, until in stored.keys:
            self._bury_key(NamespaceId(namespace_id), BlockKey(key), until)
        return True

    def _bury_namespace(self, namespace_id: NamespaceId, until: int) -> None:
        self._namespaces[namespace_id] = max(until, self._namespaces.get(namespace_id, 0))
        self._namespaces.move_to_end(namespace_id)
        while len(self._namespaces) > NAMESPACES_MAX:
            _, oldest = self._namespaces.popitem(last=False)
            self._everything = max(self._everything, oldest)

    def _bury_key(self, namespace_id: NamespaceId, key: BlockKey, until: int) -> None:
        where = (namespace_id, key)
        self._keys[where] = max(until, self._keys.get(where, 0))
        self._keys.move_to_end(where)
        while len(self._keys) > KEYS_MAX:
            (crowded, _), oldest = self._keys.popitem(last=False)
            self._bury_namespace(crowded, oldest)
