"""The names and keys of encrypted objects. Pure, once the tenant's keys are known.

Objects of format 2 are those of format 1 (`layout`) with sealed pages and blocks; the object's key
is in its trailer, wrapped by the tenant's. So no object of another tenant opens, nor one that was
forged; and what is stored twice does not have the same bytes, so runs are put only if absent.
"""

from __future__ import annotations

from collections import OrderedDict

from kvstore.model.block import BlockKey, NamespaceId
from kvstore.model.tenant import TenantId
from kvstore.sealing import Keyring
from kvstore.tier.object.failure import ObjectFailed
from kvstore.tier.object.names import Names

REMEMBERED_MAX = 1 << 16  # names of keys, and of namespaces; a prefix is looked up more than once


class SealedNames(Names):
    """The names of one tenant's objects, and the keys that open them.

    ring: None until it was read; nothing is to be asked before.
    """

    def __init__(self, tenant: TenantId, prefix: str) -> None:
        self.tenant = tenant
        self.prefix = prefix
        self.ring: Keyring | None = None
        self._named: OrderedDict[BlockKey, BlockKey] = OrderedDict()
        self._real: OrderedDict[NamespaceId, NamespaceId] = OrderedDict()

    @property
    def keys(self) -> Keyring:
        """The tenant's keys. Raises ObjectFailed until they were read."""
        if self.ring is None:
            raise ObjectFailed(
                "the bucket is not counted yet, nor its keys read", reason="unsurveyed"
            )
        return self.ring

    def namespace(self, namespace_id: NamespaceId) -> NamespaceId:
        named = NamespaceId(self.keys.name(b"namespace", namespace_id))
        self._real[named] = namespace_id
        self._real.move_to_end(named)
        if len(self._real) > REMEMBERED_MAX:
            self._real.popitem(last=False)
        return named

    def key(self, key: BlockKey) -> BlockKey:
        named = self._named.get(key)
        if named is None:
            named = self._named[key] = BlockKey(self.keys.name(b"block", key))
            if len(self._named) > REMEMBERED_MAX:
                self._named.popitem(last=False)
        return named

    def nonce(self, content: bytes) -> int:
        """Return the nonce of a run of that content."""
        return int.from_bytes(self.keys.name(b"content", content)[:8], "little")

    def real(self, named: NamespaceId) -> NamespaceId | None:
        return self._real.get(named)
