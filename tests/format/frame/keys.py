"""Keys of segments whose every byte is known: for golden files, and to count nonces."""

from __future__ import annotations

from itertools import count

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvstore.format.frame import NONCE_NBYTES, WrappedKey
from kvstore.model.block import Buffer


class CountedKey:
    """A key whose nonces count up instead of being drawn: for golden bytes alone."""

    def __init__(self, tenant: bytes = b"t" * 16, key: bytes = bytes(range(32))) -> None:
        self.tenant = tenant
        self.wrapped = WrappedKey(tenant, 3, b"w" * 40)
        self._aead = AESGCM(key)
        self._nonces = count(1)

    def seal(self, data: Buffer, aad: bytes, target: memoryview) -> bytes:
        nonce = next(self._nonces).to_bytes(NONCE_NBYTES, "big")
        self._aead.encrypt_into(nonce, data, aad, target)
        return nonce + bytes(target[len(data) :])

    def open(self, sealed: Buffer, nonce: bytes, aad: bytes, target: memoryview) -> bool:
        try:
            self._aead.decrypt_into(nonce, sealed, aad, target)
        except InvalidTag:
            target[:] = bytes(len(target))
            return False
        return True

    def open_in_place(self, data: memoryview, seal: bytes, aad: bytes) -> bool:
        sealed = bytes(data) + seal[NONCE_NBYTES:]
        return self.open(sealed, seal[:NONCE_NBYTES], aad, data)
