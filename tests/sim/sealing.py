"""Encryption in the simulation: a root in memory, and every nonce that was ever used.

A nonce that one key uses twice gives away what it sealed, so each pair is counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvstore.model.block import Buffer
from kvstore.sealing import FileRoot, Sealing, aead

ROOT = FileRoot(bytes(range(32)))
SEALING = Sealing(ROOT)


class Nonces:
    """Every key and nonce that sealed something. reused: how many of them had before."""

    def __init__(self) -> None:
        self.used: set[tuple[bytes, bytes]] = set()
        self.reused = 0

    def note(self, key: bytes, nonce: bytes) -> None:
        self.reused += (key, nonce) in self.used
        self.used.add((key, nonce))


class _Recording:
    """A cipher that tells which nonces it uses."""

    def __init__(self, cipher: aead.Aead, key: bytes, nonces: Nonces) -> None:
        self._cipher = cipher
        self._key = key
        self._nonces = nonces

    def encrypt_into(self, nonce: bytes, data: Buffer, aad: bytes, buf: memoryview) -> int:
        self._nonces.note(self._key, nonce)
        return self._cipher.encrypt_into(nonce, data, aad, buf)

    def decrypt_into(self, nonce: bytes, data: Buffer, aad: bytes, buf: memoryview) -> int:
        return self._cipher.decrypt_into(nonce, data, aad, buf)


@contextmanager
def recorded() -> Iterator[Nonces]:
    """Count the nonces of every key that is made or opened meanwhile."""
    nonces, new_aead = Nonces(), aead.new_aead

    def recording(key: bytes) -> tuple[aead.Aead, type[Exception]]:
        cipher, wrong = new_aead(key)
        return _Recording(cipher, key, nonces), wrong

    aead.new_aead = recording
    try:
        yield nonces
    finally:
        aead.new_aead = new_aead
