"""The namespaces of a run: records of one size, of sizes that vary, and lossy ones with fine parts.

Every put writes bytes of its own: what is served tells which put it is from. So it shows, too, if a
fine part is served beside the base of another put.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np

from kvstore.model.block import BlockKey, Group, Namespace, NamespaceId, Part
from kvstore.model.checksum import checksum
from tests.lossy import L3, base_header, fine_header

HEAD_NBYTES = 8
_NUMBER = struct.Struct("<Q")
_NUMBER_AT = 40  # in the header of a coded record, where zeros are

FIXED = Namespace(
    16, (Group("full", 20_000), Group("window", 9_000, window_tokens=64)), (("model", "two"),)
)
SHARDED = Namespace(16, (Group("full", 12_288, shards=2),), (("model", "sharded"),))
VARIES = Namespace(16, (Group("full", 16_000, shards=2, varies=True),), (("model", "varies"),))
BASES, FINES = (7_000, 4_000), (5_000, 3_000)
LOSSY = Namespace(
    16,
    (
        Group("full", 16_000, varies=True),
        Group("window", 9_000, window_tokens=64, varies=True),
        Group("full.fine", FINES[0], refines=0, base_nbytes=BASES[0]),
        Group("window.fine", FINES[1], window_tokens=64, refines=1, base_nbytes=BASES[1]),
    ),
    (("model", "lossy"),),
    fidelity="ep",
)
NAMESPACES = (FIXED, VARIES, LOSSY, SHARDED)
SPACES = {namespace.id: namespace for namespace in NAMESPACES}
PARTS = {
    namespace.id: [
        Part(group, shard)
        for group, each in enumerate(namespace.groups)
        for shard in range(each.shards)
    ]
    for namespace in NAMESPACES
}


class Item(NamedTuple):
    """One record's name."""

    namespace_id: NamespaceId
    key: BlockKey
    part: Part


def is_fine(item: Item) -> bool:
    """Say whether a record refines another: nothing is owed of it."""
    return item.part.group in SPACES[item.namespace_id].fine


def base_of(item: Item) -> Item:
    """Return the record that a fine one refines."""
    refines = SPACES[item.namespace_id].groups[item.part.group].refines
    return item._replace(part=Part(refines, item.part.shard))


def size_of(item: Item, block: int, number: int) -> int:
    """Return the size of the record that put `number` makes of a block of a prefix."""
    namespace = SPACES[item.namespace_id]
    most = namespace.record_nbytes(item.part)
    if not namespace.groups[item.part.group].varies:
        return most
    exact = namespace is VARIES or block == 0 or number % 9 == 0
    return most - 64 * ((number + block) % 60) if exact else BASES[item.part.group]


def record_bytes(item: Item, number: int, nbytes: int) -> bytes:
    """Return what put `number` writes: its number, then noise that repeats once."""
    seed = [int.from_bytes(item.key[:8], "little"), number, *item.part]
    head = _head(item, number, nbytes)
    half = np.random.default_rng(seed).bytes((nbytes - len(head) + 1) // 2)
    return head + (2 * half)[: nbytes - len(head)]


def number_of(item: Item, data: bytes) -> int:
    """Return which put says that it has written these bytes."""
    at = _NUMBER_AT if item.namespace_id == LOSSY.id else 0
    return int.from_bytes(data[at : at + HEAD_NBYTES], "little")


def _head(item: Item, number: int, nbytes: int) -> bytes:
    if item.namespace_id != LOSSY.id:
        return _NUMBER.pack(number)
    if is_fine(item):
        base = base_of(item)
        head = fine_header(nbytes, checksum(record_bytes(base, number, BASES[base.part.group])))
    else:
        exact = nbytes != BASES[item.part.group]
        head = base_header(nbytes, form=L3) if exact else base_header(nbytes)
    return head[:_NUMBER_AT] + _NUMBER.pack(number) + head[_NUMBER_AT + _NUMBER.size :]
