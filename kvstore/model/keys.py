"""Block keys: which tokens, in which namespace, after which prefix.

    root  = SHA-256("kvstore.root.v1"  | u32 format version | namespace id | u32 length, cache salt)
    key_i = SHA-256("kvstore.block.v1" | key_{i-1}, or root for i = 0 | u32 n | n tokens | extras)

Integers are little-endian, tokens u32. Extras name what else the KV of the block depends on: the
LoRA adapter, the images under its tokens. Chaining makes a key stand for the whole prefix; a
cryptographic hash makes the salt a boundary between users. The same bytes in every process, on
every machine, in every release: golden vectors in the tests hold that still.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence

from kvstore.model.block import FORMAT_VERSION, KEY_NBYTES, BlockKey, NamespaceId
from kvstore.model.errors import InvalidRequest

_ROOT_TAG = b"kvstore.root.v1"
_BLOCK_TAG = b"kvstore.block.v1"
_NO_EXTRAS = b""


def root_key(namespace_id: NamespaceId, cache_salt: bytes = b"") -> BlockKey:
    """Return the key before the first block of every prefix in this namespace and salt."""
    if len(namespace_id) != KEY_NBYTES:
        raise InvalidRequest(f"a namespace id has {KEY_NBYTES} bytes, not {len(namespace_id)}")
    head = _ROOT_TAG + struct.pack("<I", FORMAT_VERSION) + namespace_id
    salt = struct.pack("<I", len(cache_salt)) + cache_salt
    return BlockKey(hashlib.sha256(head + salt).digest())


def block_key(parent: BlockKey, tokens: Sequence[int], extras: bytes = _NO_EXTRAS) -> BlockKey:
    """Return the key of the block that holds `tokens` after `parent`.

    extras: what `encode_extras` made, or nothing. Raises InvalidRequest for a token outside u32.
    """
    try:
        packed = struct.pack(f"<I{len(tokens)}I", len(tokens), *tokens)
    except struct.error as error:
        raise InvalidRequest("a token id is not an integer in 0..2**32-1") from error
    return BlockKey(hashlib.sha256(_BLOCK_TAG + parent + packed + extras).digest())


def encode_extras(extras: Sequence[tuple[str, bytes]]) -> bytes:
    """Encode (name, value) pairs unambiguously, in the order given; nothing for no pairs."""
    out = bytearray()
    for name, value in extras:
        label = name.encode("utf-8")
        out += struct.pack("<II", len(label), len(value)) + label + value
    return bytes(out)


class KeyChain:
    """The keys of one growing token sequence. It hashes every block once."""

    __slots__ = ("_block_tokens", "_root", "keys")

    def __init__(self, root: BlockKey, block_tokens: int) -> None:
        self._root = root
        self._block_tokens = block_tokens
        self.keys: list[BlockKey] = []

    def update(
        self, tokens: Sequence[int], extras_of: Callable[[int], bytes] | None = None
    ) -> list[BlockKey]:
        """Hash the full blocks of `tokens` that are not in the chain yet; return all its keys.

        tokens: the whole sequence from its start; tokens that were hashed before must not change.
        extras_of: block index -> encoded extras.
        """
        size = self._block_tokens
        for index in range(len(self.keys), len(tokens) // size):
            parent = self.keys[-1] if self.keys else self._root
            block = tokens[index * size : (index + 1) * size]
            self.keys.append(block_key(parent, block, extras_of(index) if extras_of else b""))
        return self.keys
