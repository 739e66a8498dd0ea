"""The keys of one tenant in one place, a directory or a bucket, and the text that stores them.

Each is random and wrapped by a key that is derived of the root's secret, of the tenant's id and of
the epoch, so that none opens as another's. Epoch 0 names things and never changes; the highest
epoch wraps the keys of new segments.
"""

from __future__ import annotations

import secrets
import struct
import time
from collections.abc import Collection, Mapping
from typing import NamedTuple

import msgspec

from kvstore.format.frame import WrappedKey
from kvstore.model.errors import ConfigError
from kvstore.model.tenant import NO_TENANT_ID, TenantId
from kvstore.sealing.aead import AeadKey, derive, prf, unwrap, wrap
from kvstore.sealing.root import Root
from kvstore.sealing.secret import KEY_NBYTES, Secret

NAMES = 0  # the epoch of the key that names things
EPOCHS_MAX = 1 << 10
EPOCH_MAX = (1 << 32) - 1
_EPOCH = struct.Struct("<I")


class Sealing(NamedTuple):
    """How a tier is encrypted: whose it is, and what wraps the tenant's keys.

    accept_plain: serve what was stored before, in clear. Whoever can write to the disk can then
    forge it.
    """

    root: Root
    tenant: TenantId = NO_TENANT_ID
    accept_plain: bool = False


class TenantKey(NamedTuple):
    """The tenant's key of one epoch. created_s: Unix time."""

    key: Secret
    wrapped: bytes
    created_s: int


class _StoredKey(msgspec.Struct, forbid_unknown_fields=True):
    epoch: int
    wrapped: bytes
    created_s: int


class _Stored(msgspec.Struct, forbid_unknown_fields=True):
    kvstore_keys: int
    tenant: bytes
    root: bytes
    keys: list[_StoredKey]


class Keyring:
    """Never changes: `rotated` and the like return another one. Safe to use in several threads."""

    def __init__(self, tenant: bytes, root: bytes, keys: Mapping[int, TenantKey]) -> None:
        """root: what the root stores of its secret."""
        self.tenant = tenant
        self.keys = dict(keys)
        self.root = root
        self._names = derive(self.keys[NAMES].key, b"kvstore names")

    @classmethod
    def create(cls, root: Root, tenant: bytes) -> Keyring:
        """Return the keys of a new place. Blocking."""
        secret, stored = root.create(tenant)
        keys = {epoch: _new(secret, tenant, epoch) for epoch in (NAMES, 1)}
        return cls(tenant, stored, keys)

    @classmethod
    def load(cls, root: Root, tenant: bytes, data: bytes, where: str) -> Keyring:
        """Return the keys that `encode` stored. Blocking.

        Raises ConfigError if this is no key file of the tenant, or the root does not open it.
        """
        stored = _decode(data)
        if stored is None:
            raise ConfigError(f"{where}: these are no keys; put them back from a backup")
        if stored.tenant != tenant:
            raise ConfigError(f"{where}: the keys of another tenant, {stored.tenant.hex()}")
        secret = root.secret(tenant, stored.root)
        keys = {}
        for each in stored.keys:
            key = unwrap(_wrapping(secret, tenant, each.epoch), each.wrapped)
            if key is None:
                raise ConfigError(
                    f"{where}: the root key does not open it; use the root that wrapped it, or "
                    "start with empty directories"
                )
            keys[each.epoch] = TenantKey(Secret(key), each.wrapped, each.created_s)
        return cls(tenant, stored.root, keys)

    @property
    def current(self) -> int:
        """The epoch of new segments."""
        return max(self.keys)

    @property
    def epochs(self) -> list[int]:
        """Those that wrap keys of segments."""
        return sorted(epoch for epoch in self.keys if epoch != NAMES)

    def new_key(self) -> AeadKey:
        """Return the random key of a new segment or object."""
        key = secrets.token_bytes(KEY_NBYTES)
        epoch = self.current
        wrapped = wrap(self.keys[epoch].key.reveal(), key)
        return AeadKey(key, WrappedKey(self.tenant, epoch, wrapped))

    def open(self, wrapped: WrappedKey) -> AeadKey | None:
        """Return the key of a segment or object; None if it is not of this tenant and epoch."""
        tenant_key = self.keys.get(wrapped.epoch)
        if wrapped.tenant != self.tenant or tenant_key is None or wrapped.epoch == NAMES:
            return None
        key = unwrap(tenant_key.key.reveal(), wrapped.wrapped)
        return AeadKey(key, wrapped) if key is not None and len(key) == KEY_NBYTES else None

    def name(self, purpose: bytes, data: bytes) -> bytes:
        """Return 32 bytes that stand for `data`, and say nothing about it without the key."""
        return prf(self._names, purpose + data)

    def rotated(self, root: Root) -> Keyring:
        """Return these keys with one of a new epoch. Blocking. Raises ConfigError."""
        epoch = self.current + 1
        if len(self.keys) >= EPOCHS_MAX or epoch > EPOCH_MAX:
            raise ConfigError(f"{len(self.keys)} epochs are in use: kvstore gc, or wait")
        secret = root.secret(self.tenant, self.root)
        new = {epoch: _new(secret, self.tenant, epoch)}
        return Keyring(self.tenant, self.root, self.keys | new)

    def rewrapped(self, root: Root) -> Keyring:
        """Return these keys wrapped by another root. Blocking."""
        secret, stored = root.create(self.tenant)
        keys = {
            epoch: each._replace(
                wrapped=wrap(_wrapping(secret, self.tenant, epoch), each.key.reveal())
            )
            for epoch, each in self.keys.items()
        }
        return Keyring(self.tenant, stored, keys)

    def without(self, epochs: Collection[int]) -> Keyring:
        """Return these keys without some old epochs."""
        kept = {epoch: key for epoch, key in self.keys.items() if epoch not in epochs}
        return Keyring(self.tenant, self.root, kept)

    def encode(self) -> bytes:
        """Return the text to store. It tells nothing without the root."""
        keys = [
            _StoredKey(epoch, each.wrapped, each.created_s) for epoch, each in self.keys.items()
        ]
        return msgspec.json.encode(_Stored(1, self.tenant, self.root, keys))


def stored_tenant(data: bytes) -> bytes | None:
    """Return whose keys these are; None if they are none."""
    stored = _decode(data)
    return stored.tenant if stored is not None else None


class StoredKeys(NamedTuple):
    """What may be told of stored keys without their root: when each epoch began, in Unix time."""

    tenant: bytes
    epochs: dict[int, int]


def stored_keys(data: bytes) -> StoredKeys | None:
    """Return what is stored, None if these are no keys."""
    stored = _decode(data)
    if stored is None:
        return None
    epochs = {each.epoch: each.created_s for each in stored.keys if each.epoch != NAMES}
    return StoredKeys(stored.tenant, epochs)


def stored_root(data: bytes) -> bytes | None:
    """Return what the root has stored beside the keys; None if they are none."""
    stored = _decode(data)
    return stored.root if stored is not None else None


def _decode(data: bytes) -> _Stored | None:
    try:
        stored = msgspec.json.decode(data, type=_Stored)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    epochs = [each.epoch for each in stored.keys]
    valid = stored.kvstore_keys == 1 and len(set(epochs)) == len(epochs) <= EPOCHS_MAX
    in_range = all(0 <= epoch <= EPOCH_MAX for epoch in epochs) and {NAMES} < set(epochs)
    return stored if valid and in_range and len(stored.tenant) == 16 else None


def _new(secret: Secret, tenant: bytes, epoch: int) -> TenantKey:
    key = secrets.token_bytes(KEY_NBYTES)
    wrapped = wrap(_wrapping(secret, tenant, epoch), key)
    return TenantKey(Secret(key), wrapped, int(time.time()))


def _wrapping(secret: Secret, tenant: bytes, epoch: int) -> bytes:
    return derive(secret, b"kvstore tenant key" + tenant + _EPOCH.pack(epoch))
