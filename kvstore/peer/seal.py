"""Bytes of a bulk connection, encrypted: AES-128-GCM, a key for each connection and direction.

The keys come over the control connection, which is TLS. A piece has at most 1 MiB and ends with its
tag; the n-th piece of a direction has n as its nonce, so a piece that is missing, doubled or moved
is not accepted. A frame is one piece behind its length. Records and `held` have known sizes, so
their pieces have no length in front. A piece never spans two records: it is decrypted straight into
a slot.
"""

from __future__ import annotations

import struct

from kvstore.model.block import Buffer
from kvstore.peer.base import PeerCorrupt, PeerGone
from kvstore.sealing.aead import new_aead

PIECE_NBYTES = 1 << 20
TAG_NBYTES = 16
LENGTH = struct.Struct("<I")
PIECES_MAX = (1 << 32) - 1  # under one key
_NONCE = struct.Struct("<4xQ")


class _Counter:
    """The nonces of one key."""

    def __init__(self) -> None:
        self._next = 0

    def take(self) -> bytes:
        if self._next >= PIECES_MAX:
            raise PeerGone("a bulk connection has used up its key", reason="closed")
        self._next += 1
        return _NONCE.pack(self._next - 1)


class Sealer:
    """Encrypts what one end sends. For one thread at a time. Raises ConfigError without the extra
    [security]."""

    def __init__(self, key: bytes) -> None:
        self._aead, _ = new_aead(key)
        self._nonces = _Counter()

    def seal(self, data: Buffer, target: memoryview) -> memoryview:
        """Encrypt at most PIECE_NBYTES into `target`; return the piece, 16 bytes longer. Raises
        PeerGone after PIECES_MAX."""
        piece = target[: len(data) + TAG_NBYTES]
        self._aead.encrypt_into(self._nonces.take(), data, b"", piece)
        return piece


class Opener:
    """Decrypts what the other end sent, in the order in which it did."""

    def __init__(self, key: bytes) -> None:
        self._aead, self._wrong = new_aead(key)
        self._nonces = _Counter()

    def open(self, piece: Buffer, target: memoryview) -> None:
        """Decrypt into `target`, 16 bytes shorter. Raises PeerCorrupt; then it is undefined."""
        try:
            self._aead.decrypt_into(self._nonces.take(), piece, b"", target)
        except self._wrong as error:
            raise PeerCorrupt(
                "a sealed piece was changed on its way, or is not the peer's", reason="sealed"
            ) from error


def sealed_nbytes(nbytes: int) -> int:
    """Return how many bytes a record of `nbytes` takes in sealed pieces."""
    return nbytes + TAG_NBYTES * -(-nbytes // PIECE_NBYTES)
