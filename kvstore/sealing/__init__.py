"""Keys of what is stored, and how long each lives.

    root       a file of 32 bytes, or a command that asks a KMS      never stored beside the data
     `- tenant keys, by epoch   random, wrapped by the root          in each directory and bucket
         `- segment keys        random, wrapped by the tenant's key  in the segment, in the object

A new root rewraps tenant keys and nothing else. A new epoch is for new segments; an old one leaves
with its last segment. Whoever destroys the wrapped tenant keys has destroyed what they opened.

`cryptography` is imported when the first key is made or opened, and not before.
"""

from kvstore.sealing.aead import AeadKey
from kvstore.sealing.keyring import Keyring, Sealing, TenantKey
from kvstore.sealing.open import data_paths, open_root, same_disk
from kvstore.sealing.root import CommandRoot, Erasure, FileRoot, Root, parse_root_key
from kvstore.sealing.secret import Secret

__all__ = [
    "AeadKey",
    "CommandRoot",
    "Erasure",
    "FileRoot",
    "Keyring",
    "Root",
    "Sealing",
    "Secret",
    "TenantKey",
    "data_paths",
    "open_root",
    "parse_root_key",
    "same_disk",
]
