"""AES-256-GCM, AES key wrap and key derivation, all of `cryptography`.

GCM lets go of the interpreter lock while it works.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from kvstore.format.frame import NONCE_NBYTES, TAG_NBYTES, WrappedKey
from kvstore.model.block import Buffer
from kvstore.model.errors import ConfigError
from kvstore.sealing.secret import KEY_NBYTES, Secret

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers import AEADDecryptionContext

SMALL_NBYTES = 64 << 10  # are copied sooner than a context is made


class Aead(Protocol):
    """What is used of `AESGCM`."""

    def encrypt_into(self, nonce: bytes, data: Buffer, aad: bytes, buf: memoryview) -> int: ...

    def decrypt_into(self, nonce: bytes, data: Buffer, aad: bytes, buf: memoryview) -> int: ...


class AeadKey:
    """The key of one segment or object. Implements `kvstore.format.frame.SegmentKey`."""

    __slots__ = ("_aead", "_opener", "_wrong", "wrapped")

    def __init__(self, key: bytes, wrapped: WrappedKey) -> None:
        self.wrapped = wrapped
        self._aead, self._wrong = new_aead(key)
        self._opener = _new_opener(key)

    @property
    def tenant(self) -> bytes:
        return self.wrapped.tenant

    def seal(self, data: Buffer, aad: bytes, target: memoryview) -> bytes:
        """See `SegmentKey`. A key seals at most a few million pieces, each with 96 random bits."""
        nonce = os.urandom(NONCE_NBYTES)
        self._aead.encrypt_into(nonce, data, aad, target)
        return nonce + bytes(target[-TAG_NBYTES:])

    def open(self, sealed: Buffer, nonce: bytes, aad: bytes, target: memoryview) -> bool:
        try:
            self._aead.decrypt_into(nonce, sealed, aad, target)
        except self._wrong:
            # What was decrypted before the tag was compared is whatever an attacker made of it.
            target[:] = bytes(len(target))
            return False
        return True

    def open_in_place(self, data: memoryview, seal: bytes, aad: bytes) -> bool:
        """See `SegmentKey`. A record is read from memory once, and no other memory is needed: a
        third faster than `open`, but for small pieces, where a context of its own takes longer."""
        if len(data) <= SMALL_NBYTES:
            sealed = b"".join((data, seal[NONCE_NBYTES:]))
            return self.open(sealed, seal[:NONCE_NBYTES], aad, data)
        opener = self._opener(seal[:NONCE_NBYTES], seal[NONCE_NBYTES:])
        try:
            opener.authenticate_additional_data(aad)
            opener.update_into(data, data)
            opener.finalize()
        except BaseException as error:  # nobody is to read what no tag vouches for
            data[:] = bytes(len(data))
            if isinstance(error, self._wrong):
                return False
            raise
        return True

    def __repr__(self) -> str:
        return f"AeadKey(epoch={self.wrapped.epoch})"


def new_aead(key: bytes) -> tuple[Aead, type[Exception]]:
    """Return the cipher of a key, and what it raises for a wrong tag."""
    try:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise _missing() from error
    return AESGCM(key), InvalidTag


def _new_opener(key: bytes) -> Callable[[bytes, bytes], AEADDecryptionContext]:
    """Return what begins to decrypt one piece, given its nonce and tag."""
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import AES256
        from cryptography.hazmat.primitives.ciphers.modes import GCM
    except ImportError as error:
        raise _missing() from error
    algorithm = AES256(key)
    return lambda nonce, tag: Cipher(algorithm, GCM(nonce, tag)).decryptor()


def wrap(wrapping: bytes, key: bytes) -> bytes:
    """Return `key` wrapped (RFC 3394), 8 bytes longer."""
    try:
        from cryptography.hazmat.primitives.keywrap import aes_key_wrap
    except ImportError as error:
        raise _missing() from error
    return aes_key_wrap(wrapping, key)


def unwrap(wrapping: bytes, wrapped: bytes) -> bytes | None:
    """Return what `wrap` was given; None for anything else, or with another wrapping key."""
    try:
        from cryptography.hazmat.primitives.keywrap import InvalidUnwrap, aes_key_unwrap
    except ImportError as error:
        raise _missing() from error
    try:
        return aes_key_unwrap(wrapping, wrapped)
    except (InvalidUnwrap, ValueError):
        return None


def derive(secret: Secret, purpose: bytes) -> bytes:
    """Return a key for one purpose (HKDF-SHA256)."""
    try:
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    except ImportError as error:
        raise _missing() from error
    return HKDF(SHA256(), KEY_NBYTES, None, purpose).derive(secret.reveal())


def prf(key: bytes, data: bytes) -> bytes:
    """Return 32 bytes that say nothing about `data` without the key (HMAC-SHA256)."""
    return hmac.digest(key, data, "sha256")


def _missing() -> ConfigError:
    return ConfigError(
        "encryption is configured, and cryptography is not installed: "
        "pip install 'kvstore-tiers[security]'"
    )
